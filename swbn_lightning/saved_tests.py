"""Tests of episodes as runs left them: read back without running anything of theirs."""

import csv
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from swbn_lightning.errors import InputError
from swbn_lightning.runs import CONFIG_FILE, EPISODES_FILE, RESULTS_FILE, TRAINING_FILE, find_source, run_of

# Settings that a training does not depend on, or that only name it.
_FREE = ("seed_everything", "run", "ckpt_path", "config", "data.init_args.test", "data.init_args.root", "weights_only")


@dataclass(frozen=True)
class SavedTest:
    """One evaluation with the accuracy of each of its episodes."""

    folder: Path
    training: Path  # the run whose checkpoint was tested, or a checkpoint outside of a run's folder
    in_run: bool  # False for such a checkpoint, of which seed and config are those of the test
    seed: int  # of the training
    config: dict[str, Any]  # flat, without the seed and what names a run
    setting: str  # as "test, 5-way 1-shot, 15 queries, seed 0"
    episodes_id: str  # equal where episode i is of the same images
    accuracies: tuple[float, ...]


def find_tests(path: Path) -> dict[str, list[SavedTest]]:
    """Tests of episodes in a folder and below, by setting; of each training seed the newest, seeds in order.

    Raises:
        InputError: no such folder, none of a test of episodes in it, an unreadable file, a test whose training is not
            found and of which it kept no settings, or trainings that differ in more than their seeds.
    """
    if not path.is_dir():
        raise InputError(f"compare: {path} does not exist or is not a folder; give a tested run, as runs/NAME.")
    files = sorted(path.rglob(RESULTS_FILE), key=lambda file: (file.stat().st_mtime, file.as_posix()))
    tests = [test for file in files if (test := _read(file.parent)) is not None]
    if not tests:
        raise InputError(
            f"compare: {path} holds no test of episodes ({len(files)} {RESULTS_FILE}, none with {EPISODES_FILE} "
            "beside it). `swbn test --config FILE --ckpt_path RUN` of a few-shot run writes them."
        )
    found: dict[str, list[SavedTest]] = {}
    for test in tests:
        found.setdefault(test.setting, []).append(test)
    newest: dict[str, list[SavedTest]] = {}
    for setting, own in found.items():
        _check_that_seeds_alone_differ(path, setting, own)  # all: an older training of the same seed may be another one
        by_seed = {test.seed: test for test in own}  # oldest first: a newer one takes the place
        newest[setting] = [by_seed[seed] for seed in sorted(by_seed)]
    return newest


def setting_words(row: Mapping[str, Any]) -> str:
    """What has to be equal for tests of episodes to be compared: ``test, 5-way 1-shot, 15 queries, seed 0``.

    Raises:
        KeyError: the row of ``results.json`` is none of a test of episodes.
    """
    words = f"{row['split']}, {row['ways']}-way {row['shots']}-shot, {row['queries']} queries, seed {row['seed']}"
    return f"{words}, {row['inference']}" if row.get("inference") else words


def read_episodes(folder: Path) -> tuple[float, ...]:
    """The accuracy of every episode of the evaluation in a run's folder; none where it saved none.

    Raises:
        InputError: a file that is not such a list.
    """
    file = folder / EPISODES_FILE
    if not file.is_file():
        return ()
    try:
        with file.open(newline="", encoding="utf-8") as lines:
            return tuple(float(row["accuracy"]) for row in csv.DictReader(lines))
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"{file} is not a list of episodes with their accuracies ({error}).") from error


def _read(folder: Path) -> SavedTest | None:
    accuracies = read_episodes(folder)
    if not accuracies:
        return None
    try:
        results = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        (row,) = results["results"]
        checkpoint = results["tested_checkpoint"] or str(folder / results["best_checkpoint"])
        episodes_id, told = row["episodes_id"], row["episodes"]
        setting = setting_words(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{folder / RESULTS_FILE} is not what a test of episodes writes: {reason}.") from error
    if told != len(accuracies):
        raise InputError(f"{folder / EPISODES_FILE} holds {len(accuracies)} episodes, {RESULTS_FILE} says {told}.")
    training, config = _training(folder, results, checkpoint)
    in_run = training is not None
    seed = config.get("seed_everything")
    seed, own = seed if type(seed) is int else 0, {key: value for key, value in config.items() if not _is_free(key)}
    return SavedTest(folder, training or Path(checkpoint), in_run, seed, own, setting, episodes_id, accuracies)


def _training(folder: Path, results: dict[str, Any], checkpoint: str) -> tuple[Path | None, dict[str, Any]]:
    """The run whose checkpoint was tested, and its settings; of a checkpoint outside of a run, None and the test's own.

    The test's own settings never stand for those of a run: its seed says nothing of the training's.
    """
    own = _config(folder / CONFIG_FILE)
    if not results["tested_checkpoint"]:  # it lies in this very folder
        return folder, own
    near = results.get("tested_run")
    if isinstance(near, str) and (folder / TRAINING_FILE).is_file():
        return Path(os.path.normpath(folder / near)), _config(folder / TRAINING_FILE)
    written = run_of(checkpoint)
    if written is None or results.get("tested_run", "") is None:
        return None, own
    found = find_source(folder, results, own, _runs_near(folder, written))  # results of before there was that copy
    if found is not None:
        return found, _config(found / CONFIG_FILE)
    if Path(checkpoint).is_file() and not any((written / name).is_file() for name in (CONFIG_FILE, RESULTS_FILE)):
        return None, own
    raise InputError(
        f"compare: {folder} is a test of {checkpoint}, and the {CONFIG_FILE} of that run, with its seed and settings, "
        f"is neither there nor in a folder {written.name} or {Path(*written.parts[-2:])} beside or above the test. Run "
        "compare in the directory where the test was run, put the run back, or test it again."
    )


def _runs_near(folder: Path, written: Path) -> set[Path]:
    """Where a run can be that was written down by this path: from here, or beside or above a folder, also if moved."""
    here, parts = folder.resolve(), [part for part in written.parts if part != written.anchor]
    tails = [Path(*parts[-count:]) for count in range(1, len(parts) + 1)]
    places = {written.resolve(), *((above / tail).resolve() for above in here.parents for tail in tails)} - {here}
    return {place for place in places if (place / CONFIG_FILE).is_file() and not (place / EPISODES_FILE).is_file()}


def _config(file: Path) -> dict[str, Any]:
    """Settings, flat; none where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InputError(f"{file} cannot be read: {error}.") from error
    return _flat(content) if isinstance(content, dict) else {}


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {key: value}
    return {name: v for k, inner in value.items() for name, v in _flat(inner, f"{key}.{k}" if key else str(k)).items()}


def _is_free(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _FREE)


def _check_that_seeds_alone_differ(path: Path, setting: str, tests: list[SavedTest]) -> None:
    first = tests[0]
    of_seed: dict[int, SavedTest] = {}
    for test in tests:
        other = of_seed.setdefault(test.seed, test)
        if not (test.in_run and other.in_run) and test.training != other.training:
            raise InputError(
                f"compare: {path} holds tests of {other.training} and {test.training}, and of a checkpoint that lies "
                f"outside of a run's folder no seed is known but the test's, here {test.seed} for both. Give each of "
                "these as a path of its own, or test with the training's --seed_everything."
            )
    for test in tests[1:]:
        keys = first.config.keys() | test.config.keys()
        differing = sorted(key for key in keys if first.config.get(key) != test.config.get(key))
        if differing or test.episodes_id != first.episodes_id:
            shown = [f"{key}: {first.config.get(key)!r} and {test.config.get(key)!r}" for key in differing[:4]]
            raise InputError(
                f"compare: {path} holds different trainings tested as {setting}: {first.training} and {test.training} "
                f"({'; '.join(shown) or 'other test episodes'}). Runs under one path may differ in their seeds alone; "
                "give each of these as a path of its own."
            )
