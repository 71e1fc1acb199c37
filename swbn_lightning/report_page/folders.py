"""The run folders that a path means, and what stands in one. Reading a run runs none of its code."""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from swbn_lightning.environment import ENVIRONMENT_FILE
from swbn_lightning.errors import InputError
from swbn_lightning.report_page.nested import flatten
from swbn_lightning.runs import CONFIG_FILE, RESULTS_FILE, TRAINING_FILE
from swbn_lightning.whiteness.records import MEAN, WHITENESS_FILE, CorrelationMap, read_heatmap, read_whiteness

METRICS_FILE = "metrics.csv"
STUDY_FILE = "study.csv"
_FILES = (RESULTS_FILE, CONFIG_FILE, METRICS_FILE, WHITENESS_FILE, ENVIRONMENT_FILE)
_TIMES = ("epoch", "step")
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
    def started(self) -> str:
        """When, as a text that sorts by time; empty, and so first, for a run from before that was written."""
        return str(self.environment.get("started") or "")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``results.json``, one an evaluation."""
        rows = self.results.get("results")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The run folders that the paths mean, each once, in the order of the paths and by their numbers.

    Args:
        paths: each a run's folder (``runs/NAME/version_0``), or a folder with such folders anywhere below: a run's name
            (``runs/NAME``), a study's folder. Of a ``study.csv`` also the runs and tests that it names, wherever they
            are.

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


def read_run(path: Path) -> RunFolder:
    """Read a run's folder, and never fail: what cannot be read is told in ``problems``."""
    run = RunFolder(path)
    run.results = _try(run, RESULTS_FILE, _read_json) or {}
    run.config = _try(run, CONFIG_FILE, _read_config) or {}
    run.environment = _try(run, ENVIRONMENT_FILE, _read_json) or {}
    if (path / TRAINING_FILE).is_file():
        run.training = _try(run, TRAINING_FILE, _read_config) or {}
    if run.trained:
        run.metrics = _try(run, METRICS_FILE, read_metrics) or {}
        run.whiteness = _try(run, WHITENESS_FILE, _read_whiteness) or []
    for file in sorted(path.glob("heatmap_*.csv")):
        maps = _try(run, file.name, read_heatmap)
        if maps:
            run.heatmaps[file.stem.removeprefix("heatmap_")] = maps
    return run


def read_metrics(path: Path) -> dict[str, dict[str, Series]]:
    """The quantities of a ``metrics.csv`` by ``"epoch"`` and by ``"step"``, counted as trained (from 1).

    Of an epoch or step that stands there several times, the later value. A line that was never finished is left out.
    """
    found: dict[str, dict[str, Series]] = {time: {} for time in _TIMES}
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]  # the writer may have been killed in the middle of a line
    for row in csv.DictReader(whole.splitlines()):
        if None in row or None in row.values():  # more or fewer cells than columns
            continue
        for time in _TIMES:
            x = _number(row.get(time, ""))
            for name, cell in row.items():
                value = _number(cell) if name not in _TIMES else None
                if x is not None and value is not None:
                    found[time].setdefault(name, {})[int(x) + 1] = value
    return found


def _runs_below(path: Path) -> list[Path]:
    if not path.exists():
        raise InputError(f"run {path} does not exist; give a run folder, as runs/NAME, or a study's folder.")
    if not path.is_dir():
        raise InputError(f"{path} is a file; give the run's folder, as runs/NAME/version_0.")
    if _is_run(path):
        return [path]
    own = {folder.resolve(): folder for folder in path.rglob("*") if folder.is_dir() and _is_run(folder)}
    for folder in _named_by_study(path / STUDY_FILE):
        own.setdefault(folder.resolve(), folder)
    return sorted(own.values(), key=_natural)


def _named_by_study(file: Path) -> list[Path]:
    """The folders of a study's runs and tests: it may keep its table in another folder than its runs."""
    if not file.is_file():
        return []
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            named = [row.get(key) or "" for row in csv.DictReader(lines) for key in ("run", "test")]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{file} cannot be read: {error}.") from error
    return [folder for name in dict.fromkeys(named) if name and _is_run(folder := Path(name))]


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def _natural(path: Path) -> list[tuple[bool, int, str]]:
    """So that version_10 comes after version_9, and seed10 after seed9."""
    words = re.split(r"([0-9]+)", str(path))
    return [(True, int(word), "") if word.isdecimal() else (False, 0, word) for word in words]


def _try(run: RunFolder, name: str, read: Callable[[Path], Found]) -> Found | None:
    path = run.path / name
    if not path.is_file():
        run.problems.append(f"{name} is missing")
        return None
    try:
        return read(path)
    except Exception as error:  # a file that was cut short or comes from elsewhere raises almost anything
        reason = " ".join(str(error).split())[:200]
        run.problems.append(f"{name} cannot be read ({reason or type(error).__name__})")
        return None


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise InputError(f"it holds a {type(content).__name__}, not a mapping")
    return content


def _read_config(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise InputError(f"it holds a {type(content).__name__}, not a mapping")
    return flatten(content)


def _read_whiteness(path: Path) -> list[dict[str, Any]]:
    rows = read_whiteness(path)
    if rows and all(row["layer"] == MEAN for row in rows):
        raise InputError("it holds no layer")
    return rows


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
