"""What a reader of the page sees first: paired differences, numbers instead of single points, what is not the same."""

import numpy as np
import pytest

from swbn_lightning.runs.compare import compare
from tests.made_runs import change, make_fit, make_test, told
from tests.report.page_reader import report

pytestmark = pytest.mark.usefixtures("quick_pictures")

SWBN = "swbn-fro, step_size=0.005"


def with_test(folder, norm, accuracies, seed=0, **row):
    fit = make_fit(folder / "version_0", norm, seed)
    return make_test(folder / "version_1", fit, episodes=list(accuracies), **row)


def test_differences_are_those_of_compare(tmp_path):
    rng = np.random.default_rng(0)
    luck = rng.normal(0, 0.1, 30)
    for norm, gain in (("bn", 0.5), ("swbn-fro", 0.53)):
        for seed in range(2):
            accuracies = gain + luck + rng.normal(0, 0.01, 30)
            with_test(tmp_path / "s" / norm / f"r{seed}", norm, accuracies, seed)
    page = report(tmp_path / "s")
    head, values = next(table for table in page.tables if "compared with" in table[0])
    row = dict(zip(head, values, strict=True))
    _, line = compare([str(tmp_path / "s" / "bn"), str(tmp_path / "s" / "swbn-fro")])
    deciding = line.difference.over_both
    assert row["difference ± 95%, points"] == f"{100 * deciding.mean:+.2f} ± {100 * deciding.half_width:.2f}"
    assert (row["runs"], row["compared with"], row["tested on"]) == (SWBN, "bn", "30 episodes")
    assert row["distinguishable"] == {True: "yes", False: "no"}[line.distinguishable]


def test_tests_on_other_episodes_are_not_paired(tmp_path):
    values = np.random.default_rng(1).uniform(size=20)
    for norm, episodes in (("bn", "one"), ("swbn-fro", "other"), ("dbn", "one"), ("iternorm", "one")):
        with_test(tmp_path / "s" / norm, norm, values if norm != "dbn" else values / 2, episodes_id=episodes)
    page = report(tmp_path / "s")
    table = next(table for table in page.tables if "compared with" in table[0])
    assert [row[0].partition(",")[0] for row in table[1:]] == ["dbn", "iternorm"] and "as one of 2" in table[0]
    assert "whether these trained networks differ" in page.text and "Bonferroni" in page.text
    (tmp_path / "s" / "dbn" / "version_1" / "episodes.csv").write_text("episode,accuracy\n0,2\n")
    page = report(tmp_path / "s")
    assert "the accuracy '2' is not a number from 0 to 1" in page.text
    assert not any(row[0].startswith("dbn") for table in page.tables if "compared with" in table[0] for row in table)


def test_a_single_epoch_is_numbers_and_no_plot(tmp_path):
    for norm, epochs in (("bn", 1), ("swbn-fro", 1)):
        make_fit(tmp_path / "s" / norm / "version_0", norm, epochs=epochs)
    page = report(tmp_path / "s")
    (first, _) = page.table("runs")
    assert first == {
        "runs": "bn", "epochs trained": "1", "validation loss": "2.0000", "training loss": "3.0000",
        "validation accuracy, %": "50.00", "training accuracy, %": "25.00",
    }  # fmt: skip
    assert not any("trained" in name for name in page.sizes()) and len(page.links["curves.csv"]) == 8
    make_fit(tmp_path / "s" / "more" / "version_0", "iternorm", epochs=2)
    assert "loss by epochs trained" in report(tmp_path / "s").sizes()


def test_the_environment_is_said_once_and_then_what_differs(tmp_path):
    for norm in ("bn", "swbn-fro"):
        make_fit(tmp_path / "s" / norm / "version_0", norm)
    other = tmp_path / "s" / "bn" / "version_0" / "run.json"
    change(other, environment={**told(other.parent)["environment"], "torch": "0.0.1"})
    page = report(tmp_path / "s")
    (shared,) = (dict(table) for table in page.tables if table[0] == ["", "all runs"])
    first, second = (dict(table) for table in page.tables if table[0] == ["", "when it started"])
    assert shared["device"] == "CPU, 7 cores" and "torch" not in shared
    assert (first["torch"], second["torch"]) == ("0.0.1", "9.8.7") and "device" not in {*first, *second}


def test_a_run_has_one_name(tmp_path):
    for seed in range(2):
        for norm in ("bn", "swbn-fro"):
            with_test(tmp_path / "s" / f"{norm}-{seed}", norm, [0.5, 0.6], seed)
    with_test(tmp_path / "s" / "again", "bn", [0.5, 0.7], 1)
    page = report(tmp_path / "s")
    names = {row["run"] for row in page.table("run")}
    assert names == {"bn, seed 0", "bn · bn-1", "bn · again", f"{SWBN}, seed 0", f"{SWBN}, seed 1"}
    assert {row["run"] for row in page.links["accuracy.csv"]} - {"mean"} <= names
    assert all(f"{name} (" in page.text for name in names)  # what is folded, with its folder
