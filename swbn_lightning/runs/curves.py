"""Pictures of trainings and tests: loss and accuracy over epochs, and accuracies with their intervals.

As in the paper's figures (sections 4.1.1, 4.1.2 and appendix E) a line is the mean over the runs that differ in their
seeds only, with a band of one standard deviation to each side. Every number in a picture stands in the CSV text that
the function beside it makes. Nothing here opens a window or touches ``pyplot``.
"""

import math
import textwrap
from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from swbn_lightning.errors import InputError, unknown_name
from swbn_lightning.files.pictures import MARKERS, OKABE_ITO, new_figure, plain_text, whole_numbers
from swbn_lightning.files.writing import csv_text
from swbn_lightning.runs.intervals import mean_interval

#: What is drawn together: a measure's quantities in ``metrics.csv``, the one that is judged by first.
MEASURES = {
    "loss": ("val/loss", "test/loss", "train/loss"),
    "accuracy": ("val/accuracy", "test/accuracy", "train/accuracy"),
}
UNITS = {"epoch": "epochs trained", "step": "steps trained"}
_AXES = {"loss": "loss", "accuracy": "accuracy, %"}
SPLITS = {"val": "validation", "test": "test, which chooses nothing", "train": "training"}
_DASHES: dict[str, Literal["-", "-.", "--"]] = {"val": "-", "test": "-.", "train": "--"}
_FEW_POINTS = 25  # up to which each gets a marker
MOST_POINTS = 2_000  # of a line; more than a picture has pixels


class Group(NamedTuple):
    """Runs that differ in their seeds only: one line of a picture."""

    label: str
    runs: Sequence[Mapping[str, Mapping[int, float]]]  # quantities, as "val/loss", by epochs (or steps) trained


class Point(NamedTuple):
    """A quantity after so many epochs (or steps): the mean over the runs that have it."""

    x: int
    mean: float
    std: float | None  # n - 1; None of a single run
    number: int  # of runs


class Accuracy(NamedTuple):
    """The accuracy of one test."""

    label: str  # tests of the same label differ in their seeds only
    setting: str  # within which tests are compared, as "5-way 1-shot"
    run: str  # what tells this one from others of its label
    value: float  # a fraction
    ci95: float | None  # half-width of its 95% interval, where it is known


def course(group: Group, quantity: str) -> list[Point]:
    """A quantity's course over the runs of a group; values that are not finite are left out.

    Of more than :data:`MOST_POINTS` as many, the first, the last and others in equal distances.
    """
    runs = [{x: v for x, v in run.get(quantity, {}).items() if math.isfinite(v)} for run in group.runs]
    places = sorted({x for run in runs for x in run})
    if len(places) > MOST_POINTS:
        places = [places[round(n * (len(places) - 1) / (MOST_POINTS - 1))] for n in range(MOST_POINTS)]
    found = {x: mean_interval([run[x] for run in runs if x in run]) for x in places}
    return [Point(x, own.mean, own.std, own.number) for x, own in found.items()]


def curves(groups: Sequence[Group], measure: str, unit: str = "epoch") -> Figure:
    """One measure of all groups: validation with a solid line, the test with dots and dashes, training dashed.

    Args:
        groups: a line each, with a band of one standard deviation where it has several runs.
        measure: ``"loss"`` or ``"accuracy"``.
        unit: of the x axis, ``"epoch"`` or ``"step"``.

    Raises:
        InputError: an unknown measure or unit; nothing to draw.
    """
    if measure not in MEASURES:
        raise unknown_name("measure", measure, MEASURES)
    if unit not in UNITS:
        raise unknown_name("unit", unit, UNITS)
    if not has_curves(groups, measure):
        raise InputError(f"no {measure} to draw: none of {len(groups)} groups has logged it.")
    columns = 2 if max(len(_name(group)) for group in groups) < 24 else 1
    figure = new_figure(5.2, 3.2 + 0.17 * math.ceil((len(groups) + len(SPLITS)) / columns))
    axes = figure.subplots()
    marked: set[int | str] = set()  # groups and splits of which a line has markers
    for number, group in enumerate(groups):
        for quantity in MEASURES[measure]:
            if points := course(group, quantity):
                _draw_course(axes, points, quantity, _style(number))
                marked |= {number, quantity.partition("/")[0]} if len(points) <= _FEW_POINTS else set()
    axes.set_xlabel(UNITS[unit], fontsize=10)
    axes.set_ylabel(_AXES[measure], fontsize=10)
    whole_numbers(axes)
    _plain_axes(axes)
    axes.legend(
        handles=_legend(groups, measure, marked), loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize=8,
        frameon=False, borderpad=0,
    )  # fmt: skip
    return figure


def curves_csv(groups: Sequence[Group], unit: str = "epoch") -> str:
    """Every number in :func:`curves`, as ``line, quantity, epochs_trained, mean, std, runs``.

    Accuracies are fractions; ``std`` is empty of a single run.
    """
    rows = [
        (group.label, quantity, point.x, point.mean, point.std, point.number)
        for group in groups
        for quantities in MEASURES.values()
        for quantity in quantities
        for point in course(group, quantity)
    ]
    return csv_text(("line", "quantity", f"{unit}s_trained", "mean", "std", "runs"), rows)


def has_curves(groups: Sequence[Group], measure: str) -> bool:
    """Whether there is anything to draw of a measure."""
    return any(_has(group, quantity) for group in groups for quantity in MEASURES[measure])


def accuracy_intervals(rows: Sequence[Accuracy]) -> Figure:
    """Accuracies with the 95% intervals of the tests, a panel a setting; of several seeds also mean ± deviation.

    Thin marks are single tests, thick ones the mean of several.
    """
    labels, settings = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("label", "setting"))
    figure = new_figure(max(8.4, 2.4 + 3.0 * len(settings)), 1.1 + 0.42 * len(labels))
    grid = figure.subplots(1, len(settings), squeeze=False, sharey=True)[0]
    for axes, setting in zip(grid, settings, strict=True):
        for place, label in enumerate(labels):
            own = [row for row in rows if (row.label, row.setting) == (label, setting)]
            _draw_tests(axes, place, own)
        axes.set_title(textwrap.fill(plain_text(setting, 100), 32), fontsize=10)
        axes.set_xlabel("accuracy, %", fontsize=8)
        axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        _plain_axes(axes)
    grid[0].set_yticks(range(len(labels)), [plain_text(label) for label in labels], fontsize=9)
    grid[0].set_ylim(len(labels) - 0.5, -0.5)
    return figure


def accuracy_csv(rows: Sequence[Accuracy]) -> str:
    """Every number in :func:`accuracy_intervals`: ``line, setting, run, value, ci95, std``; fractions.

    Of a line with several tests the last row, with ``mean`` for the run, is their mean and its ``std``.
    """
    groups: dict[tuple[str, str], list[Accuracy]] = {}
    for row in rows:
        groups.setdefault((row.label, row.setting), []).append(row)
    lines: list[Sequence[object]] = []
    for (label, setting), own in groups.items():
        lines += [(label, setting, row.run, row.value, row.ci95, None) for row in own]
        if len(own) > 1:
            found = mean_interval([row.value for row in own])
            lines.append((label, setting, "mean", found.mean, None, found.std))
    return csv_text(("line", "setting", "run", "value", "ci95", "std"), lines)


def _has(group: Group, quantity: str) -> bool:
    return any(math.isfinite(value) for run in group.runs for value in run.get(quantity, {}).values())


def _draw_course(axes: Axes, points: Sequence[Point], quantity: str, style: dict[str, Any]) -> None:
    split, _, measure = quantity.partition("/")
    times = 100 if measure == "accuracy" else 1
    x, mean = [point.x for point in points], [times * point.mean for point in points]
    if len(x) > _FEW_POINTS:
        style = {**style, "marker": ""}
    train = split == "train"
    face = "white" if train else style["color"]  # so that single points are told apart, too
    width = 1.1 if train else 1.6
    axes.plot(x, mean, linestyle=_DASHES[split], linewidth=width, markersize=3.5, markerfacecolor=face, **style)
    spread = [times * (point.std or 0.0) for point in points]
    if any(spread):
        pairs = list(zip(mean, spread, strict=True))
        low = [m - s if m < 0 else max(0.0, m - s) for m, s in pairs]  # neither losses nor accuracies are below zero
        high = [m + s for m, s in pairs]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.1 if train else 0.18, linewidth=0)


def _draw_tests(axes: Axes, place: int, rows: Sequence[Accuracy]) -> None:
    """Tests of one label at one place, one a little below the other."""
    color = OKABE_ITO[place % len(OKABE_ITO)]
    for number, row in enumerate(rows):
        y = place + (0.0 if len(rows) == 1 else 0.05 + 0.3 * number / len(rows))
        half = 100 * row.ci95 if row.ci95 is not None else None
        axes.errorbar(100 * row.value, y, xerr=half, fmt="o", color=color, markersize=3.5, linewidth=1, capsize=2)
    if len(rows) > 1:
        found = mean_interval([100 * row.value for row in rows])
        axes.errorbar(
            found.mean, place - 0.15, xerr=found.std, fmt="D", color=color, markersize=6, linewidth=2.6, capsize=0
        )


def _legend(groups: Sequence[Group], measure: str, marked: Container[int | str]) -> list[Line2D]:
    """A line for each group, in its colour, and one for each split that is there; with markers as they have them."""
    lines = []
    for number, group in enumerate(groups):
        style = _style(number) if number in marked else {**_style(number), "marker": ""}
        lines.append(Line2D([], [], linewidth=1.6, markersize=4, label=_name(group), **style))
    for split, words in SPLITS.items():
        if any(_has(group, f"{split}/{measure}") for group in groups):
            face = "white" if split == "train" else "#555555"
            marker = "o" if split in marked else ""
            lines.append(
                Line2D([], [], color="#555555", linestyle=_DASHES[split], linewidth=1.4, marker=marker, markersize=4,
                       markerfacecolor=face, label=words)
            )  # fmt: skip
    return lines


def _style(number: int) -> dict[str, Any]:
    """Colour and marker of a line; beyond the seventh a colour comes again, with another marker."""
    marker = MARKERS[(number + number // len(OKABE_ITO)) % len(MARKERS)]
    return {"color": OKABE_ITO[number % len(OKABE_ITO)], "marker": marker}


def _plain_axes(axes: Axes) -> None:
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _name(group: Group) -> str:
    """The label, with the number of runs where there are several."""
    name = plain_text(group.label)
    return f"{name} ({len(group.runs)} runs)" if len(group.runs) > 1 else name
