"""The pictures of a study, and every number in them as CSV."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from swbn_lightning.files.pictures import to_png
from swbn_lightning.files.writing import replacing, write_whole
from swbn_lightning.runs.curves import (
    MEASURES,
    Accuracy,
    Group,
    accuracy_csv,
    accuracy_intervals,
    curve_grid,
    curves_csv,
    has_curves,
)
from swbn_lightning.runs.study.cells import Cell, short_names
from swbn_lightning.runs.study.observations import quantities
from swbn_lightning.runs.study.running import finished_training


def draw(cells: Sequence[Cell], observed: pd.DataFrame, folder: Path) -> list[Path]:
    """``curves.png`` and ``accuracy.png`` with the CSV files of the same names; what has no numbers is left out.

    Args:
        cells: those whose runs are done.
        observed: what was observed of them.
        folder: where to write.

    Returns:
        The pictures.
    """
    pictures = []
    parts = {title: own for title, own in curve_groups(cells).items() if all(has_curves(own, m) for m in MEASURES)}
    if parts:
        write_whole(folder / "curves.csv", curves_csv(parts))
        _save(curve_grid(parts), folder / "curves.png")
        pictures.append(folder / "curves.png")
    tests = accuracies(observed)
    if tests:
        write_whole(folder / "accuracy.csv", accuracy_csv(tests))
        _save(accuracy_intervals(tests), folder / "accuracy.png")
        pictures.append(folder / "accuracy.png")
    return pictures


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as file:
        file.write(to_png(figure))


def curve_groups(cells: Sequence[Cell]) -> dict[str, list[Group]]:
    """What is compared in one picture, a configuration with one network: a line a norm, over the seeds."""
    found: dict[str, dict[str, list[Cell]]] = {}
    names = short_names([cell.experiment.path for cell in cells])
    for cell in cells:
        title = f"{names[cell.experiment.path]}, {cell.network.label}"
        found.setdefault(title, {}).setdefault(cell.norm.label, []).append(cell)
    return {
        title: [Group(label, [quantities(own) for cell in cells if (own := finished_training(cell))])
                for label, cells in norms.items()]
        for title, norms in found.items()
    }  # fmt: skip


def accuracies(observed: pd.DataFrame) -> list[Accuracy]:
    """The accuracies: a panel a configuration and setting, a line a norm, with the network where there are several."""
    rows = observed[observed.metric == "accuracy"]
    several, names = rows.network.nunique() > 1, short_names(rows.config)
    return [
        Accuracy(
            f"{row.network}, {row.norm}" if several else row.norm,
            " ".join(word for word in (names[row.config], row.setting) if word),
            f"seed {row.seed}",
            row.value,
            row.ci95,
        )
        for row in rows.itertuples()
    ]
