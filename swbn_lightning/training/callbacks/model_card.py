"""Write the card of a trained model beside its best checkpoint."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_warn

from swbn_lightning.data.image_data import ImageDataModule
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import has_file, read_json
from swbn_lightning.files.writing import write_whole
from swbn_lightning.runs.card import CARD_FILE, card_of
from swbn_lightning.runs.folders import RESULTS_FILE
from swbn_lightning.runs.trained_data import DATA, data_facts, saved_content, seen_otherwise
from swbn_lightning.training.callbacks.run_file import AtTheEnd
from swbn_lightning.training.module import tested_file


class ModelCard(AtTheEnd):
    """Write ``card.md`` beside the best checkpoint when ``fit`` ends or is interrupted.

    Put it after ``ResultTable``, whose results it shows. Every checkpoint contains what was read of each split: the
    number of images and the names of the classes. An evaluation or prediction warns where its images are of another
    size or normalisation than those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._facts: dict[str, Any] | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        data = getattr(trainer, "datamodule", None)
        if self._facts is None and isinstance(data, ImageDataModule):
            self._facts = data.facts()  # the same all through a training
        if self._facts is not None:
            checkpoint[DATA] = self._facts

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, ImageDataModule):
            trained = data_facts(saved_content(tested_file(trainer, pl_module)))
            if found := seen_otherwise(trained, data.facts()):
                rank_zero_warn(found)

    on_predict_start = on_test_start

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "validate":
            self.on_test_start(trainer, pl_module)

    def finish(self, trainer: pl.Trainer, folder: Path) -> None:
        if trainer.state.fn != "fit" or not has_file(folder, (RESULTS_FILE,)):
            return
        try:
            if best := read_json(folder / RESULTS_FILE).get("best_checkpoint"):
                write_whole((folder / best).with_name(CARD_FILE), card_of(folder / best))
        except InputError as error:  # a full disk: what was trained shall not be lost for a text
            rank_zero_warn(f"the model's card could not be written: {error}")
