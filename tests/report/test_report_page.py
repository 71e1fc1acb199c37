"""The report page: its numbers are those of the files, whatever is missing is told, and nothing breaks out."""

import csv

import numpy as np
import pytest

from swbn_lightning.runs.page import write_report
from tests.made_runs import LAYERS, change, identify, make_fit, make_test, settings_of
from tests.report.page_reader import Page, report

pytestmark = pytest.mark.usefixtures("quick_pictures")

HOSTILE = "<script>alert(1)</script>\"'&$x_1$"
ONE_TEST = "test, 5-way 1-shot, %"


@pytest.fixture
def one(tmp_path):
    """``runs/NAME`` with a training and its test."""
    fit = make_fit(tmp_path / "name" / "version_0", "swbn-fro", seed=3)
    make_test(tmp_path / "name" / "version_1", fit)
    return tmp_path / "name"


def test_one_run_and_its_test(one, drawn):
    page = report(one)
    assert (one / "report.html").is_file()
    (row,) = page.table("run")
    assert row[ONE_TEST] == "62.50 ± 0.23" and row["while training: val, %"] == "73.00 ± 1.23"
    assert (row["network"], row["norm"], row["seed"]) == ("resnet20", "swbn-fro (step_size=0.005)", "3")
    assert row["epochs"] == "3 of 3" and row["training, s"] == "77" and row["state"] == "finished"
    # White: rms 0.3, so the layers have 0.3 and 0.35 before training, 0.075 and 0.125 after the third epoch.
    assert row["RMS correlation, start → end"] == "0.325 → 0.100"
    assert page.title == "Report: name" and "1 training, 1 test." in page.text
    assert "missing" not in page.text and "Settings that differ" not in page.text
    layers = page.table("layer")
    assert [line["layer"] for line in layers] == [*LAYERS, "mean of the layers"]
    assert layers[1]["RMS correlation, after epoch 3"] == "0.125"
    assert [line["setting"] for line in page.table("setting")][:2] == ["seed_everything", "run.root"]
    own = [table for table in page.tables if table[0][1] == "when it started"]
    assert [[name for name, _ in table] for table in own] == [["", "started", "command", "seed"]] * 2
    assert ["command", "swbn fit --config a.yaml"] in own[0]
    (shared,) = (table for table in page.tables if table[0] == ["", "all runs"])
    assert ["device", "CPU, 7 cores"] in shared and ["torch", "9.8.7"] in shared
    (result,) = [table for table in page.tables if table[0][0] == "evaluated" and table[1][0] == "test, 5-way 1-shot"]
    values = dict(zip(*result, strict=True))
    assert (
        values["accuracy ± 95%, %"] == "62.50 ± 0.23" and values["loss"] == "0.8750" and values["episodes"] == "10,000"
    )
    assert list(page.sizes()) == [
        "loss by epochs trained", "accuracy by epochs trained", "Whiteness by layer",
        f"Correlation matrices of {LAYERS[1]}",
    ]  # fmt: skip
    assert all(width > 600 and height > 300 for width, height in page.sizes().values())


def test_the_curves_numbers_are_those_of_the_run(one):
    rows = report(one).links["curves.csv"]
    logged = list(csv.DictReader((one / "version_0" / "metrics.csv").open()))
    for quantity in ("val/loss", "val/accuracy", "train/loss", "train/accuracy"):
        own = [(int(r["epochs_trained"]), float(r["mean"])) for r in rows if r["quantity"] == quantity]
        assert own == [(int(r["epoch"]) + 1, float(r[quantity])) for r in logged if r[quantity]]
    assert len(rows) == 12 and {(row["runs"], row["std"]) for row in rows} == {("1", "")}


def test_it_needs_nothing_but_itself(one):
    page = report(one)
    assert not {"script", "link", "iframe", "object", "form"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on") and name != "srcset"
        assert name not in ("src", "href") or value.startswith(("data:image/png;base64,", "data:text/csv")), (tag, name)
    assert ("meta", "http-equiv", "Content-Security-Policy") in page.attributes
    assert not any("url(" in word for word in page.words)


@pytest.fixture
def study(tmp_path):
    """Two norms with three seeds each, as the folders of a study."""
    for norm, accuracies in (("bn", (0.5, 0.6, 0.7)), ("swbn-fro", (0.75, 0.76, 0.8))):
        for seed, accuracy in enumerate(accuracies):
            folder = tmp_path / "s" / "exp" / "resnet20" / norm / f"seed{seed}-abc"
            fit = make_fit(folder / "version_0", norm, seed, rms=0.3 if norm == "bn" else 0.1)
            make_test(folder / "test-1" / "version_0", fit, accuracy)
            make_test(folder / "test-5" / "version_0", fit, accuracy + 0.1, shots=5)
    return tmp_path / "s"


def test_a_study(study):
    page = report(study)
    rows = page.table("run")
    swbn = "swbn-fro, step_size=0.005"
    assert [row["run"] for row in rows] == [f"{name}, seed {s}" for name in ("bn", swbn) for s in range(3)]
    assert f"{swbn}, seed 2 (swbn-fro/seed2-abc)" in page.text  # its folder, once
    assert [row[ONE_TEST][:5] for row in rows] == ["50.00", "60.00", "70.00", "75.00", "76.00", "80.00"]
    means = page.table("runs")
    assert [(m["runs"], m["test"], m["seeds"]) for m in means] == [
        (name, f"test, 5-way {k}-shot", "3") for name in ("bn", swbn) for k in (1, 5)
    ]
    values = np.array([75.0, 76.0, 80.0])
    half = 4.302653 * values.std(ddof=1) / np.sqrt(3)  # Student's t of two degrees of freedom
    assert list(means[2].values())[3:] == [f"{values.mean():.2f}", f"{values.std(ddof=1):.2f}", f"± {half:.2f}"]
    assert [(s["setting"], s["bn"], s[swbn]) for s in page.table("setting")] == [
        ("model.init_args.norm", "bn", "swbn-fro"),
        ("model.init_args.norm_args.step_size", "(not there)", "0.005"),
    ]
    curves = [r for r in page.links["curves.csv"] if r["line"] == "bn" and r["quantity"] == "val/accuracy"]
    for epoch, row in enumerate(curves):
        assert float(row["mean"]) == pytest.approx(0.51 + 0.1 * epoch) and float(row["std"]) == pytest.approx(0.01)
        assert (row["epochs_trained"], row["runs"]) == (str(epoch + 1), "3")
    tests = [r for r in page.links["accuracy.csv"] if r["line"] == "bn" and r["setting"] == "test, 5-way 1-shot"]
    assert [float(r["value"]) for r in tests] == pytest.approx([0.5, 0.6, 0.7, 0.6])
    assert [r["run"] for r in tests][-1] == "mean" and float(tests[-1]["std"]) == pytest.approx(0.1)
    assert "Test accuracies with their intervals" in page.sizes() and "Whiteness of the runs" in page.sizes()
    assert "6 trainings, 12 tests." in page.text


def test_several_runs_and_where_the_page_goes(one, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_fit(tmp_path / "other" / "version_0")
    page = report("name", "other", "name/version_0")  # what is given twice is there once
    assert (tmp_path / "report.html").is_file() and page.title == "Report: name, other, name/version_0"
    assert [row["run"] for row in page.table("run")] == ["swbn-fro, step_size=0.005", "bn"]
    assert {row["line"] for row in page.links["curves.csv"]} == {"swbn-fro, step_size=0.005", "bn"}
    assert "bn (other)" in page.text
    report("name", output="pages/of/mine.html")
    assert (tmp_path / "pages" / "of" / "mine.html").is_file()
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_killed_run_shows_what_it_logged(tmp_path):
    folder = make_fit(tmp_path / "version_0", epochs=2, finished=False)
    for name, half in (("metrics.csv", "2,29,,,,1.75,0.6"), ("whiteness.csv", "2,3")):  # in the middle of a line
        with (folder / name).open("a") as file:
            file.write(half)
    page = report(folder)
    (row,) = page.table("run")
    assert row["epochs"] == "2 of 3" and row["state"] == "no results.json: it was killed, or is still running"
    assert row["RMS correlation, start → end"] == "0.325 → 0.125"
    assert max(int(r["epochs_trained"]) for r in page.links["curves.csv"]) == 2
    assert "What is missing, and so not on this page: results.json is missing" in page.text
    begun = report(identify(tmp_path / "begun" / "version_0"))
    assert "No loss or accuracy is known" in begun.text and not begun.images


def test_a_run_without_a_configuration_does_not_differ_in_everything(tmp_path):
    for name, norm in (("a", "bn"), ("b", "swbn-fro"), ("c", "bn")):
        make_fit(tmp_path / "s" / name / "version_0", norm)
    (tmp_path / "s" / "c" / "version_0" / "run.json").unlink()
    page = report(tmp_path / "s")
    norm = {"setting": "model.init_args.norm", "bn": "bn", "swbn-fro, step_size=0.005": "swbn-fro"}
    assert page.table("setting")[0] == norm
    assert {row["line"] for row in page.links["curves.csv"]} == {"bn", "swbn-fro, step_size=0.005", "c"}


def test_everything_is_escaped(tmp_path):
    name = HOSTILE.replace("/", "-")
    settings = settings_of(HOSTILE, **{HOSTILE: HOSTILE, "list": [HOSTILE, {HOSTILE: [HOSTILE]}]})
    settings["model.init_args.backbone"] = HOSTILE
    for number in range(2):
        folder = make_fit(tmp_path / name / f"version_{number}")
        own = {**settings, "trainer.max_epochs": number, f"trainer.{HOSTILE}": number}
        identify(folder, "fit", own, environment={HOSTILE: HOSTILE}, command=HOSTILE)
        make_test(tmp_path / name / f"version_{number + 2}", folder, split=HOSTILE, ways=HOSTILE, shots=HOSTILE)
    text = (tmp_path / name / "version_0" / "whiteness.csv").read_text()
    (tmp_path / name / "version_0" / "whiteness.csv").write_text(text.replace(LAYERS[0], '"<script>$a_1$"'))
    (tmp_path / name / "version_0" / "heatmap_<script>.csv").write_text("nonsense\n")
    file = write_report([tmp_path / name])
    text = file.read_text()
    assert "<script" not in text and text.count("&lt;script&gt;") > 20
    page = Page(text)  # every tag is closed in order
    assert "script" not in page.tags and HOSTILE in page.text and len(page.table("run")) == 2
    assert not [pair for pair in page.attributes if pair[1].startswith("on")]


def test_a_test_without_its_training(one):
    (row,) = report(one / "version_1").table("run")
    assert row[ONE_TEST] == "62.50 ± 0.23" and row["state"] == "tested; its training is not among these runs"
    assert (row["norm"], row["seed"]) == ("swbn-fro (step_size=0.005)", "3")


def test_runs_that_continue_each_other_in_a_circle(tmp_path):
    for number in (0, 1):
        fit = make_fit(tmp_path / "n" / f"version_{number}")
        change(fit / "run.json", id=f"{number:016x}", **{"from": f"{1 - number:016x}"})
    assert len(report(tmp_path / "n").table("run")) == 2


def test_several_validations_an_epoch_are_drawn_by_step(tmp_path):
    folder = make_fit(tmp_path / "version_0")
    with (folder / "metrics.csv").open("a") as file:
        file.write("0,4,,,,2.5,0.25\n")
    page = report(folder)
    assert "loss by steps trained" in page.sizes()
    rows = [r for r in page.links["curves.csv"] if r["quantity"] == "val/loss"]
    assert [(int(r["steps_trained"]), float(r["mean"])) for r in rows] == [(5, 2.5), (10, 2.0), (20, 1.75), (30, 1.5)]


def test_a_big_study_keeps_its_page_usable(tmp_path):
    for number in range(17):
        make_fit(tmp_path / "s" / f"r{number}" / "version_0", settings={"number": number})
    page = report(tmp_path / "s")
    assert "3 further lines are in the file only" in page.text
    assert "The first 14 of 17 runs" in page.text and "The first 8 of 17 runs" in page.text
    assert len({row["line"] for row in page.links["curves.csv"]}) == 17 and len(page.images) == 4
