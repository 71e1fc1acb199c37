"""The report page of several runs: none is taken for another, counted twice or left out."""

import json

import pytest

from swbn_lightning.errors import InputError
from swbn_lightning.whiteness.plots import heatmap_pairs
from tests.made_runs import make_fit, make_test
from tests.report.page_reader import report

pytestmark = pytest.mark.usefixtures("quick_pictures")


def test_tests_of_different_kinds_are_not_taken_for_one(tmp_path):
    fit = make_fit(tmp_path / "n" / "version_0")
    kinds = [{}, {"inference": "transductive"}, {"queries": 7}, {"queries": 5, "shots": 5}, {"queries": 7}]
    for number, kind in enumerate(kinds):
        make_test(tmp_path / "n" / f"version_{number + 1}", fit, 0.5 + number / 8, **kind)
    page = report(tmp_path / "n")
    (row,) = page.table("run")
    expected = {
        "test, 5-way 1-shot, 15 queries, seed 0": 0.5,
        "test, 5-way 1-shot, transductive": 0.625,  # of which there is one kind, so its name is short
        "test, 5-way 1-shot, 7 queries, seed 0": 1.0,  # repeated
        "test, 5-way 5-shot": 0.875,
    }
    for name, value in expected.items():
        assert row[f"{name}, %"] == f"{100 * value:.2f} ± 0.23"
    assert len([key for key in row if key.startswith("test, ")]) == len(expected)
    assert {r["setting"]: float(r["value"]) for r in page.links["accuracy.csv"]} == expected
    evaluated = [table[1][0] for table in page.tables if table[0][0] == "evaluated"]
    assert evaluated.count("test, 5-way 1-shot, transductive") == 1


REPEATED = "Some trainings were repeated"


def test_a_training_that_was_repeated_counts_once(tmp_path):
    for number, accuracy in ((0, 0.5), (2, 0.5), (4, 0.75), (6, 0.875)):
        seed = 1 if number == 6 else 0
        rest = {"settings": {"trainer": {"max_epochs": 3}}, "epochs": 3 if number != 2 else 2}
        fit = make_fit(tmp_path / "S" / f"version_{number}", seed=seed, **rest)
        make_test(tmp_path / "S" / f"version_{number + 1}", fit, accuracy)
    page = report(tmp_path / "S")
    assert len(page.table("run")) == 4 and REPEATED in page.text
    (means,) = page.table("runs")
    assert (means["runs"], means["seeds"], means["mean, %"]) == ("S", "2", f"{(75 + 87.5) / 2:.2f}")
    rows = page.links["accuracy.csv"]
    assert [(r["run"], r["value"]) for r in rows][:2] == [("version_4", "0.75"), ("version_6", "0.875")]
    assert {r["runs"] for r in page.links["curves.csv"]} == {"2"}


def test_the_newest_is_that_which_started_last(tmp_path):
    for name, day, accuracy in (("a", 2, 0.75), ("b", 1, 0.5)):
        fit = make_fit(tmp_path / "s" / name / "version_0", epochs=day)
        test = make_test(tmp_path / "s" / name / "version_1", fit, accuracy)
        for folder, hour in ((fit, 1), (test, 2)):
            written = json.loads((folder / "environment.json").read_text())
            told = {**written, "started": f"2026-01-0{day}T0{hour}:00:00+00:00"}
            (folder / "environment.json").write_text(json.dumps(told))
    page = report(tmp_path / "s")
    assert "accuracy.csv" not in page.links and REPEATED in page.text  # one accuracy: no picture of several
    assert max(int(r["epochs_trained"]) for r in page.links["curves.csv"]) == 2
    assert all(row["seed"] == "0" for row in page.table("run"))


def test_tests_without_their_training_have_its_seed_or_none(tmp_path):
    for seed, accuracy in ((1, 0.5), (2, 0.75)):
        folder = tmp_path / "s" / f"r{seed}"
        fit = make_fit(folder / "version_0", seed=seed)
        make_test(folder / "version_1", fit, accuracy)
        fit.rename(tmp_path / f"gone{seed}")
    page = report(tmp_path / "s")  # a test's own seed is not its training's
    assert len(page.table("run")) == 2 and "seed" not in page.table("run")[0]
    assert page.table("runs")[0]["seeds"] == "2" and REPEATED not in page.text
    for seed in (1, 2):
        (tmp_path / f"gone{seed}" / "config.yaml").rename(tmp_path / "s" / f"r{seed}" / "version_1" / "training.yaml")
    page = report(tmp_path / "s")
    assert [row["seed"] for row in page.table("run")] == ["1", "2"] and REPEATED not in page.text
    assert page.table("runs")[0]["seeds"] == "2"


def test_runs_with_long_names_that_are_alike_have_all_their_heatmaps(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "swbn_lightning.runs.page.page.heatmap_pairs",
        lambda columns, signed: drawn.append(list(columns)) or heatmap_pairs(columns, signed),
    )
    names = [f"the_same_beginning/{norm}/the_same_ending" for norm in ("bn", "swbn")]
    for name in names:
        make_fit(tmp_path / "s" / name / "version_0")
    make_fit(tmp_path / "s" / "x" / "version_0")
    report(tmp_path / "s")
    assert drawn == [[*names, "x"]]


def test_predictions_are_no_tests(tmp_path):
    fit = make_fit(tmp_path / "n" / "version_0")
    make_test(tmp_path / "n" / "version_1", fit)
    predicted = tmp_path / "n" / "version_2"
    make_test(predicted, fit)
    (predicted / "results.json").unlink()
    (predicted / "environment.json").write_text(json.dumps({"stage": "predict"}))
    page = report(tmp_path / "n")
    assert "1 training, 1 test." in page.text and "missing" not in page.text and "version_2" not in page.text
    with pytest.raises(InputError, match="version_2 holds predictions alone"):
        report(predicted)


def test_a_test_is_shown_with_the_training_that_it_names_from_its_own_folder(tmp_path):
    first, second = (make_fit(tmp_path / "n" / f"version_{number}", seed=number) for number in range(2))
    test = make_test(tmp_path / "n" / "version_2", first)
    results = json.loads((test / "results.json").read_text())
    (test / "results.json").write_text(json.dumps({**results, "tested_run": f"../{second.name}"}))
    rows = report((tmp_path / "n").rename(tmp_path / "moved")).table("run")
    assert [row["test, 5-way 1-shot, %"] for row in rows] == ["–", "62.50 ± 0.23"]


def test_an_older_training_that_was_tested_last_does_not_stand_for_the_newest(tmp_path):
    for name, day, tested, accuracy in (("a", 1, 3, 0.5), ("b", 2, 2, 0.75)):
        fit = make_fit(tmp_path / "s" / name / "version_0", epochs=day)
        test = make_test(tmp_path / "s" / name / "version_1", fit, accuracy)
        for folder, told in ((fit, day), (test, tested)):
            written = json.loads((folder / "environment.json").read_text())
            written["started"] = f"2026-01-0{told}T09:00:00+00:00"
            (folder / "environment.json").write_text(json.dumps(written))
    other = make_fit(tmp_path / "s" / "c" / "version_0", seed=1)
    make_test(tmp_path / "s" / "c" / "version_1", other, 0.25)
    rows = report(tmp_path / "s").links["accuracy.csv"]
    assert sorted(float(row["value"]) for row in rows if row["run"] != "mean") == [0.25, 0.75]


def test_trainings_without_a_seed_are_not_one_another(tmp_path):
    for number, accuracy in enumerate((0.5, 0.75)):
        fit = make_fit(tmp_path / "s" / f"version_{2 * number}", seed=False)
        make_test(tmp_path / "s" / f"version_{2 * number + 1}", fit, accuracy)
    page = report(tmp_path / "s")
    assert REPEATED not in page.text and {row["runs"] for row in page.links["curves.csv"]} == {"2"}
