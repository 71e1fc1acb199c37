"""Pictures of whiteness: heatmaps of correlation matrices, and whiteness by layer and epoch.

Colours are readable with any colour vision: perceptually uniform (``viridis``) for absolute correlations, and diverging
(``RdBu`` of ColorBrewer) for signed ones.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from swbn_lightning.errors import InputError, unknown_name
from swbn_lightning.files.pictures import MARKERS, OKABE_ITO, new_figure, plain_text, short_names, whole_numbers
from swbn_lightning.whiteness.measures import MEASURES
from swbn_lightning.whiteness.records import MEAN, CorrelationMap

STAGES = ("before", "after")
_MOST_LINES = 5
_MOST_TICKS = 40
_TITLE, _LONG_TITLE = 24, 60  # letters over one matrix, and over two
_CONSTANT = "#bdbdbd"
LABELS = {
    "distance": "distance ‖Corr − I‖",
    "rms": "RMS off-diagonal correlation",
    "mean_abs": "mean absolute correlation",
    "covariance": "‖Cov − I‖ / √d",
    "effective_rank": "effective rank, share of d",
    "log10_condition": "log10 of the condition number",
    "kl": "criterion C_KL",
    "fro": "criterion C_Fro",
}


def heatmap_pairs(columns: Mapping[str, Mapping[str, CorrelationMap]], signed: bool = False) -> Figure:
    """Draw heatmaps of correlation matrices before and after training, as in the paper's figure (section 4.1.3).

    Each model has a column, ``before`` above ``after``; a single model's are side by side. Absolute correlations go
    from 0 (dark, as in the paper) to 1. Constant channels have no correlation and are gray.

    Args:
        columns: maps a model's name (any length; empty if a single model needs no title) to its matrices, under
            ``"before"``, ``"after"`` or both.
        signed: draw signed correlations, from -1 (blue) to 1 (red).

    Raises:
        InputError: nothing to draw.
    """
    if not columns or not all(columns.values()):
        raise InputError(f"nothing to draw: {dict(columns)!r}.")
    stages = [stage for stage in STAGES if any(stage in maps for maps in columns.values())]
    single = len(columns) == 1
    rows, cols = (1, len(stages)) if single else (len(stages), len(columns))
    figure = new_figure(3.4 * cols + 1.3, 3.6) if single else new_figure(2.35 * cols + 1.2, 2.4 * rows + 0.5)
    grid = figure.subplots(rows, cols, squeeze=False)
    image = None
    titles = short_names(list(columns), _TITLE)
    for column, (title, maps) in enumerate(zip(titles, columns.values(), strict=True)):
        for row, stage in enumerate(stages):
            axes: Axes = grid[0, row] if single else grid[row, column]
            if stage in maps:
                image = _draw_map(axes, maps[stage], signed)
            else:
                axes.set_axis_off()
            if single:
                axes.set_title(_epoch_words(maps[stage]), fontsize=10)
            elif row == 0:
                axes.set_title(title, fontsize=11)
    if single:
        grid[0, 0].set_ylabel("channel", fontsize=10)
        if title := next(iter(columns)):
            figure.suptitle(plain_text(title, _LONG_TITLE), fontsize=11)
    else:
        for row, stage in enumerate(stages):
            _say_epochs(grid[row], [maps.get(stage) for maps in columns.values()])
    assert image is not None
    bar = figure.colorbar(image, ax=grid, shrink=0.9, aspect=30)
    bar.set_label("correlation" if signed else "absolute correlation", fontsize=10)
    bar.ax.tick_params(labelsize=8)
    return figure


def whiteness_by_layer(rows: Sequence[Mapping[str, Any]], measure: str = "rms") -> Figure:
    """Draw one measure by layer, for some epochs, and by epoch, as mean and range of the layers.

    Args:
        rows: from :func:`~swbn_lightning.whiteness.read_whiteness`. Non-finite values are left out.
        measure: a name of :data:`~swbn_lightning.whiteness.measures.MEASURES`.

    Raises:
        InputError: unknown measure, or no rows.
    """
    figure, left, right = _panels(measure, [rows])
    layers, values, epochs = _layers(rows), _values(rows, measure), _epochs(rows)
    for line, epoch in enumerate(_spread(epochs)):
        label = "before training" if epoch < 0 else f"after epoch {epoch + 1}"
        left.plot(
            range(len(layers)), [values.get((epoch, layer), math.nan) for layer in layers], label=label, **_style(line)
        )
    _draw_course(right, epochs, layers, values)
    for axes, columns in ((left, 3), (right, 1)):
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize=8, frameon=False, borderpad=0)
    _label_panels(left, right, layers, measure)
    return figure


def compare_whiteness(runs: Mapping[str, Sequence[Mapping[str, Any]]], measure: str = "rms") -> Figure:
    """Draw one measure of several runs: by layer after each run's last epoch, and the mean of the layers by epoch.

    Args:
        runs: maps a run's name to its rows, as in :func:`whiteness_by_layer`.
        measure: as in :func:`whiteness_by_layer`.

    Raises:
        InputError: unknown measure, no runs, or a run without rows.
    """
    figure, left, right = _panels(measure, list(runs.values()))
    names = _layers([row for rows in runs.values() for row in rows])
    for number, (label, rows) in enumerate(runs.items()):
        values, epochs = _values(rows, measure), _epochs(rows)
        last = [values.get((epochs[-1], name), math.nan) for name in names]
        left.plot(range(len(names)), last, label=plain_text(label), **_style(number))
        means = [values.get((epoch, MEAN), math.nan) for epoch in epochs]
        right.plot([epoch + 1 for epoch in epochs], means, **_style(number))
    left.set_title("after the last epoch measured", fontsize=10)
    right.set_title("mean of the layers", fontsize=10)
    figure.legend(loc="outside upper left", ncols=2, fontsize=8, frameon=False)
    _label_panels(left, right, names, measure)
    return figure


def _panels(measure: str, runs: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Figure, Axes, Axes]:
    """Make a wide panel for lines by layer, and one for lines by epoch."""
    if measure not in MEASURES:
        raise unknown_name("measure", measure, MEASURES)
    if not runs or not all(runs):
        raise InputError("no rows of whiteness to draw.")
    figure = new_figure(8.4, 3.9)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    return figure, left, right


def _label_panels(left: Axes, right: Axes, layers: list[str], measure: str) -> None:
    step = math.ceil(len(layers) / _MOST_TICKS) or 1
    names = [plain_text(name) for name in _short(layers)[::step]]
    left.set_xticks(range(0, len(layers), step), names, rotation=90, fontsize=7)
    left.set_xlabel("layer, from input to output", fontsize=10)
    left.set_ylabel(LABELS[measure], fontsize=10)
    left.set_ylim(bottom=0)
    whole_numbers(right)
    right.tick_params(axis="x", labelsize=8)
    right.set_xlabel("epochs trained", fontsize=10)
    for axes in (left, right):
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)


def _style(number: int) -> dict[str, Any]:
    count = len(OKABE_ITO)
    marker = MARKERS[(number + number // count) % len(MARKERS)]
    return {"color": OKABE_ITO[number % count], "marker": marker, "markersize": 4, "linewidth": 1.4}


def _layers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["layer"] for row in rows if row["layer"] != MEAN))


def _epochs(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({row["epoch"] for row in rows})


def _values(rows: Sequence[Mapping[str, Any]], measure: str) -> dict[tuple[int, str], float]:
    """Return values by epoch and layer; NaN for non-finite ones."""
    found = {(row["epoch"], row["layer"]): row.get(measure, math.nan) for row in rows}
    return {key: value if math.isfinite(value) else math.nan for key, value in found.items()}


def _draw_map(axes: Axes, found: CorrelationMap, signed: bool) -> Any:
    matrix = found.correlation.numpy() if signed else found.correlation.abs().numpy()
    image = axes.imshow(
        matrix, cmap="RdBu_r" if signed else "viridis", vmin=-1 if signed else 0, vmax=1, interpolation="nearest"
    )
    axes.set_facecolor(_CONSTANT)  # shows where the matrix is NaN
    shown = "" if len(matrix) == found.num_features else f"{len(matrix)} of "
    axes.set_xlabel(f"{shown}{found.num_features} channels, RMS {found.rms:.3f}", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.tick_params(labelsize=8)
    return image


def _say_epochs(panels: Sequence[Axes], maps: Sequence[CorrelationMap | None]) -> None:
    """Say after which epoch a row's matrices were measured: at the left or, if they differ, above each."""
    shown = [(axes, found) for axes, found in zip(panels, maps, strict=True) if found is not None]
    words = [_epoch_words(found) for _, found in shown]
    alike = len(set(words)) == 1
    shown[0][0].set_ylabel(f"{words[0]}\nchannel" if alike else "channel", fontsize=10)
    if not alike:
        for (axes, _), own in zip(shown, words, strict=True):
            above = axes.get_title()
            axes.set_title(f"{above}\n{own}" if above else own, fontsize=10)


def _draw_course(axes: Axes, epochs: list[int], layers: list[str], values: Mapping[tuple[int, str], float]) -> None:
    x = [epoch + 1 for epoch in epochs]
    found = np.array([[values.get((epoch, layer), math.nan) for layer in layers] for epoch in epochs])
    known = np.ma.masked_invalid(found)
    axes.fill_between(x, known.min(1), known.max(1), color=OKABE_ITO[0], alpha=0.2, linewidth=0, label="all layers")
    mean = [values.get((epoch, MEAN), math.nan) for epoch in epochs]
    axes.plot(x, mean, color="#000000", marker="o", markersize=3, linewidth=1.6, label="mean of the layers")


def _spread(epochs: list[int]) -> list[int]:
    """Return at most as many epochs as lines can be told apart, including the first and the last."""
    chosen = np.linspace(0, len(epochs) - 1, min(_MOST_LINES, len(epochs))).round().astype(int)
    return [epochs[index] for index in chosen]


def _short(layers: list[str]) -> list[str]:
    """Return names without their common beginning."""
    split = [name.split(".") for name in layers]
    shared = 0
    while all(len(parts) > shared + 1 for parts in split) and len({parts[shared] for parts in split}) == 1:
        shared += 1
    return [".".join(parts[shared:]) for parts in split]


def _epoch_words(found: CorrelationMap) -> str:
    return "before training" if found.epoch < 0 else f"after epoch {found.epoch + 1}"
