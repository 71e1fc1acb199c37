"""What a checkpoint keeps of whiteness, if that is what it is: it may be anybody's."""

import math
from typing import Any

import torch
from torch import Tensor

from swbn_lightning.whiteness.records import COLUMNS, CorrelationMap

_MOST_ROWS = 200_000  # a network of 200 layers, measured after 1,000 epochs
_MOST_CHANNELS, _LONGEST_NAME = 4096, 300
_LARGEST = 1e100


def measurements(found: Any) -> list[dict[str, Any]]:
    """The rows of whiteness in a checkpoint; none where one of them is no measurement."""
    rows = found if isinstance(found, list) and len(found) <= _MOST_ROWS else []
    return [dict(row) for row in rows] if all(_is_measurement(row) for row in rows) else []


def maps_of(found: Any) -> dict[str, dict[str, CorrelationMap]]:
    """The correlation matrices in a checkpoint, by layer; none where one of them is no such matrix."""
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
    if not isinstance(channels, list) or not 0 < len(channels) <= _MOST_CHANNELS:
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
