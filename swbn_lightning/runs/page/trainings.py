"""Run folders as trainings with their tests, and trainings that differ in their seed alone as groups."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import UnreadableFile, finite, printable, reading
from swbn_lightning.runs.checkpoints import find_source
from swbn_lightning.runs.curves import MEASURES, Accuracy, Group
from swbn_lightning.runs.folders import RESULTS_FILE
from swbn_lightning.runs.page.folders import RunFolder, Series
from swbn_lightning.runs.page.nested import ABSENT, differences
from swbn_lightning.runs.saved_tests import Age, can_start_from, newest, setting_words, when
from swbn_lightning.whiteness.records import CorrelationMap

# What two trainings of the same group may differ in: the seed, where the run is, and what only a test uses.
_NOT_COMPARED = ("seed_everything", "ckpt_path", "config", "run", "trainer.default_root_dir", "data.init_args.test")
_SPEAK_FOR_THEMSELVES = ("norm", "backbone", "class_path", "dataset", "seed_everything")
_MOST_WORDS, _LONGEST = 3, 100  # words of a group's label, and letters of each
Run = TypeVar("Run")


@dataclass
class Training:
    """One training: a folder, or several of which each continued the one before; and its evaluations.

    A test whose training is not among the runs stands here alone, without ``folders``.
    """

    label: str = ""
    folders: list[RunFolder] = field(default_factory=list)
    tests: list[RunFolder] = field(default_factory=list)

    @property
    def last(self) -> RunFolder:
        """The folder that speaks for it: where the training ended, or the test that stands alone."""
        return (self.folders or self.tests)[-1]

    @property
    def kept(self) -> RunFolder | None:
        """The folder whose checkpoint ``--ckpt_path`` of the run's name means: the last part that got as far as one."""
        return next((folder for folder in reversed(self.folders) if folder.rows or folder.checkpoint), None)

    @property
    def config(self) -> dict[str, Any]:
        """Flat. Of a test that stands alone its training's, if it kept them."""
        return self.last.config if self.folders else self.last.training or self.last.config

    @property
    def seed(self) -> Any:
        """None where it is not known: a test's own seed says nothing of its training's."""
        return self.config.get("seed_everything") if self.folders or self.last.training else None

    @property
    def identity(self) -> str:
        """What tells it from others of its group: the seed or, where there is none, which training it was."""
        if type(self.seed) is int:  # False: it was not seeded
            return repr(self.seed)
        return self.label if self.folders else repr(self.last.results.get("tested_checkpoint") or self.label)

    @property
    def compared(self) -> dict[str, Any]:
        """The settings by which it is told from others."""
        return {key: v for key, v in self.config.items() if not any(_is_part(key, own) for own in _NOT_COMPARED)}

    @property
    def everything(self) -> list[RunFolder]:
        """All folders."""
        return [*self.folders, *self.tests]

    @property
    def whiteness(self) -> list[dict[str, Any]]:
        """Rows of ``whiteness.csv``; without what a later folder did not go on from."""
        rows: dict[tuple[int, str], dict[str, Any]] = {}
        for folder in self.folders:
            own = {(row["epoch"], row["layer"]): row for row in folder.whiteness}
            first = min((epoch for epoch, _ in own), default=math.inf)
            rows = {key: row for key, row in rows.items() if key[0] < first} | own
        return [rows[key] for key in sorted(rows, key=lambda key: key[0])]

    @property
    def heatmaps(self) -> dict[str, dict[str, CorrelationMap]]:
        """By layer; of the last folder that has them."""
        return next((folder.heatmaps for folder in reversed(self.folders) if folder.heatmaps), {})

    @property
    def signed(self) -> bool:
        """Whether its heatmaps were asked to be drawn with signs."""
        return self.config.get("whiteness.signed") is True

    def quantities(self, unit: str) -> dict[str, Series]:
        """What was logged, by epochs or steps trained; without what a later folder did not go on from."""
        found: dict[str, Series] = {}
        for folder in self.folders:
            for name, series in folder.metrics.get(unit, {}).items():
                first = min(series)
                found[name] = {x: value for x, value in found.get(name, {}).items() if x < first} | series
        return found


@dataclass
class TrainingGroup:
    """Trainings that differ in their seed alone."""

    label: str
    trainings: list[Training]

    @property
    def trained(self) -> list[Training]:
        """Of each seed the newest training; without tests that stand alone, and where it is not known which it is."""
        known: dict[str, list[Training]] = {}
        for training in self.trainings:
            if training.folders:
                known.setdefault(training.identity, []).append(training)
        chosen = [_newest(own, _age, lambda training: training.last) for own in known.values()]
        return [training for training in self.trainings if any(training is own for own in chosen)]

    @property
    def repeated(self) -> bool:
        """Whether a seed was trained several times."""
        return len(self.trained) < sum(bool(training.folders) for training in self.trainings)


def as_trainings(runs: Sequence[RunFolder]) -> list[Training]:
    """Each training with what continued it and what tested it, in the order of the runs.

    A checkpoint is known by its path or, since runs may have been moved, by the run's name and version in it.
    """
    by_path = {run.path.resolve(): run for run in runs}
    known = [path for path, run in by_path.items() if run.trained]
    sources = {
        path: _source(run, {other: by_path[other] for other in known if other != path}) for path, run in by_path.items()
    }
    # None can have continued itself, whatever the files say.
    sources = {path: source for path, source in sources.items() if source and path not in _chain(source, sources)}
    continued = {sources[path] for path in known if path in sources}
    chains = {path: _chain(path, sources) for path in known if path not in continued}
    made = {path: Training(folders=[by_path[part] for part in chain]) for path, chain in chains.items()}
    for path, run in by_path.items():
        if not run.trained:
            source = sources.get(path)
            run.source = by_path[source] if source else None
            owner = next((last for last, chain in chains.items() if source in chain), path)
            made.setdefault(owner, Training()).tests.append(run)
    trainings = list(made.values())
    for training, label in zip(trainings, _labels([training.last.path for training in trainings]), strict=True):
        training.label = label
    return trainings


def as_groups(trainings: Sequence[Training]) -> list[TrainingGroup]:
    """Trainings by their settings but the seed; those without a readable configuration each by itself."""
    groups: dict[Any, list[Training]] = {}
    for number, training in enumerate(trainings):
        settings = training.compared
        key = tuple(sorted((name, repr(value)) for name, value in settings.items())) if settings else number
        groups.setdefault((key, bool(training.folders)), []).append(training)
    members = list(groups.values())
    known = [own for own in members if own[0].config]
    words = {id(own): text for own, text in zip(known, _words([own[0].compared for own in known]), strict=True)}
    labels = [words.get(id(own)) or _shared(own) for own in members]
    return [
        TrainingGroup(label if labels.count(label) == 1 else f"{label} · {own[0].label}", own)
        for label, own in zip(labels, members, strict=True)
    ]


def curve_groups(groups: Iterable[TrainingGroup]) -> tuple[list[Group], str]:
    """What is drawn as curves, and its unit: steps if anything was logged more than once an epoch, else epochs."""
    trained = [(group.label, group.trained) for group in groups]
    names = [name for names in MEASURES.values() for name in names]
    unit = "epoch"
    for _, trainings in trained:
        for training in trainings:
            by_epoch, by_step = training.quantities("epoch"), training.quantities("step")
            if any(len(by_step.get(name, {})) > len(by_epoch.get(name, {})) for name in names):
                unit = "step"
    made = [Group(label, [training.quantities(unit) for training in own]) for label, own in trained if own]
    return made, unit


def accuracies(groups: Iterable[TrainingGroup]) -> list[Accuracy]:
    """The accuracies of all tests; of several of one seed in one setting the newest of the newest training."""
    groups = list(groups)
    names = setting_names(training for group in groups for training in group.trainings)
    return [
        Accuracy(group.label, setting, test.training.label, value, finite(test.row.get("ci95")))
        for group in groups
        for setting, test in newest_tests(group.trainings, names)
        if (value := finite(test.row.get("accuracy"))) is not None
    ]


class Test(NamedTuple):
    """A row of the results of one test."""

    training: Training
    run: RunFolder
    row: Mapping[str, Any]

    @property
    def age(self) -> Age:
        """As of any test."""
        trained = self.run.source.when if self.run.source else None  # which may be an earlier part of the training
        return Age(self.run.path, repr(self.run.results), trained, self.run.when)


def newest_tests(trainings: Iterable[Training], names: Callable[[Mapping[str, Any]], str]) -> list[tuple[str, Test]]:
    """Of each seed and setting the newest test, where it is known which it is; the rest are told as problems."""
    found: dict[tuple[str, str], list[Test]] = {}
    for training in trainings:
        for run in training.tests:
            for setting, row in {names(row): row for row in run.rows}.items():
                found.setdefault((setting, training.identity), []).append(Test(training, run, row))
    chosen = [
        (setting, _newest(own, lambda test: test.age, lambda test: test.run)) for (setting, _), own in found.items()
    ]
    return [(setting, test) for setting, test in chosen if test is not None]


def setting_names(trainings: Iterable[Training]) -> Callable[[Mapping[str, Any]], str]:
    """How rows of tests are named: as :func:`setting_of`, with queries and seed where tests of that name differ there.

    So two kinds of test are never taken for one, and the usual page has short names.
    """
    rows = [row for training in trainings for run in training.tests for row in run.rows]
    kinds = {(setting_of(row), _whole_setting(row)) for row in rows}
    short = [name for name, _ in kinds]
    return lambda row: _whole_setting(row) if short.count(setting_of(row)) > 1 else setting_of(row)


def setting_of(row: Mapping[str, Any]) -> str:
    """The split, with ways, shots and inference where it is few-shot: ``test, 5-way 1-shot``, ``…, transductive``."""
    split = str(row.get("split", "?"))
    words = f"{split}, {row['ways']}-way {row['shots']}-shot" if "ways" in row and "shots" in row else split
    return (f"{words}, {row['inference']}" if row.get("inference") else words)[: 2 * _LONGEST]


def _whole_setting(row: Mapping[str, Any]) -> str:
    try:
        return setting_words(row)[: 2 * _LONGEST]
    except KeyError:  # not of episodes, or from before all of that was written
        return setting_of(row)


def _age(training: Training) -> Age:
    told = (training.last.results, training.last.environment)
    return Age(training.last.path, repr(told if any(told) else training.label), training.last.when, training.last.when)


def _newest(runs: Sequence[Run], age: Callable[[Run], Age], folder: Callable[[Run], RunFolder]) -> Run | None:
    try:
        return newest(runs, age)
    except InputError as error:
        problems = folder(runs[0]).problems
        problems += [str(error)] if str(error) not in problems else []
        return None


def _source(run: RunFolder, known: Mapping[Path, RunFolder]) -> Path | None:
    def accepted(path: Path) -> bool:
        other = known[path]  # of a training that goes on, what it names is all that is known
        return run.trained or can_start_from(run.training, run.when, other.config, when({}, other.environment))

    try:
        with reading(run.path / RESULTS_FILE):
            return find_source(run.path, run.results, run.config, known, accepted)
    except UnreadableFile as error:  # a path that cannot be one
        run.problems.append(f"what it started from is not known ({error.reason})")
        return None


def _chain(path: Path, sources: Mapping[Path, Path | None]) -> list[Path]:
    """A folder after those that it continued, the first one first."""
    chain = [path]
    while (source := sources.get(chain[0])) is not None and source not in chain:
        chain.insert(0, source)
    return chain


def _labels(paths: Sequence[Path]) -> list[str]:
    """Paths without what all share; the version is left out where a run's name has but one."""
    whole = [path.resolve() for path in paths]
    short = [path.parent if [p.parent for p in whole].count(path.parent) == 1 else path for path in whole]
    shared = 0
    while all(len(path.parts) > shared + 1 for path in short) and len({path.parts[shared] for path in short}) == 1:
        shared += 1
    return [printable("/".join(path.parts[shared:])) for path in short]


def _words(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells each of several configurations from the others, or nothing where that takes many words."""
    columns = differences(settings)
    made = []
    for number in range(len(settings)):
        words = []
        for key, values in columns.items():
            value, name = values[number], key.rpartition(".")[2]
            if value in (None, ABSENT) or value == {}:
                continue
            own = (str(value) if name in _SPEAK_FOR_THEMSELVES else f"{name}={value}")[: _LONGEST + 1]
            words.append(own if len(own) <= _LONGEST else f"{own[:_LONGEST]}…")
        made.append(", ".join(words) if len(words) <= _MOST_WORDS else "")
    return made


def _shared(trainings: Sequence[Training]) -> str:
    """The folder in which all are."""
    labels = [training.label for training in trainings]
    if len(labels) == 1:
        return labels[0]
    shared = os.path.commonpath([t.last.path.resolve() for t in trainings])
    return os.path.commonpath(labels) or printable(Path(shared).name)


def _is_part(key: str, whole: str) -> bool:
    return key == whole or key.startswith(f"{whole}.")
