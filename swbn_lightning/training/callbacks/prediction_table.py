"""What ``predict`` found: a table on the terminal and ``predictions.csv`` in the run's folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from swbn_lightning.files.reading import printable
from swbn_lightning.files.screen import table_console
from swbn_lightning.files.writing import csv_text, write_output
from swbn_lightning.runs.folders import PREDICTIONS_FILE
from swbn_lightning.training.module import TrainingModule


class PredictionTable(pl.Callback):
    """Print the class and probability of every image; write ``predictions.csv`` to the run's folder.

    Beside it come the model's own :meth:`~swbn_lightning.training.module.TrainingModule.prediction_files`: of a
    few-shot model ``predictions.html``, which shows every image with the support image nearest to it.

    For models that set :attr:`~swbn_lightning.training.module.TrainingModule.prediction_classes`, with batches of
    numbered images whose files the data module names in ``query_files``.
    """

    def __init__(self) -> None:
        self._numbers: list[Tensor] = []
        self._probabilities: list[Tensor] = []

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        if isinstance(outputs, Tensor) and hasattr(batch, "numbers"):
            self._numbers.append(batch.numbers.cpu())
            self._probabilities.append(outputs.float().cpu())

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        names = getattr(pl_module, "prediction_classes", ())
        images = getattr(getattr(trainer, "datamodule", None), "query_files", ())
        if stage != "predict" or not (self._numbers and names and images):
            return
        numbers, probabilities = torch.cat(self._numbers), torch.cat(self._probabilities)
        files = [images[number] for number in numbers.tolist()]
        # Folded, not cut off, where the terminal is narrow: images differ in the end of their paths.
        table = Table(*(Column(heading, overflow="fold") for heading in ("image", "class", "probability")))
        for file, row in zip(files, probabilities, strict=True):
            table.add_row(Text(printable(file)), Text(printable(names[int(row.argmax())])), f"{row.max():.3f}")
        console = table_console()
        console.print(table)
        if trainer.loggers and trainer.log_dir:
            written = {PREDICTIONS_FILE: _table(files, names, probabilities)}
            if isinstance(pl_module, TrainingModule):
                written |= pl_module.prediction_files(numbers, probabilities)
            for name, content in written.items():
                path = write_output(Path(trainer.log_dir) / name, content)
                console.print(f"written: {path}", soft_wrap=True, highlight=False, markup=False)


def _table(files: Sequence[str], names: Sequence[str], probabilities: Tensor) -> str:
    rows = []
    for image, row in zip(files, probabilities, strict=True):
        values = [f"{value:.6f}" for value in row.tolist()]
        best = int(row.argmax())
        rows.append([image, names[best], values[best], *values])
    return csv_text(("image", "class", "probability", *names), rows)
