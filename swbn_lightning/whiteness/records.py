"""CSV files of a run: whiteness by epoch and layer, and the matrices of heatmaps."""

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import csv_rows, reading, whole
from swbn_lightning.files.writing import write_whole
from swbn_lightning.whiteness.measures import MEASURES, correlation_distance
from swbn_lightning.whiteness.moments import FeatureMoments

WHITENESS_FILE = "whiteness.csv"
MEAN = "mean"  # in place of a layer's name: the mean over the layers
COUNTS = ("num_features", "num_samples", "num_constant")
_ROW = ("epoch", "step", "layer")
_MAP_COLUMNS = ("map", "epoch", "num_features", "rms", "channel")
MOST_CHANNELS = 1_024  # of a matrix that is written or read
COLUMNS = (*_ROW, *MEASURES, *COUNTS, "seconds")
# In a checkpoint, which may be anybody's: rows (200 layers after 1,000 epochs), channels, letters of a name, numbers.
_MOST_ROWS, _MOST_KEPT, _LONGEST_NAME, _LARGEST = 200_000, 4096, 300, 1e100


def append_whiteness(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to ``whiteness.csv``; a new file gets a header, and missing values stay empty.

    Raises:
        InputError: the file has other columns, or is a link.
    """
    if path.is_symlink():
        raise InputError(f"{path} is a link; move it away, so that nothing outside of the folder is written to.")
    torn, new = False, not (path.exists() and path.stat().st_size)
    if not new:
        with path.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader(file), [])
            torn = not file.read().endswith("\n")  # the writer was killed in the middle of a line
        if tuple(header) != COLUMNS:
            raise InputError(f"{path} has the columns {header}, not {list(COLUMNS)}; move it away to go on.")
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write("\n" if torn else "")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def read_whiteness(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a ``whiteness.csv``: numbers, and ``layer`` (``"mean"`` for the mean over the layers).

    If an epoch appears twice, because training was resumed from before it, the later rows count. A line that was never
    finished is left out.

    Raises:
        InputError: the file is not a ``whiteness.csv``, or is too large.
    """
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    with reading(path):
        for _, row in csv_rows(Path(path), _ROW, log=True):
            numbers = {key: float(text) for key, text in row.items() if key not in _ROW and text}
            key = whole(row["epoch"]), row["layer"]
            rows[key] = {"epoch": key[0], "step": whole(row["step"]), "layer": row["layer"], **numbers}
    return [rows[key] for key in sorted(rows, key=lambda key: key[0])]


@dataclass(frozen=True)
class CorrelationMap:
    """The correlation matrix of some of a layer's channels."""

    channels: list[int]
    correlation: Tensor  # [k, k]; NaN in the rows and columns of constant channels
    epoch: int  # -1 is before training
    num_features: int  # of the whole layer,
    rms: float  # and its RMS off-diagonal correlation

    @staticmethod
    def of(moments: FeatureMoments, epoch: int, count: int = 128, seed: int = 0) -> "CorrelationMap":
        """Take at most ``count`` channels, chosen by the seed: the same ones for the same number of channels."""
        channels = choose_channels(moments.num_features, count, seed)
        correlation = moments.correlation(varying=False)[channels][:, channels].cpu()
        rms = float(correlation_distance(moments.correlation(), normalized=True))
        return CorrelationMap(channels, correlation, epoch, moments.num_features, rms)


def choose_channels(num_features: int, count: int = 128, seed: int = 0) -> list[int]:
    """Choose at most ``count`` channels at random, ascending; 128 in the paper's heatmaps (section 4.1.3)."""
    generator = torch.Generator().manual_seed(seed)
    return sorted(torch.randperm(num_features, generator=generator)[:count].tolist())


def heatmap_name(layer: str) -> str:
    """Return the name of a layer's heatmap files, without extension."""
    return "heatmap_" + re.sub(r"[^\w.-]", "_", layer)


def write_heatmap(path: Path, maps: Mapping[str, CorrelationMap]) -> None:
    """Write correlation matrices to a CSV file, completely or not at all.

    Each line is a row of one matrix (``"before"`` or ``"after"``), with a column for each channel of either. Missing
    values are empty.
    """
    channels = sorted({channel for found in maps.values() for channel in found.channels})
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_MAP_COLUMNS, *channels], lineterminator="\n")
    writer.writeheader()
    for name, found in maps.items():
        given = {"map": name, "epoch": found.epoch, "num_features": found.num_features, "rms": found.rms}
        for channel, values in zip(found.channels, found.correlation.tolist(), strict=True):
            row: dict[Any, Any] = {**given, "channel": channel}
            row |= {c: v for c, v in zip(found.channels, values, strict=True) if not math.isnan(v)}
            writer.writerow(row)
    write_whole(path, text.getvalue())


def read_heatmap(path: str | Path) -> dict[str, CorrelationMap]:
    """Read the correlation matrices of a heatmap's CSV file, under ``"before"`` and ``"after"``.

    Raises:
        InputError: the file is no such file, or a matrix has more than 1,024 channels.
    """
    with reading(path):
        lines: dict[str, list[dict[str, str]]] = {}
        for _, line in csv_rows(Path(path), _MAP_COLUMNS):
            lines.setdefault(line["map"], []).append(line)
            if len(lines[line["map"]]) > MOST_CHANNELS:
                raise InputError(f"its matrix has more than {MOST_CHANNELS} rows")
        return {name: _map_of(own) for name, own in lines.items()}


def _map_of(lines: list[dict[str, str]]) -> CorrelationMap:
    channels = [whole(line["channel"]) for line in lines]
    matrix = [[float(line[str(channel)] or math.nan) for channel in channels] for line in lines]
    first = lines[0]
    epoch, num_features = whole(first["epoch"]), whole(first["num_features"])
    return CorrelationMap(channels, torch.tensor(matrix, dtype=torch.float64), epoch, num_features, float(first["rms"]))


def measurements(found: Any) -> list[dict[str, Any]]:
    """Return the rows of whiteness in a checkpoint; none if one of them is not a measurement."""
    rows = found if isinstance(found, list) and len(found) <= _MOST_ROWS else []
    return [dict(row) for row in rows] if all(_is_measurement(row) for row in rows) else []


def maps_of(found: Any) -> dict[str, dict[str, CorrelationMap]]:
    """Return the correlation matrices in a checkpoint, by layer; none if one of them is not such a matrix."""
    try:
        maps = {layer: {kind: CorrelationMap(**own) for kind, own in kinds.items()} for layer, kinds in found.items()}
    except (AttributeError, TypeError):
        return {}
    good = all(_is_name(layer) and kinds.keys() <= {"before", "after"} for layer, kinds in maps.items())
    return maps if good and all(_is_map(own) for kinds in maps.values() for own in kinds.values()) else {}


def _is_measurement(row: Any) -> bool:
    if not isinstance(row, dict) or not {"epoch", "step", "distance", "rms"} <= row.keys() <= set(COLUMNS):
        return False
    if type(row["epoch"]) is not int or type(row["step"]) is not int or not _is_name(row.get("layer", "mean")):
        return False
    return all(_is_number(value) for key, value in row.items() if key != "layer")


def _is_map(own: CorrelationMap) -> bool:
    matrix, channels = own.correlation, own.channels
    if type(matrix) is not Tensor or matrix.device.type != "cpu" or matrix.layout != torch.strided:
        return False
    if not isinstance(channels, list) or not 0 < len(channels) <= _MOST_KEPT:
        return False
    whole = all(type(number) is int and 0 <= number < 10**9 for number in (*channels, own.num_features))
    shaped = matrix.is_floating_point() and matrix.shape == (len(channels), len(channels))
    return whole and shaped and type(own.epoch) is int and _is_number(own.epoch) and type(own.rms) is float


def _is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= _LONGEST_NAME


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) < _LARGEST
    return type(value) is float and (abs(value) < _LARGEST or not math.isfinite(value))
