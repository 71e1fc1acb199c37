"""What a user of the command takes for granted: names of files, paths, and a model that is only a model."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from cli import main
from fewshot import PrototypicalNetwork
from swbn_lightning.command import main as command
from swbn_lightning.command.overview import COMMANDS
from tests.conftest import REPOSITORY


@pytest.mark.parametrize("more", [
    ["--trainer.val_check_interval=0.5", "--trainer.max_epochs=2"],
    ["--trainer.check_val_every_n_epoch=2", "--trainer.max_epochs=5"],
])  # fmt: skip
def test_a_file_is_saved_right_after_the_validation_that_it_is_named_for(more, trained, tmp_path):
    given = [*trained[1], f"--run.root={tmp_path}", "--data.val.episodes=50"]
    main(["fit", *given, "--data.train.episodes=8", "--model.optimizer.lr=0.3", *more])
    run = tmp_path / "quickstart" / "version_0"
    main(["validate", *given, "--ckpt_path", str(run)])
    results, validated = (
        json.loads((run.parent / name / "results.json").read_text()) for name in ("version_0", "version_1")
    )
    best, again = results["results"][0], validated["results"][0]["accuracy"]
    assert "best" in best["split"] and again == pytest.approx(best["accuracy"], abs=1e-9)
    assert f"accuracy{again:.4f}" in results["best_checkpoint"]


def test_every_checkpoint_of_steps_is_kept_under_a_name_of_its_own(trained, tmp_path, capsys):
    by_step = ["--checkpoint.every_n_train_steps=2", "--checkpoint.save_top_k=-1", "--data.train.episodes=9"]
    given = [*trained[1], *by_step, f"--run.root={tmp_path}"]
    main(["fit", *given, "--checkpoint.monitor=null"])
    names = sorted(path.name for path in (tmp_path / "quickstart" / "version_0" / "checkpoints").iterdir())
    assert names == ["card.md", "last.ckpt", *(f"step{step:06d}.ckpt" for step in (2, 4, 6, 8))]
    with pytest.raises(SystemExit):
        main(["fit", *given])
    assert "when there is no val/accuracy: give --checkpoint.monitor null" in capsys.readouterr().err


def test_a_home_folder_is_one_place(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    main(["fit", *trained[1], "--run.root=~/mine"])
    files = {path.name for path in (tmp_path / "mine" / "quickstart" / "version_0").iterdir()}
    assert {"metrics.csv", "results.json", "config.yaml", "checkpoints"} <= files and not (tmp_path / "~").exists()
    assert any(name.startswith("events.") for name in files)


@pytest.fixture
def model(trained, monkeypatch):
    """A module as the command makes it."""
    made = []
    with monkeypatch.context() as patch:
        patch.setattr(pl.Trainer, "fit", lambda trainer, model, **kwargs: made.append(model))
        main(["fit", *trained[1]])
    return made[0]


def test_the_model_reaches_neither_command_nor_trainer(model):
    weights = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    assert len(pickle.dumps(model)) < weights + 100_000
    twin = copy.deepcopy(model)
    assert twin._optimizer is not model._optimizer
    optimizer = pickle.loads(pickle.dumps(model._optimizer))(twin.parameters())
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["nesterov"]


def test_a_model_outside_of_a_training_has_nothing_that_raises(trained):
    """Tracing looks at every attribute."""
    model = PrototypicalNetwork.load_from_checkpoint(trained[0]).eval()
    own = [kind for kind in type(model).__mro__ if kind.__module__.startswith(("fewshot", "swbn_lightning"))]
    for name in {name for kind in own for name, value in vars(kind).items() if isinstance(value, property)}:
        getattr(model, name)
    images = torch.randn(2, 1, 28, 28)
    traced = model.to_torchscript(method="trace", example_inputs=images)
    assert torch.equal(traced(images), model(images))


def test_every_command_is_in_the_overview_which_says_when_it_could_not_be_shown():
    assert set(COMMANDS) == {*command._COMMANDS, "fit", "validate", "test", "predict"}
    with Path("/dev/full").open("w") as screen:
        done = subprocess.run([sys.executable, "-m", "swbn_lightning", "--help"], cwd=REPOSITORY, stdout=screen)
    assert done.returncode == 1
