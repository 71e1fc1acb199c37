"""Curves and accuracies: what is drawn is what was given, as computed by numpy, and stands in the CSV text."""

import csv
import io

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot

from swbn_lightning.files.pictures import OKABE_ITO, to_array
from swbn_lightning.runs.curves import Accuracy, Group, accuracy_csv, accuracy_intervals, course, curves, curves_csv

RUNS = 4
EPOCHS = np.arange(1, 6)


def group(label="bn", runs=RUNS, seed=0, quantities=("val/loss", "train/loss", "val/accuracy", "train/accuracy")):
    rng = np.random.default_rng(seed)
    values = {name: rng.random((runs, len(EPOCHS))) for name in quantities}
    made = [{name: dict(zip(EPOCHS.tolist(), v[run].tolist(), strict=True)) for name, v in values.items()} for run in
            range(runs)]  # fmt: skip
    return Group(label, made), values


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def assert_nothing_is_cut_off(figure):
    pixels = to_array(figure)
    for border in (pixels[:4], pixels[-4:], pixels[:, :4], pixels[:, -4:]):
        assert (border == 255).all()


def test_a_course_is_mean_and_deviation():
    made, values = group()
    points = course(made, "val/loss")
    assert [point.x for point in points] == EPOCHS.tolist() and {point.number for point in points} == {RUNS}
    np.testing.assert_allclose([point.mean for point in points], values["val/loss"].mean(0))
    np.testing.assert_allclose([point.std for point in points], values["val/loss"].std(0, ddof=1))
    # What is not finite is left out, and a run that was killed counts as far as it went.
    uneven = course(Group("a", [{"val/loss": {2: 2.0, 1: 1.0, 5: float("nan")}}, {"val/loss": {1: 2.0}}]), "val/loss")
    assert [(point.x, point.mean, point.number) for point in uneven] == [(1, 1.5, 2), (2, 2.0, 1)]


@pytest.mark.parametrize(("measure", "times"), [("loss", 1), ("accuracy", 100)])
def test_curves_with_bands(measure, times):
    both = [group("bn", seed=0), group("swbn-fro", seed=1)]
    figure = curves([made for made, _ in both], measure)
    (axes,) = figure.axes
    lines, bands = axes.get_lines(), axes.collections
    wanted = [(values, f"{split}/{measure}") for _, values in both for split in ("val", "train")]
    assert len(lines) == len(bands) == 4
    for line, band, (values, name) in zip(lines, bands, wanted, strict=True):
        mean, std = times * values[name].mean(0), times * values[name].std(0, ddof=1)
        np.testing.assert_array_equal(line.get_xdata(), EPOCHS)
        np.testing.assert_allclose(line.get_ydata(), mean)
        assert line.get_linestyle() == ("-" if name.startswith("val") else "--")
        outline = band.get_paths()[0].vertices
        for x, low, high in zip(EPOCHS, np.maximum(mean - std, 0), mean + std, strict=True):
            at = outline[outline[:, 0] == x, 1]
            assert at.min() == pytest.approx(low) and at.max() == pytest.approx(high)
    assert [line.get_color() for line in lines] == [OKABE_ITO[0]] * 2 + [OKABE_ITO[1]] * 2
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["bn (4 runs)", "swbn-fro (4 runs)", "validation", "training"]
    assert axes.get_xlabel() == "epochs trained" and axes.get_ylabel() in ("loss", "accuracy, %")
    assert_nothing_is_cut_off(figure)


def test_the_legend_has_markers_where_the_lines_have():
    def markers(epochs):
        made = [Group(name, [{"val/loss": dict.fromkeys(range(epochs), 1.0)}]) for name in ("a", "b")]
        (axes,) = curves(made, "loss").axes
        drawn = [line.get_marker() for line in axes.get_lines()]
        *groups, split = (handle.get_marker() for handle in axes.get_legend().legend_handles)
        assert drawn == groups
        return drawn, split

    assert markers(25) == (["o", "s"], "o") and markers(26) == (["", ""], "")


def test_single_runs_have_no_band_and_missing_quantities_no_line():
    made, _ = group(runs=1, quantities=("train/loss",))
    (axes,) = curves([made], "loss", "step").axes
    assert len(axes.get_lines()) == 1 and not axes.collections and axes.get_xlabel() == "steps trained"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["bn", "training"]
    (axes,) = curves([Group("a", [{"val/loss": {3: 1.0}}])], "loss").axes  # whole numbers around a single epoch
    assert axes.get_xlim() == (2, 4) and all(tick == round(tick) for tick in axes.get_xticks())
    wrong = [
        (("accuracy",), "no accuracy to draw"),
        (("los",), "unknown measure 'los'; did you mean 'loss'"),
        (("loss", "epochs"), "unknown unit 'epochs'"),
    ]
    for words, message in wrong:
        with pytest.raises(ValueError, match=message):
            curves([made], *words)


def test_every_number_of_the_curves_is_in_the_file():
    both = [group("bn", seed=0), group("a,b\n", seed=1, runs=1)]
    rows = rows_of(curves_csv([made for made, _ in both]))
    assert len(rows) == 2 * 4 * len(EPOCHS)
    for made, values in both:
        for name, own in values.items():
            found = [row for row in rows if (row["line"], row["quantity"]) == (made.label, name)]
            assert [int(row["epochs_trained"]) for row in found] == EPOCHS.tolist()
            np.testing.assert_allclose([float(row["mean"]) for row in found], own.mean(0))
            if len(own) > 1:
                np.testing.assert_allclose([float(row["std"]) for row in found], own.std(0, ddof=1))
            assert {row["std"] == "" for row in found} == {len(own) == 1}
            assert {row["runs"] for row in found} == {str(len(own))}
    assert "steps_trained" in rows_of(curves_csv([both[0][0]], "step"))[0]


TESTED = [
    Accuracy("bn", "5-way 1-shot", "seed 0", 0.5, 0.01),
    Accuracy("bn", "5-way 1-shot", "seed 1", 0.6, 0.02),
    Accuracy("bn", "5-way 5-shot", "seed 0", 0.7, None),
    Accuracy("swbn-fro", "5-way 1-shot", "seed 0", 0.55, 0.03),
]


def test_accuracies_with_their_intervals():
    figure = accuracy_intervals(TESTED)
    first, second = figure.axes
    assert [first.get_title(), second.get_title()] == ["5-way 1-shot", "5-way 5-shot"]
    assert [tick.get_text() for tick in first.get_yticklabels()] == ["bn", "swbn-fro"]
    # Of each test a point and its bar, then the mean of the two with their deviation.
    points = [float(line.get_xdata()[0]) for line in first.get_lines() if line.get_marker() in ("o", "D")]
    assert points == pytest.approx([50, 60, 55, 55])
    bars = [tuple(float(x) for x in bar.get_segments()[0][:, 0]) for bar in first.collections]
    deviation = np.std([50, 60], ddof=1)
    expected = [(49, 51), (58, 62), (55 - deviation, 55 + deviation), (52, 58)]
    np.testing.assert_allclose(bars, expected)
    assert not second.collections  # an interval that is not known
    assert_nothing_is_cut_off(figure)


def test_every_accuracy_is_in_the_file():
    *rows, last = sorted(rows_of(accuracy_csv(TESTED)), key=lambda row: row["run"] == "mean")
    assert [tuple(row.values())[:5] for row in rows] == [(*t[:3], str(t.value), str(t.ci95 or "")) for t in TESTED]
    assert (last["line"], last["setting"], float(last["value"])) == ("bn", "5-way 1-shot", pytest.approx(0.55))
    assert float(last["std"]) == pytest.approx(np.std([0.5, 0.6], ddof=1))


def test_labels_are_shown_as_they_stand_and_nothing_is_global():
    settings, backend = dict(matplotlib.rcParams), matplotlib.get_backend()
    label = r"_a$\frac$ " + 60 * "x"
    figure = curves([Group(label, [{"val/loss": {1: 1.0, 2: 0.5}}]), *(group(f"g{n}")[0] for n in range(8))], "loss")
    shown = figure.axes[0].get_legend().get_texts()[0].get_text()
    assert shown.strip().startswith(r"_a\$\frac\$") and len(shown) < 60
    to_array(figure)  # a formula that is none would raise
    solid = [line for line in figure.axes[0].get_lines() if line.get_linestyle() == "-"]
    assert len({(line.get_color(), line.get_marker()) for line in solid}) == 9
    to_array(accuracy_intervals([Accuracy("$x^$", "$y_$", "", 0.5, 0.1)]))
    assert pyplot.get_fignums() == [] and dict(matplotlib.rcParams) == settings and matplotlib.get_backend() == backend
