"""The figures of the paper's tables, one cell a row, for comparison with what is measured here.

They stand in ``paper_results.csv`` beside this file, transcribed from Zhang et al., *Stochastic Whitening Batch
Normalization*, CVPR 2021: the two wall-clock tables, CIFAR-10, CIFAR-100, ImageNet and few-shot.
"""

import csv
import functools
from dataclasses import dataclass
from importlib import resources

from swbn_lightning.errors import InputError


@dataclass(frozen=True)
class PaperFigure:
    """One cell of one of the paper's tables. A text that does not apply is empty.

    Args:
        table: its label in the paper's source.
        section: where it stands.
        dataset: ``cifar-10``, ``cifar-100``, ``imagenet``, ``mini-imagenet``, ``cifar-fs``.
        network: as :func:`~swbn_lightning.backbones.build_backbone` names it.
        method: ``MN``, ``PN`` or ``CAN``: matching, prototypical, cross attention network.
        norm: as :class:`~swbn_lightning.NormFactory` names it.
        metric: ``accuracy``, ``top1``, ``top5``, ``epoch_time``, ``layer_time``.
        setting: ``5W1S`` (ways, shots), ``d=256`` (channels), ``1 GPU``.
        value: as printed; None where the table says N/A.
        unit: ``%``, ``s``, ``min``, ``ms``.
        note: N/A, the source of a figure that is not the paper's own (by its key in the bibliography), the number of
            runs where the paper gives it.
    """

    table: str
    section: str
    dataset: str
    network: str
    method: str
    norm: str
    metric: str
    setting: str
    value: float | None
    unit: str
    note: str


@functools.cache
def paper_figures() -> tuple[PaperFigure, ...]:
    """All cells of all tables, in the paper's order."""
    text = resources.files("swbn_lightning.runs").joinpath("paper_results.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple(_figure(row) for row in rows)


def find_paper_figure(**columns: str) -> PaperFigure | None:
    """The cell that has these values in these columns; None if there is none, or if it says N/A.

    Args:
        columns: of :class:`PaperFigure`, as ``dataset="cifar-10", network="wrn_28_10", norm="bn"``.

    Raises:
        InputError: more than one cell has them.
    """
    figures = (figure for figure in paper_figures() if figure.value is not None)
    found = [f for f in figures if all(getattr(f, column) == value for column, value in columns.items())]
    if len(found) > 1:
        raise InputError(f"{len(found)} of the paper's figures have {columns}; give more columns.")
    return found[0] if found else None


def _figure(row: dict[str, str]) -> PaperFigure:
    value = row.pop("value")
    return PaperFigure(value=float(value) if value else None, **row)
