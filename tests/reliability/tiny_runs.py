"""A training of a second for tests that stop it: everything random that a run may have is in it."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from classification import ImageClassifier, MNISTDataModule
from fewshot import BaseClassesDataModule, BaseClassifier, EpisodicDataModule, PrototypicalNetwork
from fewshot.episodes import EpisodeSettings
from swbn_lightning.runs.checkpoint_io import WholeCheckpointIO
from swbn_lightning.training.callbacks.last_checkpoint import LastCheckpoint
from swbn_lightning.training.callbacks.random_streams import RandomStreams

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def classification(root, norm="swbn-fro", **data):
    """Five steps an epoch, on images in MNIST's files; its validation takes five batches."""
    # The images have hardly more than one direction: what DBN divides by would be rounding alone.
    norm_args = {"swbn-fro": {"step_size": 0.01}, "dbn": {"eps": 0.1}}.get(norm)
    model = ImageClassifier(
        num_classes=10, backbone="mlp", norm=norm, norm_args=norm_args, warmup_steps=3,
        backbone_args={"hidden": [16, 16]}, optimizer=sgd, lr_interval="step",
        lr_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 30),
    )  # fmt: skip
    settings = {"batch_size": 32, "eval_batch_size": 4, "crop_padding": 2, "erasing": 0.3, "seed": 5, **data}
    return model, MNISTDataModule(root=str(root), **settings)


def few_shot(root, **data):
    """Six steps an epoch, on images in CIFAR-100's files."""
    model = PrototypicalNetwork(
        backbone="mlp", norm="swbn-kl", norm_args={"step_size": 0.01}, optimizer=lambda p: torch.optim.Adam(p, 0.01),
        backbone_args={"hidden": [16], "in_channels": 3, "image_size": 32},
    )  # fmt: skip
    evaluation = EpisodeSettings(ways=3, shots=1, queries=2, episodes=20)
    training = EpisodeSettings(ways=3, shots=2, queries=3, episodes=12)
    settings = {"train": training, "val": evaluation, "test": evaluation, "episodes_per_step": 2, "seed": 5, **data}
    return model, EpisodicDataModule(dataset="cifar-fs", root=str(root), flip=True, **settings)


def base_classes(root, **data):
    """24 steps an epoch, on the same images; validation has held-out images and episodes."""
    model = BaseClassifier(
        num_classes=64,  # made here: under DDP Lightning seeds anew before it asks for what depends on the data
        backbone="mlp", norm="swbn-fro", norm_args={"step_size": 0.01}, optimizer=sgd,
        backbone_args={"hidden": [16], "in_channels": 3, "image_size": 32},
    )  # fmt: skip
    evaluation = EpisodeSettings(ways=3, shots=1, queries=2, episodes=20)
    settings = {"val": evaluation, "test": evaluation, "batch_size": 32, "eval_batch_size": 20, "seed": 5, **data}
    return model, BaseClassesDataModule("cifar-fs", str(root), flip=True, held_out_share=0.5, **settings)


class Noise(pl.Callback):
    """Weights that depend on each of the process's random streams."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        drawn = random.random() + np.random.rand() + torch.rand(()).item()
        with torch.no_grad():
            next(pl_module.parameters()).add_(1e-3 * drawn)


class At(pl.Callback):
    """Acts once: at a training batch, a batch of validation or sanity check, or a hook, counted from 0."""

    def __init__(self, number: int, where: str) -> None:
        self.left, self.where = number, where

    def on_train_batch_start(self, *args):
        self._count("train")

    def on_validation_batch_start(self, trainer, *args):
        self._count("sanity" if trainer.sanity_checking else "validation")

    def on_train_epoch_end(self, *args):
        self._count("epoch")

    def on_fit_start(self, *args):
        self._count("on_fit_start")

    def on_save_checkpoint(self, *args):
        self._count("on_save_checkpoint")

    def on_train_end(self, *args):
        self._count("on_train_end")

    def _count(self, where):
        self.left -= where == self.where
        if self.left < 0 and where == self.where:
            self.where = ""
            self.act()


class Kill(At):
    """Sends this process a signal."""

    def __init__(self, number: int, name: str = "SIGTERM", where: str = "train") -> None:
        super().__init__(number, where)
        self.signal = signal.Signals[name]

    def act(self):
        os.kill(os.getpid(), self.signal)


class Pause(At):
    """Makes the file ``here`` in ``folder`` and waits for ``go``, which the test makes."""

    def __init__(self, where: str, folder: str, number: int = 0) -> None:
        super().__init__(number, where)
        self.folder = Path(folder)

    def act(self):
        (self.folder / "here").touch()
        end = time.monotonic() + 60
        while not (self.folder / "go").exists() and time.monotonic() < end:
            time.sleep(0.01)


def fit(folder, model, data, *callbacks, resume=None, noise=True, plugin=None, **options):
    """Train for three epochs; the path of the last checkpoint."""
    pl.seed_everything(1 if resume else 0, verbose=False)  # going on must not depend on how the process was seeded
    last = LastCheckpoint()
    last.dirpath = str(folder)
    trainer = pl.Trainer(
        callbacks=[RandomStreams(), *([Noise()] if noise else []), *callbacks, last],
        plugins=[plugin or WholeCheckpointIO()], **{"max_epochs": 3, **QUIET, **options},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=data, ckpt_path=resume)
    return Path(folder) / "last.ckpt"


def assert_same(first, second, path=""):
    """Bit for bit, tensors in nests of dicts, lists and tuples."""
    assert type(first) is type(second), path
    if isinstance(first, dict):
        assert first.keys() == second.keys(), (path, first.keys() ^ second.keys())
        for key, value in first.items():
            assert_same(value, second[key], f"{path}/{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), path
        for number, pair in enumerate(zip(first, second, strict=True)):
            assert_same(*pair, f"{path}/{number}")
    elif isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype and torch.equal(first, second), path
    else:
        assert first == second, (path, first, second)


def signals_of(jobs):
    """The signals that ended the children of :mod:`tests.reliability.killed`, one a job."""
    repository = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.reliability.killed", json.dumps(jobs)]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


PARTS = ("state_dict", "optimizer_states", "lr_schedulers", "random_streams", "epoch", "global_step")


def assert_same_training(first, second):
    """Two checkpoint files after the same steps: weights, W, optimiser, schedule, random streams, position."""
    one, two = (torch.load(path, weights_only=True) for path in (first, second))
    for part in PARTS:
        assert_same(one[part], two[part], part)
