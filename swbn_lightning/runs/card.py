"""The card of a trained model: what it is, how to load it, figures with intervals, data and settings, as Markdown."""

import contextlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import finite, has_file
from swbn_lightning.files.writing import markdown_text
from swbn_lightning.runs.checkpoints import read_checkpoint
from swbn_lightning.runs.folders import run_folder_of
from swbn_lightning.runs.intervals import percent
from swbn_lightning.runs.read import FILES, Run, find_runs, read_runs
from swbn_lightning.runs.record import Record
from swbn_lightning.runs.saved_tests import setting_words
from swbn_lightning.runs.trained_data import data_facts, plain_part

CARD_FILE = "card.md"  # beside a checkpoint
_TEMPLATE = "card.md.jinja"
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_OWN = ("fewshot", "classification")  # packages whose models are known by their short names
_SETTINGS = ("model.", "data.", "seed_everything", "trainer.max_epochs", "trainer.max_steps", "trainer.precision")
_MOST_CLASSES = 100
_NONE = "–"


def card_of(checkpoint: Path, exported: bool = False) -> str:
    """The card of a checkpoint, which may be anybody's.

    Args:
        checkpoint: the file; figures and environment come from the run in whose folder it lies.
        exported: the card of an export, which has the tests of the checkpoint too.

    Raises:
        InputError: as :func:`~swbn_lightning.runs.checkpoints.read_checkpoint`.
    """
    content = read_checkpoint(checkpoint)
    made, record, facts = plain_part(content, "hyper_parameters"), Record.of(content.get("run")), data_facts(content)
    told = content.get("model_class")
    package, _, kind = told.rpartition(".") if isinstance(told, str) and _CLASS.fullmatch(told) else ("", "", "Model")
    own = _run_of(checkpoint)
    if own and record and own.id != record.id:  # it only lies there
        own = None
    tests = _tests(own, checkpoint) if own and exported else []
    validated = [row for row in own.rows if row.get("step") == content.get("global_step", -1)] if own else []
    rows = [*tests, *validated]
    settings = record.settings if record else {}
    backbone, norm = (markdown_text(made.get(name, "?")) for name in ("backbone", "norm"))
    return _template().render(
        exported=exported,
        file=checkpoint.name,
        few_shot=any("ways" in row for row in rows),
        title=f"{kind}, {backbone}, {norm}",
        summary=f"A {kind} with the backbone {backbone} and the norm {norm}, trained with swbn_lightning.",
        package=package.partition(".")[0] if package.partition(".")[0] in _OWN else package,
        kind=kind,
        named_backbone=isinstance(made.get("backbone"), str),
        images=_images(facts),
        figures=[line for row in rows for line in _figures(row)],
        tested=bool(tests),
        data=_data(facts),
        settings=[(markdown_text(k), markdown_text(v)) for k, v in settings.items() if k.startswith(_SETTINGS)],
        environment=", ".join(
            f"{markdown_text(name)} {markdown_text(value)}"
            for name, value in (own.environment if own else {}).items()
            if name != "seed"
        ),
    )


def _run_of(checkpoint: Path) -> Run | None:
    folder = run_folder_of(checkpoint.absolute())
    return read_runs([folder])[0] if folder and has_file(folder, FILES) else None


def _tests(training: Run, checkpoint: Path) -> list[dict[str, Any]]:
    """Rows of the tests of this checkpoint that lie under the same name; of each setting the newest."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(InputError):  # more than anybody reads
        runs = read_runs(find_runs([training.folder.parent]))
        tests = [(run.started, run) for run in runs if run.kind == "test" and run.origin == training.id and run.started]
        for _, run in sorted(tests, key=lambda test: test[0]):
            if training.id and Path(run.checkpoint or "").name == checkpoint.name:
                found |= {_words(row): row for row in run.rows}
    return list(found.values())


def _words(row: Mapping[str, Any]) -> str:
    try:
        return markdown_text(setting_words(row))
    except KeyError:  # not of episodes
        return markdown_text(row.get("split", _NONE))


def _figures(row: Mapping[str, Any]) -> list[list[str]]:
    """The lines of a result: a base classifier has one of held-out images, too."""
    lines = [[_words(row), *map(_count, map(row.get, ("classes", "images", "episodes"))), _percent(row)]]
    if "held_out_accuracy" in row:
        words = "held-out images of the training classes"
        lines.append([words, _NONE, _count(row.get("held_out_images")), _NONE, _percent(row, "held_out_")])
    return lines


def _count(value: Any) -> str:
    return f"{value:,}" if type(value) is int else _NONE


def _percent(row: Mapping[str, Any], of: str = "") -> str:
    accuracy, ci95 = (finite(row.get(f"{of}{name}")) for name in ("accuracy", "ci95"))
    return _NONE if accuracy is None else percent(accuracy, ci95)


def _images(facts: Mapping[str, Any]) -> str:
    size, mean, std = facts.get("image_size"), facts.get("mean"), facts.get("std")
    if type(size) is not int or not isinstance(mean, list) or not isinstance(std, list):
        return ""
    values = markdown_text(f"values in [0, 1], minus {mean}, divided by {std}, per channel")
    return f"{size}x{size} pixels: {values}"


def _data(facts: Mapping[str, Any]) -> list[str]:
    lines = []
    splits = facts.get("splits")
    for split, own in splits.items() if isinstance(splits, dict) else ():
        classes = own.get("classes") if isinstance(own, dict) else None
        if not isinstance(classes, list) or type(own.get("images")) is not int:
            continue
        names = ", ".join(map(str, classes[:_MOST_CLASSES]))
        more = f" and {len(classes) - _MOST_CLASSES} more" if len(classes) > _MOST_CLASSES else ""
        name = markdown_text(f"{split} ({own.get('name')})")
        lines.append(f"{name}: {own['images']:,} images of {len(classes):,} classes: {markdown_text(names)}{more}.")
    return lines


@cache
def _template() -> Template:
    made = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True)
    return made.get_template(_TEMPLATE)
