"""Classifiers on the page: paired by image, and what they confused."""

import numpy as np
import pytest

from swbn_lightning.runs.compare import compare
from swbn_lightning.runs.confusion import SavedClass, SavedConfusion, SavedPair
from swbn_lightning.runs.page.confused import heatmap
from tests.made_runs import make_fit, make_image_test
from tests.report.page_reader import report

pytestmark = pytest.mark.usefixtures("quick_pictures")

RNG = np.random.default_rng(0)


def classifier(folder, norm, labels, share=0.6, names=None, seed=0):
    """A training with a test in which so many images were classified correctly."""
    fit = make_fit(folder / "version_0", norm, seed)
    number = len(names) if names else int(labels.max()) + 1
    guessed = np.where(
        RNG.random(len(labels)) < share, labels, (labels + RNG.integers(1, number, len(labels))) % number
    )
    return make_image_test(folder / "version_1", fit, labels, guessed, names)


def test_differences_are_those_of_compare(tmp_path):
    labels = np.arange(200) % 4
    for norm, share in (("bn", 0.5), ("swbn-fro", 0.8)):
        classifier(tmp_path / "s" / norm, norm, labels, share)
    page = report(tmp_path / "s")
    (row,) = page.table("runs")
    _, line = compare([str(tmp_path / "s" / "bn"), str(tmp_path / "s" / "swbn-fro")])
    deciding = line.difference.over_episodes
    assert row["difference ± 95%, points"] == f"{100 * deciding.mean:+.2f} ± {100 * deciding.half_width:.2f}"
    assert (row["tested on"], row["interval over"], row["test"]) == ("200 images", "images", "test, 4 classes")
    assert row["McNemar's p"] == f"{line.mcnemar.mcnemar_p:.2g}" and row["distinguishable"] == "yes"
    assert "image by image" in page.text and "Images that only one of two runs got right" in page.text
    assert len([alt for alt, _ in page.images if alt.startswith("Confusion of classes")]) == 2
    assert "macro F1, %" in page.tables[-1][0] or any("macro F1, %" in table[0] for table in page.tables)


def test_of_many_classes_the_most_confused_pairs_are_listed(tmp_path):
    names = [f"<b>kind {number}</b>" for number in range(31)]
    labels = np.arange(31).repeat(10)
    guessed = labels.copy()
    guessed[labels == 4], guessed[:3] = 7, 1
    fit = make_fit(tmp_path / "a" / "version_0")
    make_image_test(tmp_path / "a" / "version_1", fit, labels, guessed, names)
    page = report(tmp_path / "a")
    assert not any(alt.startswith("Confusion") for alt, _ in page.images)
    first, second = (row for table in page.tables if "predicted as" in table[0] for row in table[1:])
    assert first == [names[4], names[7], "10 of 10", "100.00"] and second == [names[0], names[1], "3 of 10", "30.00"]
    (accuracies,) = (table for table in page.tables if table[0] == ["class", "accuracy, %"])
    assert accuracies[1:3] == [[names[4], "0.00"], [names[0], "70.00"]] and len(accuracies) == 32


def test_odd_files_are_named(tmp_path):
    folder = classifier(tmp_path / "s" / "bn", "bn", np.arange(8) % 4)
    for name, text, words in (
        ("confusion.csv", "class,predicted,count,of\n0,77,1,1\n", "it is no count of two classes of classes.csv"),
        ("classes.csv", "class,name\n", "classes.csv cannot be read (it lacks the column 'accuracy')"),
        ("classes.csv", None, "classes.csv cannot be read (No such file or directory)"),
    ):
        (folder / name).write_text(text) if text else (folder / name).unlink()
        page = report(tmp_path / "s")
        assert words in page.text and "cannot be shown" not in page.text and page.table("run")
    (folder / "confusion.csv").unlink()
    assert "Confusion" not in report(tmp_path / "s").text


def test_a_picture_has_the_shares_of_each_class(drawn):
    classes = {label: SavedClass(name, 0.5) for label, name in ((2, "a"), (5, "$b$"))}
    figure = heatmap(SavedConfusion(classes, [SavedPair(2, 2, 3, 4), SavedPair(2, 5, 1, 4), SavedPair(5, 5, 2, 2)]))
    axes = figure.axes[0]
    shown = axes.images[0].get_array().filled(np.nan)
    np.testing.assert_array_equal(shown, [[0.75, 0.25], [np.nan, 1]])
    assert [text.get_text() for text in axes.texts] == ["75", "25", "100"]
    figure.draw_without_rendering()  # names with a dollar are no formulas
