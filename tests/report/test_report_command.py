"""``swbn report`` and ``--run.report`` after real trainings, and what the runs say of their environment."""

import json
import platform
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml

from cli import main
from swbn_lightning.files.reading import flatten
from swbn_lightning.runs.checkpoints import read_checkpoint
from swbn_lightning.runs.record import record_of
from tests.made_runs import make_fit, told
from tests.report.page_reader import Page

REPOSITORY = Path(__file__).parents[2]
GLYPHS = REPOSITORY / "configs" / "classification" / "glyphs.yaml"
TINY = [
    "--config", str(GLYPHS), "--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--data.images_per_class=4",
    "--data.num_classes=8", "--model.num_classes=8", "--data.batch_size=8", "--whiteness.num_images=8",
    "--model.warmup_steps=0", "--trainer.enable_model_summary=false", "--trainer.enable_progress_bar=false",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training with ``--run.report``, what resumed it, and a test."""
    root = tmp_path_factory.mktemp("runs")
    given = [*TINY, f"--run.root={root}", "--run.name=n", "--seed_everything=5"]
    before = datetime.now(UTC).replace(microsecond=0)
    main(["fit", *given, "--run.report=true"])
    main(["fit", *given, "--trainer.max_epochs=3", f"--ckpt_path={root}/n/version_0"])
    main(["test", *given, f"--ckpt_path={root}/n"])
    return root / "n", given, before


def results(folder):
    return json.loads((folder / "results.json").read_text())["results"]


def shown(found):
    """As a table has it; right or wrong in all of these few images, an accuracy has no interval."""
    interval = "" if found["ci95"] is None else f" ± {100 * found['ci95']:.2f}"
    return f"{100 * found['accuracy']:.2f}{interval}"


def test_runs_say_what_they_are_and_whose_test_they_are(trained):
    folder, given, before = trained
    fit, resumed, test = (told(folder / f"version_{n}") for n in range(3))
    assert [found["kind"] for found in (fit, resumed, test)] == ["fit", "fit", "test"]
    assert fit["command"] == "swbn fit " + " ".join([*given, "--run.report=true"])
    assert before <= datetime.fromisoformat(fit["started"]) <= datetime.now(UTC)
    found = fit["environment"]
    assert found["device"].startswith("CPU, ") and found["seed"] == 5 and found["Python"] == platform.python_version()
    assert (found["processes"], found["precision"], found["threads"]) == (1, "32-true", torch.get_num_threads())
    assert fit["settings"] == flatten(yaml.safe_load((folder / "version_0" / "config.yaml").read_text()))
    assert len({fit["id"], resumed["id"], test["id"]}) == 3
    assert (fit["from"], resumed["from"], test["from"]) == (None, fit["id"], resumed["id"])
    assert fit["trained"] is None and resumed["trained"] is None
    kept = test["trained"]
    assert (kept["id"], kept["started"]) == (resumed["id"], resumed["started"])
    assert kept["settings"]["trainer.max_epochs"] == 3 and kept["settings"]["seed_everything"] == 5
    assert not any(key.startswith(("run", "ckpt_path")) for key in kept["settings"])
    for checkpoint in (folder / "version_1" / "checkpoints").glob("*.ckpt"):
        assert read_checkpoint(checkpoint)["run"] == kept


def test_a_checkpoint_outside_of_its_folder_and_weights_alone_in_it(trained, tmp_path):
    folder, *_ = trained
    (source,) = (folder / "version_1" / "checkpoints").glob("step*.ckpt")
    shutil.copy(source, tmp_path / "mine.ckpt")
    shutil.copytree(folder / "version_1", tmp_path / "version_0")
    weights = {**read_checkpoint(source), "run": {"id": "../x"}}
    for path in ("version_0/checkpoints/w.ckpt", "w.ckpt"):
        torch.save(weights, tmp_path / path)
    for path, known in (("mine.ckpt", True), ("version_0/checkpoints/w.ckpt", True), ("w.ckpt", False)):
        found = record_of(tmp_path / path)
        assert (found and found.plain()) == (told(folder / "version_2")["trained"] if known else None)


def test_the_page_of_a_fit_and_of_all(trained, capsys, tmp_path):
    folder, *_ = trained
    page = Page((folder / "version_0" / "report.html").read_text())
    assert not (folder / "version_1" / "report.html").exists()
    (row,) = page.table("run")
    best = results(folder / "version_0")[0]
    assert row["while training: val, %"] == shown(best)
    assert row["state"] == "finished" and row["epochs"] == "2 of 2" and row["seed"] == "5"
    assert "missing" not in page.text and len(page.images) == 4

    main(["report", str(folder), "--output", str(tmp_path / "page.html")])
    assert capsys.readouterr().out == f"report: {tmp_path / 'page.html'}\n"
    page = Page((tmp_path / "page.html").read_text())
    (row,) = page.table("run")
    (tested,) = results(folder / "version_2")
    assert row["test, %"] == shown(tested)
    assert row["state"] == "finished, in 2 parts" and row["epochs"] == "3 of 3"
    assert row["RMS correlation, start → end"].startswith(f"{tested['rms'][0]:.3f} → ")
    assert page.text.count("when it started") == 3 and "missing" not in page.text


class Stop(pl.Callback):
    """Ctrl-C in the second epoch."""

    def on_train_batch_start(self, trainer, *args):
        if trainer.current_epoch == 1:
            raise KeyboardInterrupt


def test_an_interrupted_fit_writes_its_page(tmp_path):
    stop = "--trainer.callbacks=tests.report.test_report_command.Stop"
    with pytest.raises(SystemExit):
        main(["fit", *TINY, f"--run.root={tmp_path}", "--run.name=n", "--run.report=true", stop])
    page = Page((tmp_path / "n" / "version_0" / "report.html").read_text())
    (row,) = page.table("run")
    assert row["state"] == "stopped before its end" and row["epochs"] == "1 of 2"
    assert {r["epochs_trained"] for r in page.links["curves.csv"]} == {"1"}


@pytest.mark.parametrize(("arguments", "words"), [
    ([], "required: RUN"),
    (["nowhere"], "swbn: error: run nowhere does not exist; give a run folder, as runs/NAME"),
    (["empty"], "swbn: error: empty holds no run: looked for run.json"),
    (["file"], "swbn: error: file is a file"),
    (["run", "--output", "empty"], "swbn: error: empty is a folder; give the file for the page, as empty/report."),
    (["run", "--output", "file/page.html"], "swbn: error: file/page.html cannot be written: "),
])  # fmt: skip
def test_wrong_arguments(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("file").write_text("")
    make_fit(tmp_path / "run")
    with pytest.raises(SystemExit) as stopped:
        main(["report", *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and words in printed.err and "Traceback" not in printed.err + printed.out
