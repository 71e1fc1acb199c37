"""What a study consists of: configurations, and the cells of its grid, each one training and its tests."""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import folders_with, read_json, read_yaml
from swbn_lightning.norms import NormFactory

SETTINGS_FILE = "settings.json"  # in a cell's folder: what is trained there

# What the paper's tables call them (paper_results.csv).
METHODS = {"MatchingNetwork": "MN", "PrototypicalNetwork": "PN", "CrossAttentionNetwork": "CAN"}
DATASETS = {"CIFAR10DataModule": "cifar-10", "CIFAR100DataModule": "cifar-100", "ImageNetDataModule": "imagenet"}
# What --set leaves to the study's own options, or to the configuration.
_NOT_SET = (
    *("config", "run", "seed_everything", "ckpt_path", "trainer", "model", "model.class_path", "model.norm"),
    *("model.norm_args", "model.backbone", "model.backbone_args", "data", "data.class_path", "data.root"),
    "data.test.shots",
)
_WHOLE = ("trainer", "model", "data")  # of these the parts may be set
_TEST_ONLY = "data.test."  # settings that training does not depend on


@dataclass(frozen=True)
class Variant:
    """A norm or a network with options of its own, as ``swbn-fro:step_size=1e-4,num_groups=2``."""

    label: str  # as it was given
    name: str  # the part before the colon
    options: dict[str, Any] | None  # the part after it; None where nothing was said
    given_as_class: bool = False  # of a network that only the configuration can give: no name stands for it

    @classmethod
    def parse(cls, label: str) -> "Variant":
        """``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``; values as JSON writes them, or words.

        Raises:
            InputError: an option without ``=``.
        """
        name, colon, given = label.partition(":")
        pairs = [item.partition("=") for item in given.split(",") if item]
        if any(not equals for _, equals, _ in pairs) or bool(colon) != bool(pairs):
            raise InputError(f"options of {name} are given as {name}:KEY=VALUE,KEY=VALUE, got {label!r}.")
        return cls(label, name, {key: _value(text) for key, _, text in pairs} if pairs else None)


@dataclass(frozen=True)
class Experiment:
    """A configuration file: its path as it was given, and what it says."""

    path: str
    content: dict[str, Any]

    @classmethod
    def read(cls, path: str) -> "Experiment":
        """Read one.

        Raises:
            InputError: no such file, or one that does not say which model and data by ``class_path``.
        """
        try:
            content = read_yaml(Path(path))
        except InputError as error:
            raise InputError(f"configuration {error}") from error
        parts = [content.get(part) for part in ("model", "data")]
        if not all(isinstance(part, dict) and "class_path" in part for part in parts):
            raise InputError(f"configuration {path} must give model and data, each with class_path and init_args.")
        return cls(path, content)

    @property
    def few_shot(self) -> bool:
        """Whether its data are episodes, which have settings for each split: only such a test has shots."""
        return any(isinstance(self.init_args("data").get(split), dict) for split in ("train", "val", "test"))

    @property
    def method(self) -> str:
        """The model's class, or what the paper's few-shot table calls it."""
        name = self.content["model"]["class_path"].rpartition(".")[2]
        return METHODS.get(name, name)

    @property
    def dataset(self) -> str:
        """The data set's name, or what the paper's tables call it."""
        name = self.content["data"]["class_path"].rpartition(".")[2]
        return self.init_args("data").get("dataset", DATASETS.get(name, name))

    def init_args(self, part: str) -> dict[str, Any]:
        """Of ``model`` or ``data``."""
        return self.content[part].get("init_args") or {}

    def network(self, label: str | None) -> tuple[Variant, dict[str, Any] | None]:
        """A network by its label (None: the configuration's own) and its options.

        Another than the configuration's, or one that is given with options, has those it is given, and of the
        configuration's only ``in_channels``, which is a fact of the images.
        """
        args = self.init_args("model")
        own, given = args.get("backbone", "resnet12"), args.get("backbone_args") or {}
        if label is None and isinstance(own, dict):
            name = str(own.get("class_path")).rpartition(".")[2]
            return Variant(name, name, None, given_as_class=True), given or None
        variant = Variant.parse(own if label is None else label)
        if variant.name != own or variant.options is not None:
            given = {**{k: v for k, v in given.items() if k == "in_channels"}, **(variant.options or {})}
        return variant, given or None

    def norm(self, label: str) -> tuple[Variant, dict[str, Any] | None]:
        """A norm by its label and its options: the configuration's are its own norm's, not another's."""
        args, variant = self.init_args("model"), Variant.parse(label)
        if variant.options is None and variant.name == args.get("norm", "bn"):
            return variant, args.get("norm_args") or None
        return variant, variant.options


@dataclass(frozen=True)
class Test:
    """One evaluation of a trained network on the test classes or images."""

    shots: int | None  # of few-shot only; None for the configuration's
    settings: tuple[str, ...]  # that only a test depends on, as data.test.episodes=1000
    configured: Any  # what the configuration says of the test

    @property
    def arguments(self) -> list[str]:
        """For ``swbn test``."""
        shots = [f"--data.test.shots={self.shots}"] if self.shots is not None else []
        return [*shots, *(f"--{setting}" for setting in self.settings)]

    @property
    def name(self) -> str:
        """Its folder in the cell's."""
        return f"test-{_digest([self.configured, sorted(self.arguments)])}"


@dataclass(frozen=True)
class Cell:
    """One training and its tests."""

    experiment: Experiment
    network: Variant
    network_args: dict[str, Any] | None
    norm: Variant
    norm_args: dict[str, Any] | None
    seed: int  # seed_everything
    settings: tuple[str, ...]  # of training, as trainer.max_epochs=2, over the configuration's
    tests: tuple[Test, ...]
    root: str | None  # folder of the data set's files, if it needs one
    runs: Path  # folder of all runs
    place: str | None = None  # below it, where it was found under another name than the usual one

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """All that the training depends on: the configuration as it is trained, and the settings over it."""
        content = copy.deepcopy(self.experiment.content)
        for not_of_training in ("run", "seed_everything"):
            content.pop(not_of_training, None)
        network = () if self.network.given_as_class else ("backbone", "backbone_args")
        for name in (*network, "norm", "norm_args"):
            (content["model"].get("init_args") or {}).pop(name, None)
        (content["data"].get("init_args") or {}).pop("test", None)
        return {
            "config": content,
            "backbone": [self.network.name, self.network_args],
            "norm": [self.norm.name, self.norm_args],
            "seed": self.seed,
            "root": str(Path(self.root).resolve()) if self.root else None,
            "settings": sorted(self.settings),
        }

    @property
    def key(self) -> str:
        """Of :attr:`identity`: the same settings have the same key, whatever the name of the file that gives them."""
        return _digest(self.identity)

    @property
    def usual_place(self) -> str:
        """The name of its runs, below the folder of all runs, if nobody renamed it."""
        network = self.network.name.replace("/", "-")
        return f"{Path(self.experiment.path).stem}/{network}/{self.norm.name}/seed{self.seed}-{self.key}"

    @property
    def name(self) -> str:
        """The name of its runs, below the folder of all runs."""
        return self.place or self.usual_place

    @property
    def folder(self) -> Path:
        """Where its runs are."""
        return self.runs / self.name

    @property
    def dataset(self) -> str:
        """The configuration's, or the one that was set in its place."""
        given = [setting.partition("=") for setting in self.settings]
        return next((value for key, _, value in given if key == "data.dataset"), self.experiment.dataset)

    def arguments(self, run: str = "") -> list[str]:
        """For any command; ``run`` is the part of the run's name below the cell's."""
        name = f"{self.name}/{run}" if run else self.name
        network = [f"--model.backbone={self.network.name}", f"--model.backbone_args={json.dumps(self.network_args)}"]
        return [
            f"--config={self.experiment.path}",
            f"--run.root={self.runs}",
            f"--run.name={name}",
            f"--seed_everything={self.seed}",
            *([] if self.network.given_as_class else network),
            f"--model.norm={self.norm.name}",
            f"--model.norm_args={json.dumps(self.norm_args)}",
            *([f"--data.root={self.root}"] if self.root else []),
            *(f"--{setting}" for setting in self.settings),
        ]


def short_names(configs: Iterable[str]) -> dict[str, str]:
    """Of each configuration file as much of its path's end as tells it from the others, without ``.yaml``."""
    parts = {config: Path(config).with_suffix("").parts for config in configs}
    names = {}
    for config, own in parts.items():
        others = [other for given, other in parts.items() if given != config]
        length = next((n for n in range(1, len(own)) if all(own[-n:] != o[-n:] for o in others)), len(own))
        names[config] = "/".join(own[-length:])
    return names


def grid(
    experiments: Sequence[Experiment],
    networks: Sequence[str | None],
    norms: Sequence[str],
    seeds: Sequence[int],
    shots: Sequence[int],
    settings: Sequence[str],
    root: str | None,
    runs: Path,
) -> list[Cell]:
    """All cells, seed after seed, so that norms can be compared early; what is given twice is there once.

    Raises:
        InputError: a setting that is not ``KEY=VALUE`` or that is the study's own; shots without a few-shot
            configuration; an unknown norm or option of one.
    """
    _check(settings, shots, experiments)
    _check_norms(norms, settings, experiments)
    by_key = {setting.partition("=")[0]: setting for setting in map(_short, settings)}  # the last of a key
    settings = list(by_key.values())
    of_test = tuple(setting for setting in settings if setting.startswith(_TEST_ONLY))
    of_training = tuple(setting for setting in settings if setting not in of_test)
    cells = []
    for seed in dict.fromkeys(seeds):
        for experiment in {experiment.path: experiment for experiment in experiments}.values():
            wanted: Sequence[int | None] = list(dict.fromkeys(shots)) if shots and experiment.few_shot else [None]
            configured = experiment.init_args("data").get("test")
            tests = tuple(Test(number, of_test, configured) for number in wanted)
            for network in dict.fromkeys(networks or [None]):
                for norm in dict.fromkeys(norms):
                    parts = *experiment.network(network), *experiment.norm(norm)
                    cells.append(Cell(experiment, *parts, seed, of_training, tests, root, runs))
    return _where_they_are(cells, runs)


def _where_they_are(cells: Sequence[Cell], runs: Path) -> list[Cell]:
    """The cells with the folders that hold their settings, which may have been renamed and moved below ``runs``."""
    keys: dict[str, str] = {}  # by place
    for folder in sorted(folders_with(runs, (SETTINGS_FILE,))) if runs.is_dir() else ():
        with contextlib.suppress(InputError):  # of a stranger, or half a file: then it is none of these
            keys[str(folder.relative_to(runs))] = _digest(read_json(folder / SETTINGS_FILE).get("settings"))
    found = []
    for cell in cells:
        usual, own = cell.usual_place, [place for place, key in keys.items() if key == cell.key]
        free = usual if usual not in keys else f"{usual}-again"  # another one has its name now
        found.append(dataclasses.replace(cell, place=usual if usual in own else next(iter(own), free)))
    return found


def _check(settings: Sequence[str], shots: Sequence[int], experiments: Sequence[Experiment]) -> None:
    for setting in settings:
        key, equals, _ = setting.partition("=")
        if not equals or not key or key.startswith("-"):
            raise InputError(f"--set takes KEY=VALUE, as trainer.max_epochs=2, got {setting!r}.")
        plain = _short(key)
        if any(plain == own or (plain.startswith(f"{own}.") and own not in _WHOLE) for own in _NOT_SET):
            raise InputError(
                f"--set cannot change {key}: use --networks, --norms, --seeds, --shots, --root or --runs, or another "
                "configuration."
            )
    if shots and not any(experiment.few_shot for experiment in experiments):
        raise InputError("--shots are of few-shot configurations, and none of these is one.")


def _check_norms(norms: Sequence[str], settings: Sequence[str], experiments: Sequence[Experiment]) -> None:
    """Before hours of training, if the trainings import no module that may register others."""
    imports = any(setting.startswith("imports=") for setting in settings)
    if not imports and not any(experiment.content.get("imports") for experiment in experiments):
        for norm in map(Variant.parse, norms):
            NormFactory(norm.name, **(norm.options or {}))


def _short(setting: str) -> str:
    """``data.init_args.root=DIR`` as ``data.root=DIR``, which means the same."""
    return re.sub(r"^(model|data)\.init_args\.", r"\1.", setting)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # a word, as in step_size=auto


def _digest(content: Any) -> str:
    plain = json.loads(json.dumps(content, default=str))  # keys become texts before they are sorted, as in a file
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:12]
