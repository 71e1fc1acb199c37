"""A callback that stops the clock at a moment of a training, for a test to send its signal then."""

import time
from pathlib import Path

import pytorch_lightning as pl


class Pause(pl.Callback):
    """At the given moment makes the file ``here`` in ``folder`` and waits for ``go``, which the test makes.

    Args:
        where: a training batch, a batch of the sanity check or of a validation, or one of Lightning's hooks by name.
        number: which of them, counted from 0.
        folder: of the two files.
    """

    def __init__(self, where: str, folder: str, number: int = 0) -> None:
        self.where, self.folder, self.left = where, Path(folder), number

    def _count(self, where: str) -> None:
        self.left -= where == self.where
        if self.left >= 0 or where != self.where:
            return
        self.where = ""
        (self.folder / "here").touch()
        end = time.monotonic() + 60
        while not (self.folder / "go").exists() and time.monotonic() < end:
            time.sleep(0.01)

    def on_fit_start(self, *args):
        self._count("on_fit_start")

    def on_validation_batch_start(self, trainer, *args):
        self._count("sanity" if trainer.sanity_checking else "validation")

    def on_train_start(self, *args):
        self._count("on_train_start")

    def on_train_batch_start(self, *args):
        self._count("train")

    def on_train_epoch_end(self, *args):
        self._count("on_train_epoch_end")

    def on_save_checkpoint(self, *args):
        self._count("on_save_checkpoint")

    def on_train_end(self, *args):
        self._count("on_train_end")

    def on_fit_end(self, *args):
        self._count("on_fit_end")
