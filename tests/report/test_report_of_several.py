"""The report page of several runs: none is taken for another, counted twice or left out."""

import pytest

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import flatten
from swbn_lightning.runs.page.page import MOST_COMPARED
from swbn_lightning.runs.settings import ABSENT, differences, group_key
from tests.made_runs import change, identify, make_fit, make_test
from tests.report.page_reader import report

pytestmark = pytest.mark.usefixtures("quick_pictures")


def test_tests_of_different_kinds_are_not_taken_for_one(tmp_path):
    fit = make_fit(tmp_path / "n" / "version_0")
    kinds = [{}, {"inference": "transductive"}, {"queries": 7}, {"queries": 5, "shots": 5}, {"queries": 7}]
    kinds.append({"head": "ridge", "queries": 7})
    for number, kind in enumerate(kinds):
        make_test(tmp_path / "n" / f"version_{number + 1}", fit, 0.5 + number % 5 / 8, **kind)
    page = report(tmp_path / "n")
    (row,) = page.table("run")
    expected = {
        "test, 5-way 1-shot, 15 queries, seed 0": 0.5,
        "test, 5-way 1-shot, transductive": 0.625,  # of which there is one kind, so its name is short
        "test, 5-way 1-shot, 7 queries, seed 0": 1.0,  # repeated
        "test, 5-way 5-shot": 0.875,
        "test, 5-way 1-shot, ridge": 0.5,
    }
    found = {key: value for key, value in row.items() if key.startswith("test, ")}
    assert found == {f"{name}, %": f"{100 * value:.2f} ± 0.23" for name, value in expected.items()}
    assert {r["setting"]: float(r["value"]) for r in page.links["accuracy.csv"]} == expected


REPEATED = "Some trainings were repeated"


def test_a_training_that_was_repeated_counts_once(tmp_path):
    for number, accuracy in ((0, 0.5), (2, 0.5), (4, 0.75), (6, 0.875)):
        seed = 1 if number == 6 else 0
        rest = {"settings": {"trainer.max_epochs": 3}, "epochs": 3 if number != 2 else 2}
        fit = make_fit(tmp_path / "S" / f"version_{number}", seed=seed, **rest)
        make_test(tmp_path / "S" / f"version_{number + 1}", fit, accuracy)
    page = report(tmp_path / "S")
    assert len(page.table("run")) == 4 and REPEATED in page.text
    (means,) = page.table("runs")
    assert (means["runs"], means["seeds"], means["mean, %"]) == ("S", "2", f"{(75 + 87.5) / 2:.2f}")
    rows = page.links["accuracy.csv"]
    assert [(r["run"], r["value"]) for r in rows][:2] == [("version_4", "0.75"), ("version_6", "0.875")]
    assert {r["runs"] for r in page.links["curves.csv"]} == {"2"}


def test_trainings_without_a_known_seed_are_not_one_another(tmp_path):
    for number, accuracy in enumerate((0.5, 0.75)):
        fit = make_fit(tmp_path / "n" / f"version_{2 * number}", seed=False)
        make_test(tmp_path / "n" / f"version_{2 * number + 1}", fit, accuracy)
    page = report(tmp_path / "n")
    assert REPEATED not in page.text and {row["runs"] for row in page.links["curves.csv"]} == {"2"}
    for seed, accuracy in ((1, 0.5), (2, 0.75)):
        folder = tmp_path / "s" / f"r{seed}"
        test = make_test(folder / "version_1", make_fit(tmp_path / f"gone{seed}", seed=seed), accuracy)
        change(test / "run.json", trained=None, **{"from": None})
    page = report(tmp_path / "s")  # a test's own seed is not its training's
    assert len(page.table("run")) == 2 and "seed" not in page.table("run")[0]
    assert REPEATED not in page.text


def test_of_very_many_configurations_the_first_are_drawn_and_all_are_in_the_file(tmp_path):
    for number in range(MOST_COMPARED + 1):
        fit = make_fit(tmp_path / f"r{number}" / "version_0", settings={"number": number}, epochs=0)
        make_test(tmp_path / f"r{number}" / "version_1", fit, episodes=[0.5, 0.6, 0.7])
    page = report(tmp_path)
    assert (
        len(page.links["accuracy.csv"]) == MOST_COMPARED + 1 and "Test accuracies with their intervals" in page.sizes()
    )
    assert "The first 28 of 29 lines; the others are in the file only" in page.text
    assert "Paired differences of more than 28 lines are left out" in page.text
    assert not any("compared with" in table[0] for table in page.tables)


def test_predictions_are_no_tests(tmp_path):
    fit = make_fit(tmp_path / "n" / "version_0")
    make_test(tmp_path / "n" / "version_1", fit)
    predicted = identify(tmp_path / "n" / "version_2", "predict", source=fit)
    page = report(tmp_path / "n")
    assert "1 training, 1 test." in page.text and "missing" not in page.text and "version_2" not in page.text
    with pytest.raises(InputError, match="version_2 holds predictions only"):
        report(predicted)


def test_flat_settings():
    nested = {"a": {"b": 1, "c": {"d": None}}, "e": [1, 2], "f": [{"g": 3}, 4], "h": {}, 5: "x"}
    assert flatten(nested) == {"a.b": 1, "a.c.d": None, "e": [1, 2], "f[0].g": 3, "f[1]": 4, "h": {}, "5": "x"}
    deep = {}
    deep["a"] = deep
    with pytest.raises(InputError, match="more than 40 deep"):
        flatten(deep)


def test_what_differs():
    first = {"same": 1, "kind": 1, "list": [1], "only": 2, "null": None, **{f"k{n}": 0 for n in range(10_000)}}
    second = {**first, "kind": True, "list": [1, 2], "null": {}, "options.size": 0.1, "run.root": 1}
    del second["only"]
    assert group_key(first) != group_key(second) and group_key(first) == group_key({**first, "run.root": 1})
    assert differences([first, second]) == {
        "kind": [1, True], "list": [[1], [1, 2]], "only": [2, ABSENT], "options.size": [ABSENT, 0.1],
    }  # fmt: skip
    assert differences([first]) == differences([first, dict(first)]) == differences([]) == {}
    assert differences([{"a": None}, {"a": 1}]) == {"a": [ABSENT, 1]} and group_key({"a": None}) == group_key({})
