"""Whose a test is, by the ids that runs wrote down: wherever the folders are, and whatever they are called now."""

import shutil

import pytest

from swbn_lightning.errors import InputError
from swbn_lightning.runs.compare import compare
from tests.made_runs import DAY, change, identify, make_fit, make_test, told
from tests.report.page_reader import report
from tests.test_compare import saved

ONE_TEST = "test, 5-way 1-shot, %"

pytestmark = pytest.mark.usefixtures("quick_pictures")


def shown(*paths, output):
    """The runs of a page by name with the test on each of their lines."""
    return {row["run"]: row.get(ONE_TEST, "–").partition(" ")[0] for row in report(*paths, output=output).table("run")}


def flat(accuracy):
    return [accuracy] * 10


def test_a_test_is_not_that_of_the_training_that_took_the_name_of_its_own(tmp_path):
    make_test(tmp_path / "n/t/version_0", make_fit(tmp_path / "n/a/version_0"), 0.75, episodes=flat(0.75))
    (tmp_path / "n/a").rename(tmp_path / "n/a_old")
    make_fit(tmp_path / "n/a/version_0", "bn", 0)
    assert shown(tmp_path / "n", output=tmp_path / "page.html") == {"a": "–", "a_old": "75.00"}
    (line, _) = compare([str(tmp_path / "n"), saved(tmp_path, "other", flat(0.5))])
    assert line.seeds == (0,) and line.accuracy.mean == pytest.approx(0.75)


def test_the_newest_training_counts_though_an_older_one_was_tested_last_and_though_they_are_gone(tmp_path):
    fits = [make_fit(tmp_path / f"n/version_{number}") for number in range(2)]
    for number, fit in reversed(list(enumerate(fits))):
        accuracy = (0.25, 0.75)[number]
        make_test(tmp_path / f"n/version_{number + 2}", fit, accuracy, episodes=flat(accuracy))
    runs = [str(tmp_path / "n"), saved(tmp_path, "other", flat(0.5))]
    page = tmp_path / "page.html"
    for gone in (None, 0, 1):
        if gone is not None:
            shutil.rmtree(fits[gone])
        assert compare(runs)[0].accuracy.mean == pytest.approx(0.75)
        chosen = [float(row["value"]) for row in report(*runs, output=page).links["accuracy.csv"]]
        assert chosen == [0.75, 0.5]


@pytest.mark.parametrize(("old", "new", "numbers"), [
    (DAY.format(1, 1), DAY.format(1, 2), (1, 2)),
    ("2026-01-02T00:30:00+02:00", "2026-01-01T23:00:00", (2, 1)),
])  # fmt: skip
def test_the_newest_test_is_that_which_says_so(tmp_path, old, new, numbers):
    fit = make_fit(tmp_path / "n/version_0")
    for number, accuracy, started in zip(numbers, (0.25, 0.75), (old, new), strict=True):
        test = make_test(tmp_path / f"n/version_{number}", fit, accuracy, episodes=flat(accuracy))
        change(test / "run.json", started=started)
    (line, _) = compare([str(tmp_path / "n"), saved(tmp_path, "other", flat(0.5))])
    assert line.accuracy.mean == pytest.approx(0.75)
    assert list(shown(tmp_path / "n", output=tmp_path / "page.html").values()) == ["75.00"]


@pytest.mark.parametrize("started", ["yesterday", DAY.format(1, 0)])
def test_where_none_says_when_it_is_not_guessed(tmp_path, started):
    fit = make_fit(tmp_path / "n/version_0")
    for number, accuracy in ((1, 0.25), (2, 0.75)):
        test = make_test(tmp_path / f"n/version_{number}", fit, accuracy, episodes=flat(accuracy))
        change(test / "run.json", started=started)
    other = saved(tmp_path, "other", flat(0.5))
    with pytest.raises(InputError, match=r"cannot be told which of .*version_[12] and .*version_[12] is newer.*delete"):
        compare([str(tmp_path / "n"), other])
    page = report(tmp_path / "n")
    assert "it cannot be told which of" in page.text and ONE_TEST not in page.table("run")[0]
    (line, _) = compare([str(tmp_path / "n" / "version_1"), other])
    assert line.accuracy.mean == pytest.approx(0.25)


def test_a_copy_is_the_same_run_and_one_made_while_it_ran_does_not_count(tmp_path):
    fit = make_fit(tmp_path / "n/a/version_0")
    change(fit / "results.json", ended=DAY.format(2, 0))
    shutil.copytree(tmp_path / "n/a", tmp_path / "n/0_copy")
    (tmp_path / "n/0_copy/version_0/results.json").unlink()
    test = make_test(tmp_path / "n/a/version_1", fit, 0.75, episodes=flat(0.75))
    shutil.copytree(tmp_path / "n/a", tmp_path / "n/copy")
    page = report(tmp_path / "n")
    (row,) = page.table("run")
    assert row[ONE_TEST].startswith("75.00") and row["state"] == "finished" and "missing" not in page.text
    (line, _) = compare([str(tmp_path / "n"), str(test)])
    assert line.seeds == (0,)


def test_an_id_that_two_runs_claim_is_held_by_neither(tmp_path):
    fit = make_fit(tmp_path / "n/a/version_0")
    make_test(tmp_path / "n/a/version_1", fit, 0.75, episodes=flat(0.75))
    make_fit(tmp_path / "n/theirs/version_0", "swbn-fro")
    change(tmp_path / "n/theirs/version_0/run.json", id=told(fit)["id"])
    page = report(tmp_path / "n")
    assert "is that of another run, too" in page.text
    assert sorted(row.get(ONE_TEST) for row in page.table("run")) == ["75.00 ± 0.23", "–", "–"]
    assert page.table("run")[1]["state"] == "tested; its training is not among these runs"


def test_what_makes_no_other_training(tmp_path):
    free = {
        "run.root": "x", "trainer.default_root_dir": "x", "trainer.logger[0].class_path": "x", "weights_only": True,
        "data.init_args.root": "x", "checkpoint.dirpath": "x", "ckpt_path": "x", "data.init_args.test.ways": 3,
        "model.nothing": None,
    }  # fmt: skip
    for seed, settings in ((0, {}), (1, free)):
        folder = tmp_path / "n" / f"s{seed}"
        fit = identify(folder / "version_0", "fit", {"seed_everything": seed, "model.norm": "bn", **settings})
        make_test(folder / "version_1", fit, 0.5 + seed / 4, episodes=flat(0.5 + seed / 4))
    (line, _) = compare([str(tmp_path / "n"), saved(tmp_path, "other", flat(0.5))])
    assert line.seeds == (0, 1)
    (means,) = report(tmp_path / "n").table("runs")
    assert means["seeds"] == "2"
