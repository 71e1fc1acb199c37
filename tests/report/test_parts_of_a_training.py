"""A training in several parts is one line of the page, whose figures are those of what it came to."""

import json
import time

import pytest

from swbn_lightning.runs.read import Run, as_trainings
from tests.made_runs import make_fit, make_test
from tests.report.page_reader import report

pytestmark = pytest.mark.usefixtures("quick_pictures")

VALIDATION, TEST = "while training: val, %", "test, 5-way 1-shot, %"


def curve(page, quantity="val/accuracy"):
    rows = [row for row in page.links["curves.csv"] if row["quantity"] == quantity]
    return {int(row["epochs_trained"]): float(row["mean"]) for row in rows}


@pytest.fixture
def parts(tmp_path):
    """The first epoch, and a part with the two after it."""
    first = make_fit(tmp_path / "n" / "version_0", epochs=1)
    return first, make_fit(tmp_path / "n" / "version_1", source=first, epochs=2, first=1)


def test_validation_is_that_of_the_last_part_and_the_rest_of_all(parts, tmp_path):
    make_test(tmp_path / "n" / "version_2", parts[1], 0.75)
    page = report(tmp_path / "n")
    (row,) = page.table("run")
    assert (row[VALIDATION], row[TEST]) == ("70.00 ± 1.23", "75.00 ± 0.23")
    assert (row["epochs"], row["training, s"], row["state"]) == ("3 of 3", "154", "finished, in 2 parts")
    assert row["RMS correlation, start → end"] == "0.325 → 0.100"
    assert curve(page) == pytest.approx({1: 0.5, 2: 0.6, 3: 0.7})


def test_a_training_of_very_many_parts(tmp_path):
    runs = [Run(tmp_path / f"{n}", id=f"{n:016x}", origin=f"{n - 1:016x}") for n in range(1_000)]
    begun = time.monotonic()
    (training,) = as_trainings(runs[::-1])
    assert training.parts == runs and time.monotonic() - begun < 15
    runs[0].origin = runs[-1].id  # a circle: none went on from itself
    assert [training.parts for training in as_trainings(runs)] == [[run] for run in runs]


def test_a_part_whose_best_is_worse_than_what_came_before_shows_its_own(parts, tmp_path):
    """It counts its best anew, and that is the checkpoint which ``--ckpt_path runs/n`` tests."""
    results = json.loads((parts[1] / "results.json").read_text())
    best, last = ({**results["results"][0], "accuracy": value} for value in (0.25, 0.125))
    (parts[1] / "results.json").write_text(json.dumps({**results, "results": [best, last]}))
    assert report(tmp_path / "n").table("run")[0][VALIDATION] == "25.00 ± 1.23"


@pytest.mark.parametrize(("left", "shown"), [("a checkpoint", None), ("nothing", "70.00 ± 1.23")])
def test_a_part_without_a_validation(left, shown, parts, tmp_path):
    """What it left is no checkpoint that was ever validated; where it left none, the part before it speaks."""
    third = make_fit(tmp_path / "n" / "version_2", source=parts[1], epochs=0, first=3, finished=False)
    if left == "nothing":
        (third / "checkpoints" / "best.ckpt").unlink()
    (row,) = report(tmp_path / "n").table("run")
    assert row.get(VALIDATION) == shown and row["epochs"] == "3 of 3"


def test_two_that_went_on_from_one_have_figures_of_their_own(parts, tmp_path):
    again = make_fit(tmp_path / "n" / "version_2", source=parts[0], epochs=1, first=1)
    page = report(tmp_path / "n")
    assert [(row["run"], row[VALIDATION]) for row in page.table("run")] == [
        (parts[1].name, "70.00 ± 1.23"),
        (again.name, "60.00 ± 1.23"),
    ]
    assert curve(page) == pytest.approx({1: 0.5, 2: 0.6})  # of a training that was repeated the newest


def test_what_was_trained_beyond_the_epoch_that_another_went_on_from_is_not_that_ones(tmp_path):
    first = make_fit(tmp_path / "n" / "version_0", epochs=3)
    make_fit(tmp_path / "n" / "version_1", source=first, epochs=1, first=1)
    page = report(tmp_path / "n")
    (row,) = page.table("run")
    assert row["epochs"] == "2 of 3" and curve(page) == pytest.approx({1: 0.5, 2: 0.6})
    assert row["RMS correlation, start → end"] == "0.325 → 0.125"  # after the second epoch


def test_a_test_of_the_first_part_does_not_stand_for_one_of_the_last(parts, tmp_path):
    make_test(tmp_path / "n" / "version_2", parts[1], 0.75)
    make_test(tmp_path / "n" / "version_3", parts[0], 0.25)  # made later
    make_fit(tmp_path / "n" / "version_4", "swbn-fro")
    make_test(tmp_path / "n" / "version_5", tmp_path / "n" / "version_4", 0.5)
    page = report(tmp_path / "n")
    assert [row[TEST] for row in page.table("run")] == ["75.00 ± 0.23", "50.00 ± 0.23"]
    assert [float(row["value"]) for row in page.links["accuracy.csv"]] == [0.75, 0.5]
