"""The user's own loggers, callbacks, schedules and norms, beside the command's."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import pytorch_lightning as pl
import yaml
from pytorch_lightning.loggers import Logger

from cli import main
from tests.conftest import REPOSITORY


@pytest.fixture
def fit(trained, tmp_path, monkeypatch, capsys):
    """Runs a short ``fit``; gives its code, its run's folder and what it said as an error."""
    monkeypatch.chdir(tmp_path)

    def run(*more):
        code = 0
        try:
            main(["fit", *trained[1], "--run.root=here", *more])
        except SystemExit as stopped:
            code = stopped.code
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return code, Path("here", "quickstart", "version_0"), said.err

    return run


class Memory(Logger):
    """As most loggers are: with a place of its own, which is the working folder unless it is told."""

    kept: ClassVar[dict] = {}

    def __init__(self, save_dir: str = ".", fails: bool = False):
        super().__init__()
        if fails:
            raise ModuleNotFoundError("try `pip install memory`")
        self.kept.update(save_dir=save_dir, metrics={}, settings={})

    @property
    def save_dir(self):
        return self.kept["save_dir"]

    name, version = "memory", 0

    def log_hyperparams(self, params, *args, **kwargs):
        self.kept["settings"].update(params)

    def log_metrics(self, metrics, step=None):
        self.kept["metrics"].update(metrics)


RUN_FILES = {"results.json", "config.yaml", "run.json", "metrics.csv", "checkpoints"}


@pytest.mark.parametrize("how", ["=", "+="])
def test_the_runs_folder_is_the_commands_whatever_the_loggers(how, fit):
    code, folder, _ = fit(f"--trainer.logger{how}tests.test_users_parts.Memory")
    assert code == 0 and {path.name for path in folder.iterdir()} >= RUN_FILES
    assert [path.name for path in Path().iterdir()] == ["here"]  # nothing in the working folder
    assert Memory.kept["save_dir"] == "here"
    assert {"val/accuracy", "train/loss"} <= set(Memory.kept["metrics"])
    assert Memory.kept["settings"]["config"]["trainer"]["max_epochs"] == 1
    assert any(row["val/accuracy"] for row in csv.DictReader((folder / "metrics.csv").open()))
    fit(f"--trainer.logger{how}tests.test_users_parts.Memory", "--trainer.logger.save_dir=mine")
    assert Memory.kept["save_dir"] == "mine" and (folder.parent / "version_1" / "results.json").is_file()


def test_another_tensorboard_logger_takes_the_place_of_the_runs(fit):
    _, folder, _ = fit("--trainer.logger+=TensorBoardLogger", "--trainer.logger.save_dir=board")
    assert not list(folder.glob("events.*")) and list(Path("board").rglob("events.*"))


def test_a_logger_that_cannot_be_made_is_one_sentence(fit):
    code, folder, said = fit("--trainer.logger+=tests.test_users_parts.Memory", "--trainer.logger.fails=true")
    assert code == 2 and "no Memory can be made: try `pip install memory`" in said
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind, more", [
    ("WandbLogger", []), ("MLFlowLogger", ["--trainer.logger.tracking_uri=file:tracked"]),
])  # fmt: skip
def test_real_loggers_get_metrics_settings_and_the_runs_files(kind, more, trained, tmp_path):
    pytest.importorskip({"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}[kind])
    arguments = [*trained[1], "--run.root=here", "--run.report=true", f"--trainer.logger+={kind}", *more]
    own = {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "cli", "fit", *arguments], cwd=tmp_path, env={**os.environ, **own},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "here" / "quickstart" / "version_0" / "results.json").is_file()
    files = {path.name for path in tmp_path.rglob("*") if path.is_file() and {"files", "artifacts"} & set(path.parts)}
    assert {"results.json", "report.html", "run.json"} <= files
    if kind == "MLFlowLogger":
        (run,) = {path.parent for path in tmp_path.glob("tracked/*/*/params")}
        assert (run / "metrics" / "val" / "accuracy").is_file()
        assert (run / "params" / "norm").read_text() == "swbn-fro"
        assert (run / "params" / "config" / "trainer" / "max_epochs").read_text() == "1"
    else:
        (log,) = tmp_path.rglob("*.wandb")
        assert b"val/accuracy" in log.read_bytes() and b"max_epochs" in log.read_bytes()


class Look(pl.Callback):
    """Keeps the kinds of a trainer's callbacks."""

    seen: ClassVar[list] = []

    def setup(self, trainer, pl_module, stage):
        self.seen[:] = [type(callback) for callback in trainer.callbacks]


@pytest.mark.parametrize("given, name, ours", [
    (["TQDMProgressBar"], "TQDMProgressBar", "ProgressLines"),
    (["RichModelSummary"], "RichModelSummary", "BriefModelSummary"),
    (["ModelCheckpoint", "--trainer.callbacks.monitor=val/loss"], "ModelCheckpoint", None),
    (["WhitenessMonitor", "--trainer.callbacks.every_n_epochs=0"], "WhitenessMonitor", None),
    (["StopOnNonFinite"], "StopOnNonFinite", None),
])  # fmt: skip
def test_the_users_own_of_a_kind_replaces_the_commands(given, name, ours, trained, fit):
    main_arguments = ["--trainer.enable_progress_bar=true", "--trainer.callbacks+=tests.test_users_parts.Look"]
    arguments = [word for word in trained[1] if not word.startswith(("--whiteness", "--trainer.enable_progress"))]
    arguments += ["--run.root=here", *main_arguments, f"--trainer.callbacks+={given[0]}", *given[1:]]
    main(["fit", *arguments])
    kinds = [kind.__name__ for kind in Look.seen]
    assert kinds.count(name) == 1 and ours not in kinds
    assert "LastCheckpoint" in kinds and "ResultTable" in kinds  # the others stay
    folder = Path("here", "quickstart", "version_0")
    best = json.loads((folder / "results.json").read_text())["best_checkpoint"]
    named = "accuracy" in best
    assert named == (name != "ModelCheckpoint") and (folder / best).is_file()


def test_settings_of_a_callback_that_is_replaced_are_not_ignored(fit):
    code, _, said = fit("--trainer.callbacks+=ModelCheckpoint", "--checkpoint.save_top_k=3")
    assert code == 2 and "ModelCheckpoint among the trainer's callbacks" in said and "(checkpoint.save_top_k)" in said
    code, _, said = fit("--trainer.callbacks+=LearningRateFinder")
    assert code == 2 and "--model.optimizer.lr" in said
    code, _, said = fit("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/nothing")
    assert code == 2 and "`val/nothing` which is not available" in said


def test_a_saved_configuration_with_a_callback_of_the_users_runs_again(fit):
    _, folder, _ = fit("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=val/loss")
    main(["fit", "--config", str(folder / "config.yaml")])
    assert (folder.parent / "version_1" / "results.json").is_file()
    kept = yaml.safe_load((folder / "config.yaml").read_text())
    assert [c["class_path"] for c in kept["trainer"]["callbacks"]] == ["pytorch_lightning.callbacks.ModelCheckpoint"]


def test_barebones(fit):
    code, _, _ = fit("--trainer.barebones=true", "--trainer.enable_progress_bar=null")
    assert code == 0 and not list(Path().rglob("*.ckpt")) and not list(Path().rglob("config.yaml"))
    code, _, said = fit("--trainer.barebones=true", "--trainer.logger=true", "--trainer.enable_progress_bar=null")
    assert code == 2 and "logger=True" in said


@pytest.mark.parametrize("name, options", [
    ("ReduceLROnPlateau", []), ("CosineAnnealingLR", ["T_max=9"]), ("OneCycleLR", ["max_lr=0.1", "total_steps=9"]),
    ("PiecewiseConstantLR", ["milestones=[1]", "rates=[0.1]"]),
])  # fmt: skip
def test_schedules_by_their_short_names(name, options, fit):
    options = [f"--model.lr_scheduler.{option}" for option in options]
    code, folder, _ = fit(f"--model.lr_scheduler={name}", *options)
    assert code == 0 and (folder / "results.json").is_file()


def test_a_schedule_that_takes_a_function_cannot_be_said_in_a_configuration(fit):
    code, folder, said = fit("--model.lr_scheduler=LambdaLR")
    assert code == 2 and not folder.exists() and "lr_scheduler" in said


@pytest.mark.parametrize("norm, more, options", [
    ("bn", [], None),
    ("bn", ["--model.norm_args.eps=0.001"], {"eps": 0.001}),
    ("swbn-kl", ["--model.norm_args={step_size: 0.01}"], {"step_size": 0.01}),
    ("swbn-fro", ["--model.norm_args.eps=0.001"], {"step_size": 0.01, "eps": 0.001}),
])  # fmt: skip
def test_options_of_one_norm_are_not_anothers(norm, more, options, fit):
    code, folder, said = fit(f"--model.norm={norm}", *more)
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]
    assert code == 0 and (model["norm"], model["norm_args"]) == (norm, options)
    left_out = re.search(r"norm=(\S+) does not take over swbn-fro's norm_args in .*quickstart.yaml \(step_size\)", said)
    assert bool(left_out) == ("step_size" not in (options or {}))
    assert left_out is None or left_out[1] == norm


def test_a_later_file_that_names_another_norm_does_not_take_over_options(fit, tmp_path):
    (tmp_path / "kl.yaml").write_text("model: {init_args: {norm: swbn-kl}}\n")
    code, folder, said = fit("--config", str(tmp_path / "kl.yaml"))
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]["init_args"]
    assert code == 0 and (model["norm"], model["norm_args"]) == ("swbn-kl", None)
    assert "norm=swbn-kl does not take over swbn-fro's norm_args" in said


def test_options_are_read_as_the_parser_reads_them(fit, tmp_path):
    """1e-2 is a number for it, and a text in plain YAML 1.1."""
    (tmp_path / "fro.yaml").write_text("model: {init_args: {norm_args: {step_size: 1e-2}}}\n")
    code, _, said = fit("--config", str(tmp_path / "fro.yaml"), "--model.norm=bn")
    assert code == 0 and "norm=bn does not take over swbn-fro's norm_args" in said


OWN_NORM = """
from torch import nn
from swbn_lightning import NormFactory
NormFactory.register("mine", {1: nn.BatchNorm1d, 2: nn.BatchNorm2d})
"""


def test_a_norm_of_the_users_is_known_to_every_command(tmp_path, trained):
    (tmp_path / "my_norms.py").write_text(OWN_NORM)

    def swbn(*words):
        done = subprocess.run(
            [sys.executable, "-m", "swbn_lightning", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(tmp_path)])},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    swbn("fit", *trained[1], "--imports=my_norms", "--model.norm=mine", "--run.name=mine", "--run.root=runs")
    saved = tmp_path / "runs" / "mine" / "version_0" / "config.yaml"
    swbn("test", f"--config={saved}", "--ckpt_path=runs/mine")  # which needs no word of the module
    assert yaml.safe_load(saved.read_text())["imports"] == "my_norms"
