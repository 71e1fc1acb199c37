"""The figures in the paper's tables, from ``paper_results.csv``.

Source: Zhang et al., *Stochastic Whitening Batch Normalization*, CVPR 2021: two wall-clock tables, CIFAR-10, CIFAR-100,
ImageNet and few-shot.
"""

import csv
import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any

from swbn_lightning.errors import InputError


@dataclass(frozen=True)
class PaperFigure:
    """One cell of one of the paper's tables. Text fields that do not apply are empty."""

    table: str  # its label in the paper's source
    section: str
    dataset: str  # cifar-10, cifar-100, imagenet, mini-imagenet, cifar-fs
    network: str  # as build_backbone names it
    method: str  # MN, PN or CAN: matching, prototypical, cross attention network
    norm: str  # as NormFactory names it
    metric: str  # accuracy, top1, top5, epoch_time, layer_time
    setting: str  # 5W1S (ways, shots), d=256 (channels), 1 GPU
    value: float | None  # as printed; None where the table says N/A
    unit: str  # %, s, min, ms
    note: str  # N/A, a source that is not the paper (by its key in the bibliography), the number of runs


@functools.cache
def paper_figures() -> tuple[PaperFigure, ...]:
    """Return all cells of all tables, in the paper's order."""
    text = resources.files("swbn_lightning.runs").joinpath("paper_results.csv").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = list(csv.DictReader(text.splitlines()))
    return tuple(PaperFigure(**{**row, "value": float(row["value"]) if row["value"] else None}) for row in rows)


def find_paper_figure(**columns: str) -> PaperFigure | None:
    """Return the cell with these values in these columns; None if there is none, or if it says N/A.

    Args:
        columns: fields of :class:`PaperFigure`, such as ``dataset="cifar-10", network="wrn_28_10", norm="bn"``.

    Raises:
        InputError: several cells match.
    """
    figures = (figure for figure in paper_figures() if figure.value is not None)
    found = [f for f in figures if all(getattr(f, column) == value for column, value in columns.items())]
    if len(found) > 1:
        raise InputError(f"{len(found)} of the paper's figures have {columns}; give more columns.")
    return found[0] if found else None
