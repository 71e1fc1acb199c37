"""Checkpoints are written whole or not at all, and loading one runs no code."""

import os
import pickle
import resource
import signal
import zipfile
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from cli import main
from swbn_lightning.runs.checkpoint_io import WholeCheckpointIO
from swbn_lightning.runs.checkpoints import find_checkpoint, load_backbone
from tests.reliability.killed import BIG
from tests.reliability.tiny_runs import QUIET, classification, signals_of


@pytest.fixture
def small_files_alone():
    """No file may grow beyond 100 kB: the kernel refuses the write as it does on a full disk (EFBIG for ENOSPC)."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, small_files_alone):
    path = tmp_path / "last.ckpt"
    WholeCheckpointIO().save_checkpoint({"state_dict": {}, "epoch": 1}, path)
    with pytest.raises(ValueError, match=r"last.ckpt could not be written \(File too large\).*make room.*--ckpt_path"):
        WholeCheckpointIO().save_checkpoint(BIG, path)
    assert torch.load(path, weights_only=True)["epoch"] == 1 and list(tmp_path.iterdir()) == [path]


def test_the_data_are_on_the_disk_before_the_name_is(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("fsync"), fsync(file)))
    monkeypatch.setattr(Path, "replace", lambda self, to: (done.append("replace"), replace(self, to)))
    WholeCheckpointIO().save_checkpoint(BIG, tmp_path / "last.ckpt")
    assert done == ["fsync", "replace", "fsync"]  # the file, its name, the folder that holds the name


def test_a_kill_while_writing_leaves_the_old_one(tmp_path):
    WholeCheckpointIO().save_checkpoint(BIG, tmp_path / "whole")
    size = (tmp_path / "whole").stat().st_size
    folders = {share: tmp_path / str(share) for share in (0.0, 0.5, 0.999)}
    for folder in folders.values():
        WholeCheckpointIO().save_checkpoint({"epoch": 1}, folder / "last.ckpt")
    jobs = [["write", str(folder / "last.ckpt"), int(size * share)] for share, folder in folders.items()]
    assert signals_of(jobs) == [signal.SIGKILL] * 3
    for folder in folders.values():
        assert torch.load(folder / "last.ckpt", weights_only=True) == {"epoch": 1}
        assert [path.name for path in folder.iterdir() if not path.name.endswith(".tmp")] == ["last.ckpt"]


def test_what_cannot_be_saved_says_so_itself(tmp_path):
    with pytest.raises((AttributeError, pickle.PicklingError)):
        WholeCheckpointIO().save_checkpoint({"function": lambda: 0}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_trainer_reads_no_more_than_the_command(tmp_path):
    """What is packed could unpack to any size, and a pipe would be waited for."""
    torch.save({"state_dict": {}}, tmp_path / "whole.ckpt")
    whole, packed = (tmp_path / f"{name}.ckpt" for name in ("whole", "packed"))
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    os.mkfifo(tmp_path / "pipe.ckpt")
    assert WholeCheckpointIO().load_checkpoint(whole) == {"state_dict": {}}
    for name, words in (("packed", "its parts are compressed"), ("pipe", "it is not a regular file")):
        with pytest.raises(ValueError, match=rf"{name}\.ckpt is not a readable checkpoint \({words}"):
            WholeCheckpointIO().load_checkpoint(tmp_path / f"{name}.ckpt")


def test_what_a_training_goes_on_from_is_no_part_of_a_file(tmp_path):
    """An optimiser keeps the tensors of its state; a file that is written over under them would kill the process."""
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {}, "optimizer_states": [torch.arange(100_000)]}, path)
    (state,) = WholeCheckpointIO().load_checkpoint(path)["optimizer_states"]
    path.write_bytes(b"")
    assert torch.equal(state, torch.arange(100_000))


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return exec, (f"open({str(self.marker)!r}, 'w')",)


@pytest.fixture
def hostile(tmp_path):
    """A checkpoint that makes a file when it is loaded as a pickle; and that file's path."""
    marker, path = tmp_path / "ran", tmp_path / "hostile.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": Hostile(marker), "loops": {}}, path)
    torch.load(path, weights_only=False)  # it works
    marker.unlink()
    return path, marker


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_no_command_runs_what_a_checkpoint_holds(command, hostile, tiny_mnist, monkeypatch, capsys):
    path, marker = hostile
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    given = [command, "--model=ImageClassifier", "--model.num_classes=10", "--data=MNISTDataModule"]
    with pytest.raises(SystemExit) as stopped:
        main([*given, f"--data.root={tiny_mnist}", "--ckpt_path", str(path)])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "hostile.ckpt is not a readable checkpoint (it names code: " in said
    assert "False" not in said  # PyTorch's advice to load it all the same
    assert not marker.exists()


def test_nothing_in_python_runs_it_either(hostile, tiny_mnist, monkeypatch):
    path, marker = hostile
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    model, data = classification(tiny_mnist)
    trainer = pl.Trainer(plugins=[WholeCheckpointIO()], **QUIET, enable_checkpointing=False)
    loads = {
        "fit": lambda: trainer.fit(model, datamodule=data, ckpt_path=path),
        "test": lambda: trainer.test(model, datamodule=data, ckpt_path=path),
        "not asked": lambda: trainer.test(model, datamodule=data, ckpt_path=path, weights_only=False),
        "backbone": lambda: load_backbone(model.backbone, path),
        "found": lambda: find_checkpoint(path),
    }
    for name, load in loads.items():
        with pytest.raises((pickle.UnpicklingError, ValueError)):
            load()
        assert not marker.exists(), name
