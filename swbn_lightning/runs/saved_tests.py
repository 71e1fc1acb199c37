"""Tests that saved each of their results: which there are below a path, and each episode's or image's accuracy."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import csv_rows, finite, has_file, printable, reading, whole
from swbn_lightning.runs.folders import EPISODES_FILE, IMAGES_FILE, RESULTS_FILE, RUN_FILE
from swbn_lightning.runs.read import Run, Training, as_trainings, find_runs, newest, read_runs
from swbn_lightning.runs.settings import differences

_ROUNDED = 1e-6  # which an accuracy may be that was computed twice
_MOST_SHOWN = 4  # settings that differ


@dataclass(frozen=True)
class Unit:
    """What tests consist of, each with an accuracy of its own."""

    unit: str  # "episode": a column of the file; in results.json are their number ("episodes") and "episodes_id"
    file: str
    columns: tuple[str, ...]
    accuracy: Callable[[Mapping[str, str]], float]  # of a row of the file
    whole: bool  # whether numbers run from 0, so that a shorter test is the beginning of a longer one
    chosen_by: str  # what may differ between two tests of one setting, in words

    @property
    def units(self) -> str:
        """More than one of them."""
        return f"{self.unit}s"


@dataclass(frozen=True)
class SavedTest:
    """One evaluation with the accuracy of each of its episodes or images."""

    run: Run
    training: Training
    setting: str  # as "test, 5-way 1-shot, 15 queries, seed 0", and the head; or "test, 10 classes"
    kind: Unit
    tested_id: str  # equal where an episode or image of the same number is the same
    accuracies: tuple[float, ...]  # by its number; of an image 1 or 0
    head: str = ""  # of a model whose head is chosen for the test

    @property
    def any_head(self) -> str:
        """The setting without the head."""
        return self.setting.removesuffix(f", {self.head}") if self.head else self.setting


def find_tests(path: Path) -> dict[str, list[SavedTest]]:
    """Tests in a folder and below, by setting; of each training seed the newest, seeds in order.

    A training without a seed is none of the others; such trainings come last.

    Raises:
        InputError: no such folder, no test in it that saved its episodes or images, an unreadable file of a test,
            trainings that differ in more than their seeds, or several tests of which the newest is not known.
    """
    folders = find_runs([path])
    found = tests_of(as_trainings(read_runs(folders)), path)
    if not found:
        raise InputError(
            f"compare: {path} holds no test (runs: {len(folders)}, none with {EPISODES_FILE} or {IMAGES_FILE}). "
            "A test lies under its own run.name: swbn test with --config VERSION/config.yaml of the run, or --run.name."
        )
    return found


def tests_of(trainings: Iterable[Training], path: Path) -> dict[str, list[SavedTest]]:
    """The same of trainings that were read already; ``path`` is what a message names.

    Raises:
        InputError: as :func:`find_tests`, but for no tests.
    """
    found: dict[str, list[SavedTest]] = {}
    for own in trainings:
        for run in own.tests:
            if (test := _read(run, own)) is not None:
                found.setdefault(test.setting, []).append(test)
    return {setting: _newest_of_each_seed(path, own) for setting, own in found.items()}


def setting_words(row: Mapping[str, Any]) -> str:
    """What has to be equal for tests to be compared: ``test, 5-way 1-shot, 15 queries, seed 0``; ``test, 10 classes``.

    Raises:
        KeyError: the row of ``results.json`` is none of such a test.
    """
    if "ways" not in row:
        return f"{row['split']}, {row['classes']} classes"
    words = f"{row['split']}, {row['ways']}-way {row['shots']}-shot, {row['queries']} queries, seed {row['seed']}"
    return words + how_classified(row)


def how_classified(row: Mapping[str, Any]) -> str:
    """What a test adds to its setting's name: ``, transductive``, and the head where it was chosen for the test.

    Before these the data, where they are others than those of the training: ``, on cub``.
    """
    other_data = f", on {row['data']}" if row.get("trained_on") and row.get("data") else ""
    return other_data + "".join(f", {row[key]}" for key in ("inference", "head") if row.get(key))


def unit_saved(folder: Path) -> Unit | None:
    """What the evaluation in a run's folder saved; None where it saved nothing to compare."""
    return next((kind for kind in UNITS if has_file(folder, (kind.file,))), None)


def read_accuracies(folder: Path, kind: Unit) -> tuple[float, ...]:
    """The accuracy of every episode or image of the evaluation in a run's folder, in the order of their numbers.

    Raises:
        InputError: a file that is not such a list.
    """
    file, unit = folder / kind.file, kind.unit
    found: dict[int, tuple[int, float]] = {}
    with reading(file):
        for line, row in csv_rows(file, (unit, *kind.columns)):
            number = row[unit]
            if not (number.isascii() and number.isdecimal()):
                raise InputError(f"line {line}: {number!r} is not the number of an {unit}")
            if (place := whole(number)) in found:
                raise InputError(f"line {line}: {unit} {place} stands in line {found[place][0]}, too")
            try:
                found[place] = line, kind.accuracy(row)
            except InputError as error:
                raise InputError(f"line {line}: {error}") from error
        for place, (line, _) in found.items() if kind.whole else ():
            if place >= len(found):
                raise InputError(f"line {line}: {unit} {place} of {len(found)}, which should be numbered from 0")
    return tuple(found[place][1] for place in sorted(found))


def _of_episode(row: Mapping[str, str]) -> float:
    accuracy = finite(row["accuracy"])
    if accuracy is None or not 0 <= accuracy <= 1:
        raise InputError(f"the accuracy {row['accuracy']!r} is not a number from 0 to 1")
    return accuracy


def _of_image(row: Mapping[str, str]) -> float:
    return float(whole(row["class"]) == whole(row["predicted"]))


EPISODES = Unit(
    "episode", EPISODES_FILE, ("accuracy",), _of_episode, True,
    "their classes, images a class, image files or seed of the episodes (data.eval_seed) differ",
)  # fmt: skip
IMAGES = Unit(
    "image", IMAGES_FILE, ("class", "predicted"), _of_image, False,
    "their classes, number of images or the seeds that chose them differ",
)  # fmt: skip
UNITS = (EPISODES, IMAGES)


def _newest_of_each_seed(path: Path, tests: list[SavedTest]) -> list[SavedTest]:
    _check_that_only_seeds_differ(path, tests)  # all: an older training of the same seed may be another one
    by_seed: dict[int | str, list[SavedTest]] = {}
    for test in tests:
        by_seed.setdefault(test.training.identity, []).append(test)
    ordered = sorted(by_seed, key=lambda key: (isinstance(key, str), key))
    return [newest(by_seed[key], lambda test: test.run) for key in ordered]


def _read(run: Run, training: Training) -> SavedTest | None:
    kind = unit_saved(run.folder)
    if kind is None:
        return None
    for name in (RUN_FILE, RESULTS_FILE):
        if name in run.unreadable:
            raise run.unreadable[name]
    accuracies, file = read_accuracies(run.folder, kind), run.folder / kind.file
    with reading(run.folder / RESULTS_FILE):
        (row,) = run.results["results"]
        tested_id, told = row[f"{kind.units}_id"], row[kind.units]
        if not (isinstance(tested_id, str) and tested_id):
            raise InputError(f"its {kind.units}_id is {tested_id!r}, not a text that says which {kind.units} it tested")
        setting = printable(setting_words(row))
    if told != len(accuracies) or not accuracies:
        raise InputError(f"{file} holds {len(accuracies)} {kind.units}, {RESULTS_FILE} says {told}.")
    accuracy, mean = finite(row.get("accuracy", fmean(accuracies))), fmean(accuracies)
    if accuracy is None or abs(accuracy - mean) > _ROUNDED:
        raise InputError(
            f"{file} has a mean accuracy of {mean!r}, and {RESULTS_FILE} says {row['accuracy']!r}: one of the two was "
            "changed. Put the files of that test back, or test again."
        )
    head = printable(row.get("head") or "")
    return SavedTest(run, training, setting, kind, tested_id, accuracies, head)


def _check_that_only_seeds_differ(path: Path, tests: list[SavedTest]) -> None:
    first = tests[0]
    unknown: dict[int | str, str | None] = {}
    for test in tests:
        own, checkpoint = test.training, test.run.checkpoint
        if not own.known and unknown.setdefault(own.identity, checkpoint) != checkpoint:
            raise InputError(
                f"compare: {path} holds tests of {unknown[own.identity]} and {checkpoint}, which do not say what run "
                f"made them: no seed is known but the test's, here {own.seed} for both. Give each of these as a path "
                "of its own, or test with the training's --seed_everything."
            )
        found = differences([first.training.settings, own.settings])
        if found or test.tested_id != first.tested_id:
            shown = [f"{key}: {a!r} and {b!r}"[:200] for key, (a, b) in list(found.items())[:_MOST_SHOWN]]
            shown = shown or [f"other test {test.kind.units}"]
            raise InputError(
                f"compare: {path} holds different trainings tested as {test.setting}, those of {first.run.folder} and "
                f"{test.run.folder} ({'; '.join(shown)}). Runs under one path may differ in their seeds only; give "
                "each of these as a path of its own."
            )
