"""A tree of runs as it is read: which run is in which folder, what went on from what, which test is of which training.

``compare``, ``report`` and ``study`` know of runs what stands here, and nothing else. A run is known by the id in its
``run.json``, never by the name of its folder, so that folders may be moved, renamed and copied.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import UnreadableFile, folders_with, has_file, printable, read_json
from swbn_lightning.runs.folders import CONFIG_FILE, METRICS_FILE, RESULTS_FILE, RUN_FILE
from swbn_lightning.runs.record import Record, known_id, moment, plain_settings
from swbn_lightning.runs.settings import SEED

FILES = (RUN_FILE, RESULTS_FILE, METRICS_FILE, CONFIG_FILE)  # a folder with one of them is a run's
KINDS = ("fit", "validate", "test", "predict")
_MOST_TOLD = 30_000  # values in run.json
_NO_SEED = "no seed"
Item = TypeVar("Item")


@dataclass(eq=False)
class Run:
    """One run's folder; None is what is not known."""

    folder: Path
    kind: str = "fit"  # one of KINDS
    id: str | None = None
    started: datetime | None = None
    origin: str | None = None  # the id of the run whose checkpoint it tested or went on from, if it did
    trained: Record | None = None  # of a test, that run as the test has kept it
    settings: dict[str, Any] = field(default_factory=dict)  # flat
    command: str | None = None  # the command line
    environment: dict[str, Any] = field(default_factory=dict)  # device and versions
    results: dict[str, Any] = field(default_factory=dict)  # what results.json holds
    unreadable: dict[str, UnreadableFile] = field(default_factory=dict)  # by the file's name
    problems: list[str] = field(default_factory=list)  # what is missing or wrong, in words

    @property
    def ended(self) -> datetime | None:
        """When its results were written; None where there are none."""
        return moment(self.results.get("ended"))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``results.json``, one an evaluation."""
        rows = self.results.get("results")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    @property
    def checkpoint(self) -> str | None:
        """The file that an evaluation tested, as it was given."""
        path = self.results.get("tested_checkpoint")
        return path if isinstance(path, str) else None

    def try_to_read(self, name: str, read: Callable[[Path], Item]) -> Item | None:
        """What a file of the run holds; what is wrong with it is told in :attr:`problems`."""
        path = self.folder / name
        if not os.path.lexists(path):
            self.problems.append(f"{name} is missing")
            return None
        try:
            return read(path)
        except UnreadableFile as error:
            self.unreadable[name] = error
            self.problems.append(f"{printable(error.name)} cannot be read ({error.reason})")  # or a file that it needs
            return None


@dataclass(eq=False)
class Training:
    """One training: a run, or several of which each went on from the one before; and its tests.

    Tests whose training is not among the runs stand here without ``parts``.
    """

    parts: list[Run] = field(default_factory=list)
    tests: list[Run] = field(default_factory=list)

    @property
    def last(self) -> Run:
        """Where the training ended, or the last test that stands without it."""
        return (self.parts or self.tests)[-1]

    @property
    def runs(self) -> list[Run]:
        """All of them."""
        return [*self.parts, *self.tests]

    @property
    def known(self) -> bool:
        """Whether the settings are the training's: not those of a test whose checkpoint does not say who made it."""
        return bool(self.parts) or self.last.trained is not None

    @property
    def settings(self) -> dict[str, Any]:
        """Of the training, flat: its own or, where it is not among the runs, what its tests have kept of them."""
        trained = None if self.parts else self.last.trained
        return trained.settings if trained else self.last.settings

    @property
    def seed(self) -> int | None:
        """Of the training; None where it was not seeded."""
        return seed if type(seed := self.settings.get(SEED)) is int else None

    @property
    def identity(self) -> int | str:
        """What tells it from trainings with the same settings: the seed or, where there is none, which one it was."""
        if self.seed is not None:
            return self.seed
        first = (self.parts or self.tests)[0]
        own = first.id if self.parts else first.origin or first.checkpoint
        return f"{_NO_SEED}: {own or first.folder}"


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run folders that the paths mean, each once, in the order of the paths and by their numbers.

    Args:
        paths: each a run's folder (``runs/NAME/version_0``), or a folder with such folders anywhere below.

    Raises:
        InputError: no paths; one that does not exist, is a file, or holds no run.
    """
    found: dict[Path, Path] = {}
    given = [Path(path).expanduser() for path in paths]
    if not given:
        raise InputError("no runs were given; name a run folder, as runs/NAME, or a study's folder.")
    for path in given:
        if not path.exists():
            raise InputError(f"run {path} does not exist; give a run folder, as runs/NAME, or a study's folder.")
        if not path.is_dir():
            raise InputError(f"{path} is a file; give the run's folder, as runs/NAME/version_0.")
        own = [path] if has_file(path, FILES) else sorted(folders_with(path, FILES), key=_natural)
        if not own:
            raise InputError(f"{path} holds no run: looked for {', '.join(FILES)} there and in all folders below.")
        found |= {folder.resolve(): folder for folder in own if folder.resolve() not in found}
    return list(found.values())


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Read run folders; never fails: what cannot be read is told in each run's ``problems``.

    Folders with the same ``run.json`` are copies of one run, of which the one that ended last is taken, and of such
    with the same end the first: a copy may have been made while it ran. An id that different runs claim to have is
    none.
    """
    by_id: dict[str, list[tuple[Run, str]]] = {}
    runs = []
    for run, told in map(_read, folders):
        runs.append(run)
        if run.id is not None:
            by_id.setdefault(run.id, []).append((run, told))
    left_out = set()
    for own in by_id.values():
        if len({told for _, told in own}) == 1:
            chosen = max((run for run, _ in own), key=lambda run: (run.ended is not None, run.ended or run.started))
            left_out |= {run for run, _ in own} - {chosen}
            continue
        for run, _ in own:
            run.problems.append(f"its id {run.id} is that of another run, too: what belongs to either is not known")
            run.id = None
    return [run for run in runs if run not in left_out]


def as_trainings(runs: Sequence[Run]) -> list[Training]:
    """Each training with what went on from it and what tested it, in the order of the runs; without predictions."""
    by_id = {run.id: run for run in runs if run.id is not None and run.kind == "fit"}
    sources = {run: by_id[run.origin] for run in runs if run.origin in by_id}
    # None went on from itself, whatever the files say.
    sources = {run: source for run, source in sources.items() if run not in _parts(source, sources)}
    continued = {source for run, source in sources.items() if run.kind == "fit"}
    made = [Training(_parts(run, sources)) for run in runs if run.kind == "fit" and run not in continued]
    owners: dict[Any, Training] = {}
    for training in reversed(made):  # of two that went on from one, the first
        owners |= {part.id: training for part in training.parts if part.id is not None}
    for run in runs:
        if run.kind in ("validate", "test"):
            key = run.origin or run
            if key not in owners:
                made.append(owners.setdefault(key, Training()))
            owners[key].tests.append(run)
    places = {run: number for number, run in enumerate(runs)}
    return sorted(made, key=lambda training: min(places[run] for run in training.runs))


def newest(items: Sequence[Item], run: Callable[[Item], Run]) -> Item:
    """The newest test of the newest training, or the newest training, by when runs say they started.

    Raises:
        InputError: it cannot be told.
    """
    if len(items) == 1:
        return items[0]

    def times(item: Item) -> tuple[datetime | None, datetime | None]:
        own = run(item)
        return (moment(own.trained.started) if own.trained else own.started), own.started

    unknown = [item for item in items if None in times(item)]
    ordered = sorted((item for item in items if None not in times(item)), key=times)
    doubtful = [*unknown, *ordered[::-1]][:2]
    if unknown or times(doubtful[0]) == times(doubtful[1]):
        first, second = (printable(run(item).folder) for item in doubtful)
        raise InputError(
            f"it cannot be told which of {first} and {second} is newer: {RUN_FILE} of one does not say when it "
            "'started', or both say the same; delete one, or name the version"
        )
    return ordered[-1]


def _read(folder: Path) -> tuple[Run, str]:
    """A run, and what its ``run.json`` says, by which copies are known."""
    run = Run(folder)
    told = run.try_to_read(RUN_FILE, lambda path: read_json(path, _MOST_TOLD)) or {}
    run.results = run.try_to_read(RESULTS_FILE, read_json) or {}
    kind = told.get("kind")
    run.kind = kind if kind in KINDS else "fit" if run.checkpoint is None else "test"
    run.id, run.origin = known_id(told.get("id")), known_id(told.get("from"))
    run.trained = Record.of(told.get("trained"))
    run.started = moment(told.get("started"))
    run.settings = plain_settings(told.get("settings"))
    command, environment = told.get("command"), told.get("environment")
    run.command = command if isinstance(command, str) else None
    run.environment = environment if isinstance(environment, dict) else {}
    if run.kind == "predict":
        run.problems.clear()  # it has no results
    return run, repr(told)


def _parts(run: Run, sources: Mapping[Run, Run]) -> list[Run]:
    """A run after those that it went on from, the first one first."""
    parts = {run: None}
    while (source := sources.get(run)) is not None and source not in parts:
        parts[source], run = None, source
    return [*reversed(parts)]


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """So that version_10 comes after version_9, and seed10 after seed9."""
    words = re.split(r"([0-9]+)", str(path))
    return [(True, int(word), "") if word.isdecimal() else (False, 0, word) for word in words]
