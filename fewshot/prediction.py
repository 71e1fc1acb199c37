"""Classify your own images from a few examples: the data of ``predict`` and its table."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

from swbn_lightning.data import ImageSet
from swbn_lightning.data.decode import read_images
from swbn_lightning.data.files import require_regular
from swbn_lightning.data.folders import image_files, load_class_folders
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable
from swbn_lightning.files.screen import table_console
from swbn_lightning.files.writing import csv_text, write_output

PREDICTIONS_FILE = "predictions.csv"


class PredictionData(NamedTuple):
    """A support set of named classes, and the images to classify."""

    support: ImageSet  # the same number of images of every class, class after class
    query_files: tuple[str, ...]
    query: Tensor  # uint8 [N, C, H, W]

    @property
    def shots(self) -> int:
        """Support images per class."""
        return len(self.support) // self.support.num_classes


def load_prediction_data(
    support: str | None, query: str | None, image_size: int, channels: int, from_file: Callable[[Tensor], Tensor]
) -> PredictionData:
    """Read the support folder ``<class>/<image>``, and the query images (a folder or one image).

    ``from_file`` is what the training data set does to the pixels of its files.
    """
    if support is None or query is None:
        raise InputError(
            "predict needs a support folder of named classes and images to name: "
            "--data.support DIR (DIR/<class>/<image>) and --data.query PATH (a folder of images, or one image)."
        )
    support_path, query_path = Path(support).expanduser(), Path(query).expanduser()
    if not support_path.is_dir():
        raise InputError(f"predict: support folder {support_path} does not exist or is not a folder.")
    if not query_path.exists():
        raise InputError(f"predict: query {query_path} does not exist.")
    if not query_path.is_dir():
        require_regular(query_path)
    files = image_files(query_path) if query_path.is_dir() else [query_path]
    if not files:
        raise InputError(f"predict: query folder {query_path} holds no images.")
    classes = load_class_folders(support_path, "support", image_size, channels)
    counts = torch.bincount(classes.labels).tolist()
    if len(set(counts)) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in zip(classes.class_names, counts, strict=True))
        raise InputError(f"predict: every class needs the same number of support images; found {listed}.")
    images = read_images(files, image_size, channels, "query")
    classes = replace(classes, images=from_file(classes.images))
    # Names that are not UTF-8 can be opened but not printed.
    shown = tuple(os.fsencode(file).decode(errors="backslashreplace") for file in files)
    return PredictionData(classes, shown, from_file(images))


class PredictionTable(pl.Callback):
    """Print the class and probability of every query image; write ``predictions.csv`` to the run's folder."""

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
        data = getattr(getattr(trainer, "datamodule", None), "prediction", None)
        if stage != "predict" or not self._numbers or not isinstance(data, PredictionData):
            return
        names = data.support.class_names
        files = [data.query_files[number] for number in torch.cat(self._numbers).tolist()]
        probabilities = torch.cat(self._probabilities)
        # Folded, not cut off, where the terminal is narrow: images differ in the end of their paths.
        table = Table(*(Column(heading, overflow="fold") for heading in ("image", "class", "probability")))
        for file, row in zip(files, probabilities, strict=True):
            table.add_row(Text(printable(file)), Text(printable(names[int(row.argmax())])), f"{row.max():.3f}")
        console = table_console()
        console.print(table)
        if trainer.loggers and trainer.log_dir:
            path = write_output(Path(trainer.log_dir) / PREDICTIONS_FILE, _table(files, names, probabilities))
            console.print(f"written: {path}", soft_wrap=True, highlight=False, markup=False)


def _table(files: list[str], names: tuple[str, ...], probabilities: Tensor) -> str:
    rows = []
    for image, row in zip(files, probabilities, strict=True):
        values = [f"{value:.6f}" for value in row.tolist()]
        best = int(row.argmax())
        rows.append([image, names[best], values[best], *values])
    return csv_text(("image", "class", "probability", *names), rows)
