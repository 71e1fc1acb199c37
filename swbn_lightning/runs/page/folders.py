"""The run folders that a path means, and what stands in one. Reading a run runs none of its code."""

import contextlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

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
from swbn_lightning.runs.curves import MEASURES
from swbn_lightning.runs.environment import ENVIRONMENT_FILE
from swbn_lightning.runs.folders import CONFIG_FILE, RESULTS_FILE, TRAINING_FILE
from swbn_lightning.runs.saved_tests import when
from swbn_lightning.whiteness.plots import STAGES
from swbn_lightning.whiteness.records import MEAN, WHITENESS_FILE, CorrelationMap, read_heatmap, read_whiteness

METRICS_FILE = "metrics.csv"
STUDY_FILE = "study.csv"
_FILES = (RESULTS_FILE, CONFIG_FILE, METRICS_FILE, WHITENESS_FILE, ENVIRONMENT_FILE)
_TIMES = ("epoch", "step")
_DRAWN = tuple(name for names in MEASURES.values() for name in names)
_MOST_HEATMAPS = 24  # of one run
_ROUNDED = 1.01  # a correlation may be, in half precision
_MOST_MEASURED = 2_000_000  # layers times epochs
_MOST_ROWS = 100  # of results.json
_MOST_SAID = 1_000  # values in environment.json
Found = TypeVar("Found")
Series = dict[int, float]


@dataclass
class RunFolder:
    """What one ``version_<n>`` folder holds. What is missing or broken is empty here and told in ``problems``."""

    path: Path
    results: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # flat: dotted keys
    training: dict[str, Any] = field(default_factory=dict)  # of a test, what it kept of its training's; flat
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, dict[str, Series]] = field(default_factory=dict)  # "epoch" or "step", then quantity
    whiteness: list[dict[str, Any]] = field(default_factory=list)
    heatmaps: dict[str, dict[str, CorrelationMap]] = field(default_factory=dict)  # by layer
    problems: list[str] = field(default_factory=list)
    checkpoint: bool = False  # whether it holds one
    source: "RunFolder | None" = None  # of a test: what was tested, if that is known

    @property
    def trained(self) -> bool:
        """Whether this is the folder of a ``fit``, finished or not."""
        command = self.results.get("command")
        if isinstance(command, str):
            return "fit" in command.lower()
        if isinstance(self.environment.get("stage"), str):
            return self.environment["stage"] == "fit"
        return True  # killed before it wrote; an evaluation has nothing to show until its end

    @property
    def predicted(self) -> bool:
        """Whether this is the folder of a ``predict``, which evaluates nothing."""
        return self.environment.get("stage") == "predict"

    @property
    def when(self) -> datetime | None:
        """When it ended or, where that is not known, started."""
        return when(self.results, self.environment)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``results.json``, one an evaluation."""
        rows = self.results.get("results")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run folders that the paths mean, each once, in the order of the paths and by their numbers.

    Args:
        paths: each a run's folder (``runs/NAME/version_0``), or a folder with such folders anywhere below: a run's name
            (``runs/NAME``), a study's folder. Of a ``study.csv`` also the runs and tests that it names, if they lie
            below that path or, by a relative name without ``..``, below the working directory: it may be a stranger's.

    Raises:
        InputError: no paths; one that does not exist, is a file, or holds no run.
    """
    found: dict[Path, Path] = {}
    given = [Path(path).expanduser() for path in paths]
    if not given:
        raise InputError("no runs were given; name a run folder, as runs/NAME, or a study's folder.")
    for path in given:
        own = _runs_below(path)
        if not own:
            raise InputError(f"{path} holds no run: looked for {', '.join(_FILES)} there and in all folders below.")
        for folder in own:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def broken_studies(paths: Iterable[str | Path]) -> list[str]:
    """What is wrong with the tables of studies, which may name runs elsewhere."""
    told = []
    for path in paths:
        try:
            _, elsewhere = _named_by_study(Path(path).expanduser() / STUDY_FILE)
            if elsewhere:
                names = ", ".join(printable(name)[:200] for name in elsewhere[:3])
                more = f" and {len(elsewhere) - 3} more" if len(elsewhere) > 3 else ""
                told.append(
                    f"{printable(path)}/{STUDY_FILE} names runs that are neither below its folder nor below the "
                    f"working directory: {names}{more}; give their folders, too, to have them shown"
                )
        except UnreadableFile as error:
            told.append(str(error))
    return told


def read_run(path: Path) -> RunFolder:
    """Read a run's folder, and never fail: what cannot be read is told in ``problems``."""
    run = RunFolder(path)
    run.results = _try(run, RESULTS_FILE, read_json) or {}
    run.config = _try(run, CONFIG_FILE, read_settings) or {}
    run.environment = _try(run, ENVIRONMENT_FILE, lambda file: read_json(file, _MOST_SAID)) or {}
    if len(rows := run.rows) > _MOST_ROWS:
        run.problems.append(f"{len(rows) - _MOST_ROWS} further results are only in {RESULTS_FILE}")
        run.results["results"] = rows[:_MOST_ROWS]
    if has_file(path, (TRAINING_FILE,)):
        run.training = _try(run, TRAINING_FILE, read_settings) or {}
    if run.trained:
        run.metrics = _try(run, METRICS_FILE, read_metrics) or {}
        run.whiteness = _try(run, WHITENESS_FILE, _read_whiteness) or []
    run.checkpoint = any(path.glob("checkpoints/*.ckpt"))
    files = sorted(file.name for file in path.glob("heatmap_*.csv"))
    if len(files) > _MOST_HEATMAPS:
        run.problems.append(f"{len(files) - _MOST_HEATMAPS} further heatmaps are only in the folder")
    for name in files[:_MOST_HEATMAPS]:
        maps = _try(run, name, _read_heatmap)
        if maps:
            run.heatmaps[printable(name[len("heatmap_") : -len(".csv")])] = maps
    return run


def read_metrics(path: Path, names: Collection[str] = _DRAWN) -> dict[str, dict[str, Series]]:
    """Quantities of a ``metrics.csv`` by ``"epoch"`` and by ``"step"``, counted as trained (from 1).

    Of an epoch or step that stands there several times, the later value. A line that was never finished is left out.

    Args:
        path: of the file.
        names: of the quantities; those of :data:`~swbn_lightning.runs.curves.MEASURES`.

    Raises:
        InputError: another file, or one that is too large.
    """
    found: dict[str, dict[str, Series]] = {time: {} for time in _TIMES}
    for _, row in csv_rows(path, log=True):
        known = [(name, value) for name in names if (cell := row.get(name)) and (value := finite(cell)) is not None]
        for time in _TIMES if known else ():
            try:
                x = whole(row.get(time, "")) + 1
            except InputError:  # a quantity without it
                continue
            for name, value in known:
                found[time].setdefault(name, {})[x] = value
    return found


def _runs_below(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"run {path} does not exist; give a run folder, as runs/NAME, or a study's folder.")
    if not path.is_dir():
        raise InputError(f"{path} is a file; give the run's folder, as runs/NAME/version_0.")
    if _is_run(path):
        return [path]
    own = {folder.resolve(): folder for folder in folders_with(path, _FILES)}
    with contextlib.suppress(*([UnreadableFile] if own else [])):  # of which broken_studies tells
        for folder in _named_by_study(path / STUDY_FILE)[0]:
            own.setdefault(folder.resolve(), folder)
    return sorted(own.values(), key=_natural)


def _named_by_study(file: Path) -> tuple[list[Path], list[str]]:
    """The folders of a study's runs and tests, as it may keep its table in another folder; and those not to be taken.

    A table that somebody else made could name any folder of the machine, whose settings would stand in the page.
    """
    if not file.is_file():
        return [], []
    named = [row.get(key) or "" for _, row in csv_rows(file) for key in ("run", "test")]
    found, elsewhere = [], []
    for name in dict.fromkeys(named):
        if name and _is_run(folder := Path(name)):
            relative = not folder.is_absolute() and ".." not in folder.parts
            bases = [file.parent, *([Path()] if relative else [])]
            inside = any(folder.resolve().is_relative_to(base.resolve()) for base in bases)
            found += [folder] if inside else []
            elsewhere += [] if inside else [name]
    return found, elsewhere


def _is_run(folder: Path) -> bool:
    return has_file(folder, _FILES)


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """So that version_10 comes after version_9, and seed10 after seed9."""
    words = re.split(r"([0-9]+)", str(path))
    return [(True, int(word), "") if word.isdecimal() else (False, 0, word) for word in words]


def _try(run: RunFolder, name: str, read: Callable[[Path], Found]) -> Found | None:
    path = run.path / name
    if not os.path.lexists(path):
        run.problems.append(f"{name} is missing")
        return None
    try:
        with reading(path):
            return read(path)
    except UnreadableFile as error:
        run.problems.append(f"{printable(name)} cannot be read ({error.reason})")
        return None


def _read_whiteness(path: Path) -> list[dict[str, Any]]:
    rows = read_whiteness(path)
    if rows and all(row["layer"] == MEAN for row in rows):
        raise InputError("it holds no layer")
    if len({row["layer"] for row in rows}) * len({row["epoch"] for row in rows}) > _MOST_MEASURED:
        raise InputError(f"it holds more than {_MOST_MEASURED} measurements")
    # What is too large to be drawn is left out there, as what is not finite.
    return [{key: math.nan if finite(v) is None and key != "layer" else v for key, v in row.items()} for row in rows]


def _read_heatmap(path: Path) -> dict[str, CorrelationMap]:
    maps = read_heatmap(path)
    if not maps.keys() <= set(STAGES):
        raise InputError(f"it holds other matrices than {' and '.join(STAGES)}")
    if any((found.correlation.abs() > _ROUNDED).any() for found in maps.values()):
        raise InputError("it holds correlations above 1")
    return maps
