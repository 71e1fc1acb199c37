"""Write what an evaluation found of each image or episode and of each class."""

from pathlib import Path

import pytorch_lightning as pl

from swbn_lightning.files.writing import write_whole
from swbn_lightning.training.callbacks.run_file import run_folder
from swbn_lightning.training.module import TrainingModule


class EvaluationFiles(pl.Callback):
    """Write the files of a ``test`` or ``validate`` to the run's folder, beside ``results.json``.

    - ``images.csv`` (classification): one row per image, ``image,class,predicted,probability``: its number in the
      split, the numbers of its class and of the predicted one, and the probability of the latter.
    - ``episodes.csv`` (few-shot): one row per episode, ``episode,accuracy``.
    - ``classes.csv``: one row per class, ``class,name,accuracy``: the share of its images (few-shot: queries) that were
      classified correctly, empty for a class that did not occur.
    - ``confusion.csv``: one row per pair of classes that occurred, ``class,predicted,count,of``: so many images of the
      class were given the predicted one, out of so many (few-shot: queries in episodes that had both classes).

    ``swbn compare`` pairs the first two with those of another run. A module of your own gives its files by
    :meth:`~swbn_lightning.training.module.TrainingModule.evaluation_files`.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._folder = run_folder(trainer)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, pl_module, "test")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._write(trainer, pl_module, "val")

    def _write(self, trainer: pl.Trainer, pl_module: pl.LightningModule, split: str) -> None:
        if self._folder is None or not trainer.is_global_zero or not isinstance(pl_module, TrainingModule):
            return
        for name, text in pl_module.evaluation_files(split).items():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / name, text)
