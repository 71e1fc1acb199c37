"""``swbn report`` and ``--run.report`` after real trainings, and what the runs say of their environment."""

import json
import platform
from datetime import UTC, datetime
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml

from cli import _COMMANDS, main
from tests.made_runs import make_fit
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


def test_a_run_says_where_and_how_it_ran(trained):
    folder, given, before = trained
    fit, resumed, test = (json.loads((folder / f"version_{n}" / "environment.json").read_text()) for n in range(3))
    assert [found["stage"] for found in (fit, resumed, test)] == ["fit", "fit", "test"]
    assert fit["command"] == "swbn fit " + " ".join([*given, "--run.report=true"]) and fit["seed"] == 5
    assert test["command"].startswith("swbn test ") and fit["device"].startswith("CPU, ")
    assert fit["torch"] == torch.__version__.split("+")[0] or fit["torch"] == torch.__version__
    assert fit["pytorch-lightning"] == pl.__version__ and fit["Python"] == platform.python_version()
    assert (fit["processes"], fit["precision"], fit["threads"]) == (1, "32-true", torch.get_num_threads())
    assert before <= datetime.fromisoformat(fit["started"]) <= datetime.now(UTC)


def test_a_test_keeps_the_settings_of_its_training(trained):
    folder, *_ = trained
    told = json.loads((folder / "version_2" / "results.json").read_text())
    assert told["tested_run"] == "../version_1" and Path(told["tested_checkpoint"]).is_file()
    kept, training = folder / "version_2" / "training.yaml", folder / "version_1" / "config.yaml"
    settings = [yaml.safe_load(path.read_text()) for path in (kept, training, folder / "version_2" / "config.yaml")]
    assert settings[0] == settings[1] != settings[2]
    assert "tested_run" not in json.loads((folder / "version_1" / "results.json").read_text())


def test_fit_writes_the_page_where_it_was_asked_to(trained):
    folder, *_ = trained
    page = Page((folder / "version_0" / "report.html").read_text())
    assert not (folder / "version_1" / "report.html").exists()
    (row,) = page.table("run")
    best = results(folder / "version_0")[0]
    assert row["while training: val, %"] == f"{100 * best['accuracy']:.2f} ± {100 * best['ci95']:.2f}"
    assert row["state"] == "finished" and row["epochs"] == "2 of 2" and row["seed"] == "5"
    assert "missing" not in page.text and len(page.images) == 4


def test_the_command(trained, capsys, tmp_path):
    folder, *_ = trained
    main(["report", str(folder), "--output", str(tmp_path / "page.html")])
    assert capsys.readouterr().out == f"report: {tmp_path / 'page.html'}\n"
    page = Page((tmp_path / "page.html").read_text())
    (row,) = page.table("run")
    (tested,) = results(folder / "version_2")
    best = results(folder / "version_1")[0]  # of the part whose checkpoint was tested
    assert tested["rms"] == best["rms"]
    assert row["while training: val, %"] == f"{100 * best['accuracy']:.2f} ± {100 * best['ci95']:.2f}"
    assert row["test, %"] == f"{100 * tested['accuracy']:.2f} ± {100 * tested['ci95']:.2f}"
    assert row["state"] == "finished, in 2 parts" and row["epochs"] == "3 of 3"
    assert row["RMS correlation, start → end"].startswith(f"{tested['rms'][0]:.3f} → ")
    epochs = [r["epochs_trained"] for r in page.links["curves.csv"] if r["quantity"] == "val/loss"]
    assert epochs == ["1", "2", "3"]
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: RUN"),
        (["nowhere"], "swbn: error: run nowhere does not exist; give a run folder, as runs/NAME"),
        (["empty"], "swbn: error: empty holds no run: looked for results.json"),
        (["file"], "swbn: error: file is a file"),
        (["run", "--nonsense"], "unrecognized arguments: --nonsense"),
        (
            ["run", "--output", "empty"],
            "swbn: error: empty is a folder; give the file for the page, as empty/report.html",
        ),
        (["run", "--output", "file/page.html"], "swbn: error: file/page.html cannot be written: "),
        (["out"], "swbn: error: out holds no run"),
    ],
)
def test_wrong_arguments(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "out"):
        Path(name).mkdir()
    Path("file").write_text("")
    Path("out/study.csv").write_text("run,test\nout,\n")
    make_fit(tmp_path / "run")
    with pytest.raises(SystemExit) as stopped:
        main(["report", *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and words in printed.err and "Traceback" not in printed.err + printed.out


def test_help_lists_what_is_no_command_of_lightning(capsys):
    for arguments in (["--help"], ["report", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        if arguments == ["--help"]:
            assert all(f"swbn {word}" in shown for word in _COMMANDS)
    assert shown.startswith("usage: swbn report ") and "--output FILE" in shown
