"""Tests of episodes: which there are below a path, and the accuracy of each episode."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import csv_rows, finite, has_file, printable, reading, whole
from swbn_lightning.runs.folders import EPISODES_FILE, RESULTS_FILE, RUN_FILE
from swbn_lightning.runs.read import Run, Training, as_trainings, find_runs, newest, read_runs
from swbn_lightning.runs.settings import differences

_ROUNDED = 1e-6  # which an accuracy may be that was computed twice
_MOST_SHOWN = 4  # settings that differ


@dataclass(frozen=True)
class SavedTest:
    """One evaluation with the accuracy of each of its episodes."""

    run: Run
    training: Training
    setting: str  # as "test, 5-way 1-shot, 15 queries, seed 0", and the head
    episodes_id: str  # equal where episode i is of the same images
    accuracies: tuple[float, ...]  # by the episode's number
    head: str = ""  # of a model whose head is chosen for the test

    @property
    def any_head(self) -> str:
        """The setting without the head."""
        return self.setting.removesuffix(f", {self.head}") if self.head else self.setting


def find_tests(path: Path) -> dict[str, list[SavedTest]]:
    """Tests of episodes in a folder and below, by setting; of each training seed the newest, seeds in order.

    A training without a seed is none of the others; such trainings come last.

    Raises:
        InputError: no such folder, none of a test of episodes in it, an unreadable file of a test, trainings that
            differ in more than their seeds, or several tests of which the newest is not known.
    """
    folders = find_runs([path])
    found = tests_of(as_trainings(read_runs(folders)), path)
    if not found:
        raise InputError(
            f"compare: {path} holds no test of episodes ({len(folders)} runs, none with {EPISODES_FILE}). "
            "`swbn test --config FILE --ckpt_path RUN` of a few-shot run writes them."
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
    """What has to be equal for tests of episodes to be compared: ``test, 5-way 1-shot, 15 queries, seed 0``.

    Raises:
        KeyError: the row of ``results.json`` is none of a test of episodes.
    """
    words = f"{row['split']}, {row['ways']}-way {row['shots']}-shot, {row['queries']} queries, seed {row['seed']}"
    return words + how_classified(row)


def how_classified(row: Mapping[str, Any]) -> str:
    """What a test adds to its setting's name: ``, transductive``, and the head where it was chosen for the test."""
    return "".join(f", {row[key]}" for key in ("inference", "head") if row.get(key))


def read_episodes(folder: Path) -> tuple[float, ...]:
    """The accuracy of every episode of the evaluation in a run's folder, by its number; none where it saved none.

    Raises:
        InputError: a file that is not such a list.
    """
    file = folder / EPISODES_FILE
    if not has_file(folder, (EPISODES_FILE,)):
        return ()
    found: dict[int, tuple[int, float]] = {}
    with reading(file):
        for line, row in csv_rows(file, ("episode", "accuracy")):
            episode, accuracy = row["episode"], finite(row["accuracy"])
            if not (episode.isascii() and episode.isdecimal()):
                raise InputError(f"line {line}: {episode!r} is not the number of an episode")
            if accuracy is None or not 0 <= accuracy <= 1:
                raise InputError(f"line {line}: the accuracy {row['accuracy']!r} is not a number from 0 to 1")
            if (number := whole(episode)) in found:
                raise InputError(f"line {line}: episode {number} stands in line {found[number][0]}, too")
            found[number] = line, accuracy
        for number, (line, _) in found.items():
            if number >= len(found):
                raise InputError(f"line {line}: episode {number} of {len(found)}, which should be numbered from 0")
    return tuple(found[number][1] for number in range(len(found)))


def _newest_of_each_seed(path: Path, tests: list[SavedTest]) -> list[SavedTest]:
    _check_that_only_seeds_differ(path, tests)  # all: an older training of the same seed may be another one
    by_seed: dict[int | str, list[SavedTest]] = {}
    for test in tests:
        by_seed.setdefault(test.training.identity, []).append(test)
    ordered = sorted(by_seed, key=lambda key: (isinstance(key, str), key))
    return [newest(by_seed[key], lambda test: test.run) for key in ordered]


def _read(run: Run, training: Training) -> SavedTest | None:
    if not has_file(run.folder, (EPISODES_FILE,)):
        return None
    for name in (RUN_FILE, RESULTS_FILE):
        if name in run.unreadable:
            raise run.unreadable[name]
    accuracies = read_episodes(run.folder)
    with reading(run.folder / RESULTS_FILE):
        (row,) = run.results["results"]
        episodes_id, told = row["episodes_id"], row["episodes"]
        if not (isinstance(episodes_id, str) and episodes_id):
            raise InputError(f"its episodes_id is {episodes_id!r}, not a text that says which episodes it tested")
        setting = printable(setting_words(row))
    file = run.folder / EPISODES_FILE
    if told != len(accuracies) or not accuracies:
        raise InputError(f"{file} holds {len(accuracies)} episodes, {RESULTS_FILE} says {told}.")
    accuracy, mean = finite(row.get("accuracy", fmean(accuracies))), fmean(accuracies)
    if accuracy is None or abs(accuracy - mean) > _ROUNDED:
        raise InputError(
            f"{file} has a mean accuracy of {mean!r}, and {RESULTS_FILE} says {row['accuracy']!r}: one of the two was "
            "changed. Put the files of that test back, or test again."
        )
    return SavedTest(run, training, setting, episodes_id, accuracies, printable(row.get("head") or ""))


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
        if found or test.episodes_id != first.episodes_id:
            shown = [f"{key}: {a!r} and {b!r}"[:200] for key, (a, b) in list(found.items())[:_MOST_SHOWN]]
            raise InputError(
                f"compare: {path} holds different trainings tested as {test.setting}, those of {first.run.folder} and "
                f"{test.run.folder} ({'; '.join(shown) or 'other test episodes'}). Runs under one path may differ in "
                "their seeds only; give each of these as a path of its own."
            )
