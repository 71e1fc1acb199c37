"""The pictures: what is drawn is what was given, labelled, within the figure, and without global state."""

import matplotlib
import numpy as np
import pytest
import torch

from swbn_lightning.files.pictures import OKABE_ITO, to_array
from swbn_lightning.whiteness import CorrelationMap
from swbn_lightning.whiteness.measures import MEASURES
from swbn_lightning.whiteness.plots import LABELS, compare_whiteness, heatmap_pairs, whiteness_by_layer


def a_map(epoch, size=6, seed=0):
    x = np.random.default_rng(seed).normal(size=(30, size))
    return CorrelationMap(list(range(size)), torch.from_numpy(np.corrcoef(x.T)), epoch, 2 * size, 0.125 + seed / 8)


def pair(seed=0):
    return {"before": a_map(-1, seed=seed), "after": a_map(149, seed=seed + 1)}


def rows(epochs, layers):
    found = []
    for epoch in epochs:
        values = [0.5 / (epoch + 2) + 0.01 * number for number in range(layers)]
        found += [
            {"epoch": epoch, "layer": f"net.blocks.{n}.norm", **dict.fromkeys(MEASURES, v)}
            for n, v in enumerate(values)
        ]
        found.append({"epoch": epoch, "layer": "mean", **dict.fromkeys(MEASURES, float(np.mean(values)))})
    return found


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def assert_nothing_is_cut_off(figure):
    pixels = to_array(figure)
    # Below, a layout that has not seen how large the texts are leaves 6.
    for border in (pixels[:4], pixels[-10:], pixels[:, :4], pixels[:, -4:]):
        assert (border == 255).all()


@pytest.mark.parametrize("signed", [False, True])
def test_three_pairs(signed):
    columns = {"BN": pair(0), "SWBN-KL": pair(2), "SWBN-Fro": pair(4)}
    figure = heatmap_pairs(columns, signed)
    *grid, bar = figure.axes
    assert len(grid) == 6
    for axes, (stage, name) in zip(grid, [(s, n) for s in ("before", "after") for n in columns], strict=True):
        (image,) = axes.get_images()
        matrix = columns[name][stage].correlation.numpy()
        np.testing.assert_array_equal(image.get_array(), matrix if signed else np.abs(matrix))
        assert image.get_clim() == ((-1, 1) if signed else (0, 1))
        assert image.get_cmap().name == ("RdBu_r" if signed else "viridis")
        assert axes.get_title() == (name if stage == "before" else "")
        assert axes.get_xlabel() == f"6 of 12 channels, RMS {columns[name][stage].rms:.3f}"
    assert grid[0].get_ylabel() == "before training\nchannel" and grid[3].get_ylabel() == "after epoch 150\nchannel"
    assert bar.get_ylabel() == ("correlation" if signed else "absolute correlation")
    assert_nothing_is_cut_off(figure)


def test_rows_say_after_which_epoch_each_matrix_is():
    columns = {"killed": {"before": a_map(-1)}, "short": pair(1), "long": pair(2)}
    figure = heatmap_pairs(columns)
    assert figure.axes[4].get_ylabel() == "after epoch 150\nchannel"
    columns["short"]["after"] = a_map(1)
    figure = heatmap_pairs(columns)
    assert [axes.get_ylabel() for axes in figure.axes[:6]] == ["before training\nchannel", "", "", "", "channel", ""]
    titles = [axes.get_title() for axes in figure.axes[:6]]
    assert titles == ["killed", "short", "long", "", "after epoch 2", "after epoch 150"]
    assert_nothing_is_cut_off(figure)


def test_before_alone_and_constant_channels():
    found = a_map(-1)
    found.correlation[2] = found.correlation[:, 2] = torch.nan
    figure = heatmap_pairs({"a": {"before": found}, "b": pair()})
    pixels = to_array(figure).reshape(-1, 3)
    assert (pixels == (0xBD, 0xBD, 0xBD)).all(1).sum() > 100  # gray
    assert sum(axes.axison for axes in figure.axes[:4]) == 3
    single = heatmap_pairs({"net.norm": {"after": CorrelationMap([0, 1], torch.eye(2), 0, 2, 0.0)}})
    assert single.axes[0].get_xlabel() == "2 channels, RMS 0.000" and single.axes[0].get_title() == "after epoch 1"
    assert "net.norm" in texts(single)
    for nothing in ({}, {"a": {}}):
        with pytest.raises(ValueError, match="nothing to draw"):
            heatmap_pairs(nothing)


@pytest.mark.parametrize("measure", ["rms", "kl"])
def test_lines_by_layer_and_epoch(measure):
    given = rows(range(-1, 20), layers=4)
    figure = whiteness_by_layer(given, measure)
    left, right = figure.axes
    values = {(row["epoch"], row["layer"]): row[measure] for row in given}
    shown = [-1, 4, 9, 14, 19]
    assert [line.get_label() for line in left.get_lines()] == [
        "before training",
        *(f"after epoch {e + 1}" for e in shown[1:]),
    ]
    for line, epoch in zip(left.get_lines(), shown, strict=True):
        np.testing.assert_allclose(line.get_ydata(), [values[epoch, f"net.blocks.{n}.norm"] for n in range(4)])
        assert line.get_color() in OKABE_ITO
    assert len({(line.get_color(), line.get_marker()) for line in left.get_lines()}) == 5
    assert [tick.get_text() for tick in left.get_xticklabels()] == [f"{n}.norm" for n in range(4)]
    assert left.get_ylabel() == LABELS[measure] and left.get_xlabel() and right.get_xlabel() == "epochs trained"
    (mean,) = right.get_lines()
    np.testing.assert_array_equal(mean.get_xdata(), range(21))
    np.testing.assert_allclose(mean.get_ydata(), [values[epoch, "mean"] for epoch in range(-1, 20)])
    (band,) = right.collections
    outline = band.get_paths()[0].vertices
    assert outline[:, 1].max() == pytest.approx(max(values.values())) and outline[:, 1].min() == pytest.approx(
        min(values.values())
    )
    assert_nothing_is_cut_off(figure)


def test_runs_side_by_side():
    runs = {"bn": rows([-1, 0, 4], layers=3), "swbn": rows([-1, 2], layers=3), "$odd": rows([-1], layers=2)}
    figure = compare_whiteness(runs)
    left, right = figure.axes
    for number, given in enumerate(runs.values()):
        last = max(row["epoch"] for row in given)
        by_layer = [row["rms"] for row in given if row["epoch"] == last and row["layer"] != "mean"]
        np.testing.assert_allclose(left.get_lines()[number].get_ydata()[: len(by_layer)], by_layer)
        means = {row["epoch"] + 1: row["rms"] for row in given if row["layer"] == "mean"}
        course = right.get_lines()[number]
        assert dict(zip(course.get_xdata(), course.get_ydata(), strict=True)) == pytest.approx(means)
        assert course.get_color() == left.get_lines()[number].get_color() == OKABE_ITO[number]
    assert {"bn", "swbn", r"\$odd", "epochs trained", LABELS["rms"]} <= set(texts(figure))
    assert_nothing_is_cut_off(figure)
    for nothing in ({}, {"a": []}):
        with pytest.raises(ValueError, match="no rows"):
            compare_whiteness(nothing)


def test_deep_networks_single_layers_and_values_that_are_not_finite():
    deep = whiteness_by_layer(rows([-1, 0], layers=100))
    assert 20 <= len(deep.axes[0].get_xticks()) <= 40
    assert_nothing_is_cut_off(deep)
    given = rows([-1], layers=1)
    given[0] |= {"kl": float("inf"), "layer": r"net.$\frac$"}  # no formula
    figure = whiteness_by_layer(given, "kl")
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == [r"\$\frac\$"]
    assert_nothing_is_cut_off(figure)
    with pytest.raises(ValueError, match="unknown measure 'rmss'; did you mean 'rms'"):
        whiteness_by_layer(given, "rmss")
    with pytest.raises(ValueError, match="no rows"):
        whiteness_by_layer([])
