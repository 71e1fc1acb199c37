"""Whose a test is: a training that took the place of another one is not the one that was tested."""

import csv
import json
import os
import shutil
from pathlib import Path

import pytest

from cli import main
from swbn_lightning.errors import InputError
from swbn_lightning.runs.compare import compare
from tests.reliability.test_odd_run_files import DAY, ONE_TEST, change, make_tested
from tests.report.made_runs import make_fit
from tests.report.page_reader import report
from tests.test_compare import episodes, saved


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch):
    monkeypatch.setattr("swbn_lightning.runs.page.html.to_png", lambda figure: b"")


def trained(folder, day, norm="bn", seed=0):
    """A training that ended at a day and started on the day before."""
    fit = make_fit(folder, norm, seed)
    change(fit / "results.json", ended=DAY.format(day, 0))
    change(fit / "environment.json", started=DAY.format(day - 1, 0))
    return fit


def shown(page):
    """The runs of a page by name with the test on each of their lines."""
    return {row["run"]: row.get(ONE_TEST, "–").partition(" ")[0] for row in page.table("run")}


def the_place_is_taken(root, norm, seed, day=5):
    """A tested training is renamed, and another one takes its name; the test lies elsewhere."""
    fit = trained(root / "a" / "version_0", 2)
    test = make_tested(root / "t" / "version_0", fit, 0.75, ended=DAY.format(3, 0))
    (root / "a").rename(root / "a_old")
    trained(root / "a" / "version_0", day, norm, seed)
    return test


TAKEN = [("swbn-fro", 7, 5), ("swbn-fro", 0, 2), ("bn", 7, 2), ("bn", 0, 5)]


@pytest.mark.parametrize("norm,seed,day,copy", [*((*own, True) for own in TAKEN), ("swbn-fro", 7, 5, False)])
def test_a_test_is_not_shown_as_that_of_the_training_that_took_the_name_of_its_own(tmp_path, norm, seed, day, copy):
    test = the_place_is_taken(tmp_path / "n", norm, seed, day)
    if not copy:  # as before tests kept that: then the times tell
        (test / "training.yaml").unlink()
    lines = shown(report(tmp_path / "n", output=tmp_path / "page.html"))
    assert lines["a"] == lines["a_old"] == "–" and lines["t"] == "75.00"


def test_compare_does_not_date_a_test_by_the_training_that_took_the_place_of_its_own(tmp_path):
    other = make_tested(tmp_path / "o" / "version_1", trained(tmp_path / "o" / "version_0", 2), 0.5, DAY.format(3, 0))
    the_place_is_taken(tmp_path / "n", "swbn-fro", 7)
    (line, _) = compare([str(tmp_path / "n" / "t"), str(other)])
    assert line.seeds == (0,) and line.accuracy.mean == pytest.approx(0.75)
    # Else it would be of the newest training.
    make_tested(
        tmp_path / "n" / "b" / "version_1", trained(tmp_path / "n" / "b" / "version_0", 4), 0.25, DAY.format(6, 0)
    )
    with pytest.raises(InputError, match=r"which of .*n/t/version_0 and .*n/b/version_1 is newer: when it was trained"):
        compare([str(tmp_path / "n"), str(other)])


def test_the_absolute_path_counts_where_another_training_is_beside_a_moved_test(tmp_path):
    fit = trained(tmp_path / "one" / "a" / "version_0", 2, "bn", 1)
    trained(tmp_path / "two" / "a" / "version_0", 5, "swbn-fro", 2)
    test = make_tested(tmp_path / "two" / "t" / "version_0", fit, 0.75, DAY.format(3, 0))
    change(test / "results.json", tested_run="../../a/version_0")
    assert shown(report(tmp_path / "two", output=tmp_path / "page.html")) == {"a": "–", "t": "75.00"}
    lines = shown(report(tmp_path / "one", tmp_path / "two", output=tmp_path / "page.html"))
    assert {name.partition("/")[0]: value for name, value in lines.items()} == {"one": "75.00", "two": "–"}
    older = make_tested(tmp_path / "one" / "t" / "version_0", fit, 0.5, DAY.format(2, 1))
    shutil.move(older, tmp_path / "two" / "t" / "version_1")
    (line, _) = compare([str(tmp_path / "two" / "t"), str(test)])  # both of one training, which is not in that path
    assert line.seeds == (1,) and line.accuracy.mean == pytest.approx(0.75)


def test_where_an_older_training_is_gone_its_test_is_not_the_newest(tmp_path):
    for version, day in ((0, 2), (1, 3)):
        fit = trained(tmp_path / "n" / f"version_{version}", day)
        make_tested(tmp_path / "n" / f"version_{version + 2}", fit, 0.25 + version / 2, DAY.format(6 - version, 0))
    other = make_tested(tmp_path / "o" / "version_1", trained(tmp_path / "o" / "version_0", 2), 0.5, DAY.format(3, 0))
    runs = [str(tmp_path / "n"), str(other)]
    assert compare(runs)[0].accuracy.mean == pytest.approx(0.75)
    shutil.rmtree(tmp_path / "n" / "version_0")
    with pytest.raises(
        InputError, match=r"it cannot be told which of .*version_2 and .*version_3 is newer: when it was"
    ):
        compare(runs)
    shutil.rmtree(tmp_path / "n" / "version_1")  # of neither: by the times of the tests
    assert compare(runs)[0].accuracy.mean == pytest.approx(0.25)


@pytest.mark.parametrize("seed", [False, None, "0", 0.0])
def test_trainings_without_a_seed_are_each_its_own(tmp_path, seed):
    values = [episodes(number) for number in range(3)]
    for number in (0, 1):
        saved(tmp_path / "x", f"n{number}", values[number], seed=seed, norm="x")
    saved(tmp_path / "x", "n0", values[2], seed=seed, norm="x", version=2)  # a later test of the first one
    y = saved(tmp_path, "y", episodes(3), seed=0)
    for runs in ([str(tmp_path / "x"), y], [y, str(tmp_path / "x")]):
        lines = {line.label: line for line in compare(runs)}
        own, last = lines[str(tmp_path / "x")], lines[runs[1]]
        assert own.seeds == (None, None) and last.paired_seeds == () and last.over_seeds is None
        assert own.accuracy.mean == pytest.approx((values[1].mean() + values[2].mean()) / 2)
    main(["compare", *runs, "--output", str(tmp_path / "x.csv")])
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert [(row["seeds"], row["paired_seeds"]) for row in rows] == [("0", ""), ("", "")]


def test_a_training_without_a_seed_and_its_copy_are_one(tmp_path):
    fit = trained(tmp_path / "n" / "a" / "version_0", 2, seed=False)
    test = make_tested(tmp_path / "n" / "a" / "version_1", fit, 0.75, DAY.format(3, 0))
    shutil.copytree(tmp_path / "n" / "a", tmp_path / "n" / "copy")
    (line, _) = compare([str(tmp_path / "n"), str(test)])
    assert line.seeds == (None,)
    results = json.loads((test / "results.json").read_text())
    assert results["tested_run"] == os.path.relpath(fit, test) and Path(results["tested_checkpoint"]).is_file()
