"""What a training measured: what it logged, whiteness and correlations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import csv_rows, finite, printable, reading, whole
from swbn_lightning.runs.curves import MEASURES, UNITS
from swbn_lightning.runs.folders import METRICS_FILE
from swbn_lightning.runs.read import Run
from swbn_lightning.whiteness.plots import STAGES
from swbn_lightning.whiteness.records import MEAN, WHITENESS_FILE, CorrelationMap, read_heatmap, read_whiteness

Series = dict[int, float]
LOGGED = tuple(name for names in MEASURES.values() for name in names)
_MOST_HEATMAPS = 24  # of one run
_ROUNDED = 1.01  # a correlation may be, in half precision
_MOST_MEASURED = 2_000_000  # layers times epochs


@dataclass
class Measured:
    """Of a training, from all of its parts; without what a later part did not go on from."""

    # By "epoch" or "step" and by quantity, as trained (from 1).
    logged: dict[str, dict[str, Series]] = field(default_factory=lambda: {unit: {} for unit in UNITS})
    whiteness: list[dict[str, Any]] = field(default_factory=list)  # rows of whiteness.csv
    heatmaps: dict[str, dict[str, CorrelationMap]] = field(default_factory=dict)  # by layer; of the last part with any


def measured(parts: Sequence[Run]) -> Measured:
    """Read what a training measured; what cannot be read is told in its parts' ``problems``."""
    found = Measured()
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for part in parts:
        found.logged = joined(found.logged, part.try_to_read(METRICS_FILE, read_metrics) or {})
        own = {(row["epoch"], row["layer"]): row for row in part.try_to_read(WHITENESS_FILE, _whiteness) or []}
        first = min((epoch for epoch, _ in own), default=math.inf)
        rows = {key: row for key, row in rows.items() if key[0] < first} | own
        found.heatmaps = _heatmaps(part) or found.heatmaps
    found.whiteness = [rows[key] for key in sorted(rows, key=lambda key: key[0])]
    return found


def joined(
    before: Mapping[str, Mapping[str, Series]], after: Mapping[str, Mapping[str, Series]]
) -> dict[str, dict[str, Series]]:
    """What was logged in two parts of a training, as :func:`read_metrics` gives it."""
    found = {unit: dict(before.get(unit, {})) for unit in UNITS}
    for unit, quantities in after.items():
        for name, series in quantities.items():
            first = min(series)
            found[unit][name] = {x: v for x, v in found[unit].get(name, {}).items() if x < first} | series
    return found


def read_metrics(path: Path) -> dict[str, dict[str, Series]]:
    """Quantities of a ``metrics.csv`` by ``"epoch"`` and by ``"step"``, counted as trained (from 1).

    Of an epoch or step that stands there several times, the later value. A line that was never finished is left out.

    Raises:
        InputError: another file, or one that is too large.
    """
    found: dict[str, dict[str, Series]] = {unit: {} for unit in UNITS}
    for _, row in csv_rows(path, log=True):
        known = [(name, value) for name in LOGGED if (cell := row.get(name)) and (value := finite(cell)) is not None]
        for unit in UNITS if known else ():
            try:
                x = whole(row.get(unit, "")) + 1
            except InputError:  # a quantity without it
                continue
            for name, value in known:
                found[unit].setdefault(name, {})[x] = value
    return found


def _whiteness(path: Path) -> list[dict[str, Any]]:
    with reading(path):
        rows = read_whiteness(path)
        if rows and all(row["layer"] == MEAN for row in rows):
            raise InputError("it holds no layer")
        if len({row["layer"] for row in rows}) * len({row["epoch"] for row in rows}) > _MOST_MEASURED:
            raise InputError(f"it holds more than {_MOST_MEASURED} measurements")
        # What is too large to be drawn is left out there, as what is not finite.
        return [{k: math.nan if finite(v) is None and k != "layer" else v for k, v in row.items()} for row in rows]


def _heatmaps(part: Run) -> dict[str, dict[str, CorrelationMap]]:
    files = sorted(file.name for file in part.folder.glob("heatmap_*.csv"))
    if len(files) > _MOST_HEATMAPS:
        part.problems.append(f"{len(files) - _MOST_HEATMAPS} further heatmaps are only in the folder")
    found = {name: part.try_to_read(name, _heatmap) for name in files[:_MOST_HEATMAPS]}
    return {printable(name[len("heatmap_") : -len(".csv")]): maps for name, maps in found.items() if maps}


def _heatmap(path: Path) -> dict[str, CorrelationMap]:
    with reading(path):
        maps = read_heatmap(path)
        if not maps.keys() <= set(STAGES):
            raise InputError(f"it holds other matrices than {' and '.join(STAGES)}")
        if any((found.correlation.abs() > _ROUNDED).any() for found in maps.values()):
            raise InputError("it holds correlations above 1")
        return maps
