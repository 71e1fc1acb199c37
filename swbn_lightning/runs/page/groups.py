"""Trainings as lines of a page: their labels, those that differ in their seeds only, and which test counts."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import finite, printable
from swbn_lightning.runs.curves import Accuracy, Group
from swbn_lightning.runs.measured import LOGGED, Measured, measured
from swbn_lightning.runs.read import Run, Training, newest
from swbn_lightning.runs.saved_tests import how_classified, setting_words
from swbn_lightning.runs.settings import ABSENT, differences, group_key

_SPEAK_FOR_THEMSELVES = ("norm", "backbone", "class_path", "dataset")
_MOST_WORDS, _LONGEST = 3, 100  # words of a group's label, and letters of each
Item = TypeVar("Item")


@dataclass(eq=False)
class Line:
    """A training as the page shows it."""

    training: Training
    folder: str  # without what all have in common
    label: str  # its one name on the page
    measured: Measured


@dataclass(eq=False)
class LineGroup:
    """Trainings that differ in their seeds only."""

    label: str
    lines: list[Line]

    def trained(self) -> list[Line]:
        """Of each seed the newest training; without tests that stand alone, and where it is not known which it is."""
        known: dict[int | str, list[Line]] = {}
        for line in self.lines:
            if line.training.parts:
                known.setdefault(line.training.identity, []).append(line)
        chosen = {_newest(own, lambda line: line.training.last) for own in known.values()}
        return [line for line in self.lines if line in chosen]

    @property
    def repeated(self) -> bool:
        """Whether a seed was trained several times."""
        return len(self.trained()) < sum(bool(line.training.parts) for line in self.lines)


class Tested(NamedTuple):
    """A row of the results of one test."""

    line: Line
    run: Run
    row: Mapping[str, Any]


def as_lines(trainings: Sequence[Training]) -> list[Line]:
    """With what they measured, under the names of their folders."""
    folders = _folders([training.last.folder for training in trainings])
    return [Line(own, path, path, measured(own.parts)) for own, path in zip(trainings, folders, strict=True)]


def as_groups(lines: Sequence[Line]) -> list[LineGroup]:
    """Trainings by their settings without the seed; those of which no settings are known each by itself.

    Where settings tell the groups apart, the lines get their names from them, too.
    """
    groups: dict[Any, list[Line]] = {}
    for number, line in enumerate(lines):
        settings = line.training.settings
        groups.setdefault((group_key(settings) if settings else number, line.training.known), []).append(line)
    members = list(groups.values())
    known = [own[0] for own in members if own[0].training.settings]
    words = dict(zip(known, _words(known), strict=True))
    labels = [words.get(own[0]) or _shared(own) for own in members]
    made = []
    for label, own in zip(labels, members, strict=True):
        group = LineGroup(label if labels.count(label) == 1 else f"{label} · {own[0].folder}", own)
        seeds = [line.training.seed if line.training.known else None for line in own]
        for line, seed in zip(own, seeds, strict=True):
            if len(own) == 1:
                line.label = group.label
            elif words.get(own[0]):
                told = seed is not None and seeds.count(seed) == 1
                line.label = f"{group.label}, seed {seed}" if told else f"{group.label} · {line.folder}"
        made.append(group)
    return made


def curve_groups(groups: Iterable[LineGroup]) -> tuple[list[Group], str]:
    """What is drawn as curves, and its unit: steps if anything was logged more than once an epoch, else epochs."""
    trained = [(group.label, group.trained()) for group in groups]
    logged = [line.measured.logged for _, lines in trained for line in lines]
    often = any(len(own["step"].get(name, {})) > len(own["epoch"].get(name, {})) for own in logged for name in LOGGED)
    unit = "step" if often else "epoch"
    return [Group(label, [line.measured.logged[unit] for line in own]) for label, own in trained if own], unit


def accuracies(groups: Sequence[LineGroup]) -> list[Accuracy]:
    """The accuracies of all tests; of several of one seed in one setting the newest of the newest training."""
    names = setting_names(line for group in groups for line in group.lines)
    return [
        Accuracy(group.label, setting, test.line.label, value, finite(test.row.get("ci95")))
        for group in groups
        for setting, test in newest_tests(group.lines, names)
        if (value := finite(test.row.get("accuracy"))) is not None
    ]


def newest_tests(lines: Iterable[Line], names: Callable[[Mapping[str, Any]], str]) -> list[tuple[str, Tested]]:
    """Of each seed and setting the newest test, where it is known which it is; the rest are told as problems."""
    found: dict[tuple[str, int | str], list[Tested]] = {}
    for line in lines:
        for run in line.training.tests:
            for setting, row in {names(row): row for row in run.rows}.items():
                found.setdefault((setting, line.training.identity), []).append(Tested(line, run, row))
    chosen = [(setting, _newest(own, lambda test: test.run)) for (setting, _), own in found.items()]
    return [(setting, test) for setting, test in chosen if test is not None]


def setting_names(lines: Iterable[Line]) -> Callable[[Mapping[str, Any]], str]:
    """How rows of tests are named: as :func:`setting_of`, with queries and seed where tests of that name differ there.

    So two kinds of test are never taken for one, and the usual page has short names.
    """
    rows = [row for line in lines for run in line.training.tests for row in run.rows]
    short = [name for name, _ in {(setting_of(row), _whole_setting(row)) for row in rows}]
    return lambda row: _whole_setting(row) if short.count(setting_of(row)) > 1 else setting_of(row)


def setting_of(row: Mapping[str, Any]) -> str:
    """The split, with ways, shots, inference and head where it is few-shot: ``test, 5-way 1-shot, transductive``."""
    split = str(row.get("split", "?"))
    words = f"{split}, {row['ways']}-way {row['shots']}-shot" if "ways" in row and "shots" in row else split
    return (words + how_classified(row))[: 2 * _LONGEST]


def _whole_setting(row: Mapping[str, Any]) -> str:
    try:
        return setting_words(row)[: 2 * _LONGEST]
    except KeyError:  # not of a test
        return setting_of(row)


def _newest(items: Sequence[Item], run: Callable[[Item], Run]) -> Item | None:
    try:
        return newest(items, run)
    except InputError as error:
        problems = run(items[0]).problems
        problems += [str(error)] if str(error) not in problems else []
        return None


def _folders(paths: Sequence[Path]) -> list[str]:
    """Paths without what all share; the version is left out where a run's name has but one."""
    whole = [path.resolve() for path in paths]
    short = [path.parent if [p.parent for p in whole].count(path.parent) == 1 else path for path in whole]
    shared = 0
    while all(len(path.parts) > shared + 1 for path in short) and len({path.parts[shared] for path in short}) == 1:
        shared += 1
    return [printable("/".join(path.parts[shared:])) for path in short]


def _words(lines: Sequence[Line]) -> list[str]:
    """What tells each of several configurations from the others, or nothing where that takes many words."""
    columns = differences([line.training.settings for line in lines])
    made = []
    for number in range(len(lines)):
        words = []
        for key, values in columns.items():
            value, name = values[number], key.rpartition(".")[2]
            if value != ABSENT:
                own = (str(value) if name in _SPEAK_FOR_THEMSELVES else f"{name}={value}")[: _LONGEST + 1]
                words.append(own if len(own) <= _LONGEST else f"{own[:_LONGEST]}…")
        made.append(", ".join(words) if len(words) <= _MOST_WORDS else "")
    return made


def _shared(lines: Sequence[Line]) -> str:
    """The folder in which all are."""
    folders = [line.folder for line in lines]
    if len(folders) == 1:
        return folders[0]
    shared = os.path.commonpath([line.training.last.folder.resolve() for line in lines])
    return os.path.commonpath(folders) or printable(Path(shared).name)
