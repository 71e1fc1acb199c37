"""What a run shows on its way: on a terminal of 80 letters, and in a log."""

import logging
import re
import warnings

import pytest
import pytorch_lightning as pl
import torch
from rich.text import Text

from cli import main
from swbn_lightning.command.messages import say_less
from swbn_lightning.training.callbacks.progress import BriefModelSummary, ProgressLines

SHOWN = ["--trainer.enable_progress_bar=true", "--trainer.max_epochs=2"]


@pytest.fixture
def shown(trained, tmp_path, monkeypatch, capsys, caplog):
    """Runs a command on the tiny training; gives what it printed and what it logged, without colours."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)

    def run(command, *more, terminal=False):
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("TERM", "xterm" if terminal else "dumb")
        monkeypatch.setenv("FORCE_COLOR", "1" if terminal else "")
        main([command, *trained[1], *SHOWN, "--run.root=here", *more])
        said, logged = capsys.readouterr(), caplog.text
        caplog.clear()
        return Text.from_ansi(re.sub(r"\x1b\[(\d*[AK]|\?25[lh])", "\n", said.out)).plain, logged

    return run


def test_the_bar_keeps_its_metrics_on_one_line_of_80_letters(shown):
    printed, logged = shown("fit", terminal=True)
    frames = [line for line in printed.splitlines() if line.startswith("Epoch ")]
    assert frames and all(len(line) <= 80 for line in frames)
    assert re.search(r"^Epoch 1/2 .* 1/1 ", printed, re.MULTILINE)
    assert re.fullmatch(r"Epoch 2/2 +━+ 1/1 \d:\d\d:\d\d • \d:\d\d:\d\d val: \d+\.\d% train: \d+\.\d%\s*", frames[-1])
    assert " done, step " not in logged  # the bar says it


def test_a_log_has_a_line_an_epoch_and_no_bar(shown):
    printed, logged = shown("fit")
    assert "━━━ 1/1" not in printed and "Epoch" not in printed
    lines = re.findall(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (epoch \d/2 done, step \d): loss [\d.]+, val accuracy [\d.]+ %", logged
    )
    assert lines == ["epoch 1/2 done, step 1", "epoch 2/2 done, step 2"]
    assert "epoch" not in shown("fit", "--trainer.enable_progress_bar=false")[1].replace("max_epochs", "")


@pytest.mark.parametrize("seconds, expected", [(0.0, [1, 2, 3, 4]), (3600.0, [])])
def test_a_long_epoch_has_lines_now_and_then(seconds, expected, shown, monkeypatch):
    usual = ProgressLines.__init__
    monkeypatch.setattr(ProgressLines, "__init__", lambda self: usual(self, seconds))
    _, logged = shown("fit", "--data.train.episodes=5", "--trainer.max_epochs=1")
    assert [int(step) for step in re.findall(r"epoch 1/1, step (\d): loss [\d.]+ in this batch", logged)] == expected
    assert len(re.findall("epoch 1/1 done, step 5", logged)) == 1


def test_the_summary_says_nothing_useless(shown):
    printed, logged = shown("fit")
    assert re.search(r"│ backbone │ MLP +│ +[\d.]+ K │\n", printed) and re.search(
        r"^[\d.]+ K parameters, ", printed, re.M
    )
    assert not re.search("FLOPs|Mode|mode|frozen|[Nn]on-trainable", printed)
    assert "model summary callbacks" not in logged
    assert "parameters" not in shown("fit", "--trainer.enable_model_summary=false")[0]


def test_the_summary_says_what_is_frozen_evaluates_or_has_an_example(capsys):
    network = torch.nn.Sequential(torch.nn.Linear(10, 100), torch.nn.Linear(100, 10).requires_grad_(False).eval())

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.example_input_array = network, torch.zeros(1, 10)

        def forward(self, x):
            return self.network(x)

    quiet = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    BriefModelSummary().on_fit_start(pl.Trainer(**quiet), Module())
    printed = capsys.readouterr().out
    assert "2.1 K parameters, 1.0 K of them frozen, 0.008 MB, 1 of 3 modules in evaluation mode, 4.0 K FLOPs" in printed
    assert "In sizes" in printed and "│ train │" in printed


class LogsMore(pl.Callback):
    def on_test_epoch_end(self, trainer, pl_module):
        pl_module.log("test/calibration", 0.123456789)


def test_results_are_shown_once_and_rounded(trained, shown):
    given = ["--ckpt_path", str(trained[0]), "--trainer.callbacks+=tests.test_on_the_screen.LogsMore"]
    printed, _ = shown("test", *given)
    assert "test/accuracy" not in printed and not re.search(r"0\.\d{5}", printed)
    assert len(re.findall("accuracy", printed.partition("checkpoint: ")[0])) == 1
    assert re.search(r"│ loss +│ +\d\.\d{4} │", printed) and re.search(r"│ test/calibration +│ +0\.1235 │", printed)


def test_epochs_are_counted_from_1_and_files_by_steps(shown):
    printed, _ = shown("fit", "--checkpoint.monitor=epoch")
    assert "val (best, epoch 2)" in printed and re.search(r"checkpoints/step000002-accuracy0\.\d{4}\.ckpt", printed)


def test_lightnings_words_for_a_checkpoint_mean_the_newest_runs(shown):
    _, _ = shown("fit", "--checkpoint.monitor=epoch", "--checkpoint.mode=min")
    assert "step000001" in shown("test", "--ckpt_path=best")[0]
    assert "checkpoints/last.ckpt" in shown("test", "--ckpt_path=last")[0]
    assert "epoch 3/3 done, step 3" in shown("fit", "--ckpt_path=last", "--trainer.max_epochs=3")[1]
    with pytest.raises(SystemExit):
        shown("test", "--ckpt_path=best", "--run.name=other")


@pytest.mark.parametrize(
    "command, does", [("fit", "train a network by a configuration"), ("test", "test a checkpoint: accuracy")]
)
def test_help_is_true(command, does, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0 and does in printed and "special keywords" not in printed
    assert "--ckpt_path CKPT_PATH a .ckpt file, an export's folder, or a run's: runs/NAME" in printed
    assert "Norms (--model.norm): bn, " in printed and "resnet12" in printed
    assert "swbn-fro" in printed.replace("swbn- ", "swbn-")  # a line may end with a hyphen


def test_warnings_of_the_users_own_code_are_said():
    inside = "torch.distributed.nn.functional.all_gather is deprecated, use another"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        say_less()
        for module in ("lightning_fabric.utilities.distributed", "my_code", "lightning_fabric_plugin"):
            warnings.warn_explicit(inside, FutureWarning, "file.py", 1, module=module)
        warnings.warn_explicit(
            "your learning rate is odd", FutureWarning, "file.py", 1, module="lightning_fabric.plugins"
        )
    assert len(said) == 3
