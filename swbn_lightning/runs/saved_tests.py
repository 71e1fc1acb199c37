"""Tests of episodes as runs left them: read back without running anything of theirs."""

import contextlib
import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import (
    UnreadableFile,
    csv_rows,
    finite,
    folders_with,
    has_file,
    printable,
    read_json,
    read_settings,
    reading,
    whole,
)
from swbn_lightning.runs.checkpoints import checked_path, find_source
from swbn_lightning.runs.environment import ENVIRONMENT_FILE
from swbn_lightning.runs.folders import CONFIG_FILE, EPISODES_FILE, RESULTS_FILE, TRAINING_FILE, run_of

Run = TypeVar("Run")

_NEVER = datetime.min.replace(tzinfo=UTC)
_ROUNDED = 1e-6  # which an accuracy may be that was computed twice
# Settings that a training does not depend on, or that only name it.
_FREE = ("seed_everything", "run", "ckpt_path", "config", "data.init_args.test", "data.init_args.root", "weights_only")


@dataclass(frozen=True)
class SavedTest:
    """One evaluation with the accuracy of each of its episodes."""

    folder: Path
    training: Path  # the run whose checkpoint was tested, or a checkpoint outside of a run's folder
    source: Path | None  # that run's folder, if it is still there
    in_run: bool  # False for such a checkpoint, of which seed and config are those of the test
    seed: int | None  # of the training; None where it was not seeded
    identity: int | str  # the seed or, where there is none, which training it was
    config: dict[str, Any]  # flat, without the seed and what names a run
    setting: str  # as "test, 5-way 1-shot, 15 queries, seed 0"
    episodes_id: str  # equal where episode i is of the same images
    accuracies: tuple[float, ...]

    def age(self) -> "Age":
        """What tells whether it is the newest of several."""
        results, environment = _told(self.folder)
        trained = when(*_told(self.source)) if self.source else None
        return Age(self.folder, repr(results), trained, when(results, environment))


class Age(NamedTuple):
    """What tells whether a test is the newest of several, or a training."""

    folder: Path
    content: str  # equal of a run and its copy
    trained: datetime | None  # when its training was, if that is known
    tested: datetime | None

    @property
    def times(self) -> tuple[datetime | None, datetime | None]:
        """By which it is sorted: a test of a newer training is newer, whenever it was made."""
        return self.trained or self.tested, self.tested


def newest(runs: Sequence[Run], age: Callable[[Run], Age]) -> Run:
    """The newest test of the newest training, by what the runs say of themselves: files that were copied are newer.

    Raises:
        InputError: it cannot be told.
    """
    if len(runs) == 1:
        return runs[0]
    found = {own.content: (own, run) for run in reversed(runs) for own in (age(run),)}  # of a run and its copy one
    ages = sorted((own for own, _ in found.values()), key=lambda own: [time or _NEVER for time in own.times])
    unknown = next((own for own in ages if None in own.times), None)
    doubtful = [unknown, *(own for own in ages if own is not unknown)] if unknown else ages[::-1]
    why = ""
    if len(ages) > 1 and (unknown or doubtful[0].times == doubtful[1].times):
        why = (
            f"of one neither {RESULTS_FILE} says when it 'ended' nor {ENVIRONMENT_FILE} when it 'started', or both "
            "have the same time"
        )
    elif len({own.trained is None for own in ages}) > 1:  # the time of a test says nothing of that of a training
        doubtful = [next(own for own in ages if (own.trained is None) is gone) for gone in (True, False)]
        why = "when it was trained is known of the second only, and the newest training counts"
    if why:
        first, second = (printable(own.folder) for own in doubtful[:2])
        raise InputError(
            f"it cannot be told which of {first} and {second} is newer: {why}; delete one, or name the version"
        )
    return found[ages[-1].content][1]


def when(results: Mapping[str, Any], environment: Mapping[str, Any]) -> datetime | None:
    """When a run ended or, if its results do not say so, when it started; None where that is not known either."""
    for text in (results.get("ended"), environment.get("started")):
        with contextlib.suppress(TypeError, ValueError):  # no text, or no time
            found = datetime.fromisoformat(text)  # type: ignore[arg-type]
            return found if found.tzinfo else found.replace(tzinfo=UTC)
    return None


def can_start_from(
    kept: Mapping[str, Any], ended: datetime | None, settings: Mapping[str, Any], started: datetime | None
) -> bool:
    """Whether a run can have started from a training, or another one has taken the place of that.

    Args:
        kept: the run's copy of its training's settings, flat; empty where it has none.
        ended: when the run ended, if that is known.
        settings: of the training, flat.
        started: when that started, if that is known.
    """
    if ended is not None and started is not None and ended < started:
        return False
    return not kept or not _differing(kept, settings)


def find_tests(path: Path) -> dict[str, list[SavedTest]]:
    """Tests of episodes in a folder and below, by setting; of each training seed the newest, seeds in order.

    A training without a seed is none of the others; such trainings come last.

    Raises:
        InputError: no such folder, none of a test of episodes in it, an unreadable file, a test whose training is not
            found and of which it kept no settings, trainings that differ in more than their seeds, or several tests of
            which the newest is not known.
    """
    if not path.is_dir():
        raise InputError(f"compare: {path} does not exist or is not a folder; give a tested run, as runs/NAME.")
    folders = sorted(folders_with(path, (RESULTS_FILE,)))
    tests = [test for folder in folders if (test := _read(folder)) is not None]
    if not tests:
        raise InputError(
            f"compare: {path} holds no test of episodes ({len(folders)} {RESULTS_FILE}, none with {EPISODES_FILE} "
            "beside it). `swbn test --config FILE --ckpt_path RUN` of a few-shot run writes them."
        )
    found: dict[str, list[SavedTest]] = {}
    for test in tests:
        found.setdefault(test.setting, []).append(test)
    chosen: dict[str, list[SavedTest]] = {}
    for setting, own in found.items():
        _check_that_seeds_alone_differ(path, setting, own)  # all: an older training of the same seed may be another one
        by_seed: dict[int | str, list[SavedTest]] = {}
        for test in own:
            by_seed.setdefault(test.identity, []).append(test)
        ordered = sorted(by_seed, key=lambda key: (isinstance(key, str), key))
        chosen[setting] = [newest(by_seed[key], SavedTest.age) for key in ordered]
    return chosen


def setting_words(row: Mapping[str, Any]) -> str:
    """What has to be equal for tests of episodes to be compared: ``test, 5-way 1-shot, 15 queries, seed 0``.

    Raises:
        KeyError: the row of ``results.json`` is none of a test of episodes.
    """
    words = f"{row['split']}, {row['ways']}-way {row['shots']}-shot, {row['queries']} queries, seed {row['seed']}"
    return f"{words}, {row['inference']}" if row.get("inference") else words


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
        with file.open(encoding="utf-8", newline="") as opened:  # rows of two such columns have the last one's
            header = next(csv.reader(opened), [])
        for name in ("episode", "accuracy"):
            if header.count(name) > 1:
                raise InputError(f"it has the column {name!r} {header.count(name)} times; which counts is not known")
        for number, (line, _) in found.items():
            if number >= len(found):
                raise InputError(f"line {line}: episode {number} of {len(found)}, which should be numbered from 0")
    return tuple(found[number][1] for number in range(len(found)))


def _read(folder: Path) -> SavedTest | None:
    accuracies = read_episodes(folder)
    if not accuracies:
        return None
    with reading(folder / RESULTS_FILE):
        results = read_json(folder / RESULTS_FILE)
        (row,) = results["results"]
        checkpoint = results["tested_checkpoint"] or str(folder / results["best_checkpoint"])
        if not isinstance(checkpoint, str):
            raise InputError(f"its tested_checkpoint is {checkpoint!r}, not a path")
        episodes_id, told = row["episodes_id"], row["episodes"]
        if not (isinstance(episodes_id, str) and episodes_id):
            raise InputError(f"its episodes_id is {episodes_id!r}, not a text that says which episodes it tested")
        setting = printable(setting_words(row))
    if told != len(accuracies):
        raise InputError(f"{folder / EPISODES_FILE} holds {len(accuracies)} episodes, {RESULTS_FILE} says {told}.")
    accuracy, mean = finite(row.get("accuracy", fmean(accuracies))), fmean(accuracies)
    if accuracy is None or abs(accuracy - mean) > _ROUNDED:
        raise InputError(
            f"{folder / EPISODES_FILE} has a mean accuracy of {mean!r}, and {RESULTS_FILE} says {row['accuracy']!r}: "
            "one of the two was changed. Put the files of that test back, or test again."
        )
    training, source, config = _training(folder, results, checkpoint)
    in_run = training is not None
    seed: int | None = found if type(found := config.get("seed_everything")) is int else None if in_run else 0
    training = training or Path(checkpoint)
    identity = seed if seed is not None else _unseeded(training, source)
    own = {key: value for key, value in config.items() if not _is_free(key)}
    return SavedTest(folder, training, source, in_run, seed, identity, own, setting, episodes_id, accuracies)


def _training(
    folder: Path, results: dict[str, Any], checkpoint: str
) -> tuple[Path | None, Path | None, dict[str, Any]]:
    """The run whose checkpoint was tested, its folder if that is there, and its settings.

    Of a checkpoint outside of a run there is neither, and the settings are the test's own. These never stand for those
    of a run: a test's seed says nothing of its training's.
    """
    own = _config(folder, CONFIG_FILE)
    if not results["tested_checkpoint"]:  # it lies in this very folder
        return folder, folder, own
    near, has_copy = results.get("tested_run"), has_file(folder, (TRAINING_FILE,))
    kept = _config(folder, TRAINING_FILE) if isinstance(near, str) and has_copy else {}
    ended = when(results, {}) or _started(folder)

    def accepted(path: Path) -> bool:
        return can_start_from(kept, ended, _settings_there(path), _started(path))

    with reading(folder / RESULTS_FILE):
        written = run_of(checkpoint)
        if isinstance(near, str) and has_copy:
            beside = (folder.resolve() / checked_path(near)).resolve()
            found = find_source(folder, results, own, {beside}, accepted)
            if found is None and written is not None:
                found = find_source(folder, results, own, _runs_near(folder, written), accepted)
            return found or written or Path(checkpoint), found, kept
        if written is None or results.get("tested_run", "") is None:
            return None, None, own
        found = find_source(folder, results, own, _runs_near(folder, written), accepted)  # from before that copy
    if found is not None:
        return found, found, _config(found, CONFIG_FILE)
    if has_file(Path(), (checkpoint,)) and not has_file(written, (CONFIG_FILE, RESULTS_FILE)):
        return None, None, own
    raise InputError(
        f"compare: {folder} is a test of {checkpoint}, and the {CONFIG_FILE} of that run, with its seed and settings, "
        f"is neither there nor in a folder {written.name} or {Path(*written.parts[-2:])} beside or above the test. Run "
        "compare in the directory where the test was run, put the run back, or test it again."
    )


def _runs_near(folder: Path, written: Path) -> set[Path]:
    """Where a run can be that was written down by this path: from here, or beside or above a folder, also if moved."""
    parts = [part for part in checked_path(str(written)).parts if part != written.anchor]
    here = folder.resolve()
    tails = [Path(*parts[-count:]) for count in range(1, len(parts) + 1)]
    places = {written.resolve(), *((above / tail).resolve() for above in here.parents for tail in tails)} - {here}
    return {place for place in places if has_file(place, (CONFIG_FILE,)) and not has_file(place, (EPISODES_FILE,))}


def _unseeded(training: Path, source: Path | None) -> str:
    """Which training it was that had no seed: equal of a run and its copy."""
    told = _told(source) if source else []
    return repr(told) if any(told) else str(training)


def _settings_there(folder: Path) -> dict[str, Any]:
    """Settings of what may be another run than the one looked for: then they need not be readable."""
    with contextlib.suppress(UnreadableFile):
        return _config(folder, CONFIG_FILE)
    return {}


def _started(folder: Path) -> datetime | None:
    with contextlib.suppress(UnreadableFile):
        return when({}, _told(folder)[1])
    return None


def _config(folder: Path, name: str) -> dict[str, Any]:
    """Settings, flat; none where there is no such file."""
    return read_settings(folder / name) if has_file(folder, (name,)) else {}


def _told(folder: Path) -> list[dict[str, Any]]:
    """What a run's results and its environment say; nothing where it has none."""
    names = (RESULTS_FILE, ENVIRONMENT_FILE)
    return [read_json(folder / name) if has_file(folder, (name,)) else {} for name in names]


def _is_free(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _FREE)


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that are not the same, with both values."""
    pairs = {key: (first.get(key), second.get(key)) for key in sorted(first.keys() | second.keys())}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b and repr(a) != repr(b)}  # NaN is not itself


def _check_that_seeds_alone_differ(path: Path, setting: str, tests: list[SavedTest]) -> None:
    first = tests[0]
    of_seed: dict[int | str, SavedTest] = {}
    for test in tests:
        other = of_seed.setdefault(test.identity, test)
        if not (test.in_run and other.in_run) and test.training != other.training:
            raise InputError(
                f"compare: {path} holds tests of {other.training} and {test.training}, and of a checkpoint that lies "
                f"outside of a run's folder no seed is known but the test's, here {test.seed} for both. Give each of "
                "these as a path of its own, or test with the training's --seed_everything."
            )
    for test in tests[1:]:
        differing = _differing(first.config, test.config)
        if differing or test.episodes_id != first.episodes_id:
            shown = [f"{key}: {a!r} and {b!r}"[:200] for key, (a, b) in list(differing.items())[:4]]
            raise InputError(
                f"compare: {path} holds different trainings tested as {setting}: {first.training} and {test.training} "
                f"({'; '.join(shown) or 'other test episodes'}). Runs under one path may differ in their seeds alone; "
                "give each of these as a path of its own."
            )
