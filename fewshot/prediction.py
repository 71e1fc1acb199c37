"""Classify your own images from a few examples: the data of ``predict``, its table and its page."""

import itertools
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
from torch.nn import functional as F

from swbn_lightning.data import ImageSet
from swbn_lightning.data.decode import read_images
from swbn_lightning.data.files import require_regular
from swbn_lightning.data.folders import image_files, list_class_folders
from swbn_lightning.data.listing import load_listing
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable
from swbn_lightning.files.screen import table_console
from swbn_lightning.files.writing import csv_text, write_output
from swbn_lightning.runs.page.render import Name, Number, Strong, Thumbnail, render, table, text, thumbnail

PREDICTIONS_FILE, PAGE_FILE = "predictions.csv", "predictions.html"
_MOST_SHOWN = 500  # images on the page: two pictures of about 4 kB each
_MOST_OTHERS = 4  # classes of an image beside the most probable one


class PredictionData(NamedTuple):
    """A support set of named classes, and the images to classify; files as they are shown."""

    support: ImageSet  # class after class
    support_files: tuple[str, ...]
    query: Tensor  # uint8 [N, C, H, W]
    query_files: tuple[str, ...]

    @property
    def shots(self) -> list[int]:
        """Support images of each class."""
        return torch.bincount(self.support.labels).tolist()


def load_prediction_data(
    support: str | None, query: str | None, image_size: int, channels: int, from_file: Callable[[Tensor], Tensor]
) -> PredictionData:
    """Read the support folder ``<class>/<image>``, and the query images (a folder or one image).

    Classes may have different numbers of support images.

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
    listing = list_class_folders(support_path, "support")
    classes = load_listing(listing, "support", image_size, channels)
    images = read_images(files, image_size, channels, "query")
    classes = replace(classes, images=from_file(classes.images))
    # Names that are not UTF-8 can be opened but not printed.
    support_files, query_files = (
        tuple(os.fsencode(file).decode(errors="backslashreplace") for file in own) for own in (listing.files, files)
    )
    return PredictionData(classes, support_files, from_file(images), query_files)


def nearest_images(support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Number of each query's nearest support image, and the cosine of their features, both ``[M]``.

    Args:
        support: features ``[N, C]``, or maps ``[N, C, h, w]``, which are averaged over their positions.
        query: the same, ``[M, ...]``.
    """
    with torch.autocast(query.device.type, enabled=False):
        cosines, numbers = (_directions(query) @ _directions(support).mT).max(-1)
    return numbers, cosines


class PredictionTable(pl.Callback):
    """Print the class and probability of every query image; write ``predictions.csv`` and a page to the run's folder.

    The page, ``predictions.html``, shows every image with its probabilities and the support image nearest to it.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, ...]] = []  # numbers, probabilities, nearest support images, cosines

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *args: Any
    ) -> None:
        nearest = getattr(pl_module, "nearest", None)
        if isinstance(outputs, Tensor) and hasattr(batch, "numbers") and nearest is not None:
            self._batches.append(tuple(part.cpu() for part in (batch.numbers, outputs.float(), *nearest)))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        data = getattr(getattr(trainer, "datamodule", None), "prediction", None)
        if stage != "predict" or not self._batches or not isinstance(data, PredictionData):
            return
        numbers, probabilities, nearest, cosines = (torch.cat(parts) for parts in zip(*self._batches, strict=True))
        names = data.support.class_names
        files = [data.query_files[number] for number in numbers.tolist()]
        # Folded, not cut off, where the terminal is narrow: images differ in the end of their paths.
        screen = Table(*(Column(heading, overflow="fold") for heading in ("image", "class", "probability")))
        for file, row in zip(files, probabilities, strict=True):
            screen.add_row(Text(printable(file)), Text(printable(names[int(row.argmax())])), f"{row.max():.3f}")
        console = table_console()
        console.print(screen)
        if trainer.loggers and trainer.log_dir:
            page = prediction_page(data, numbers, probabilities, nearest, cosines)
            for name, content in ((PREDICTIONS_FILE, _table(files, names, probabilities)), (PAGE_FILE, page)):
                path = write_output(Path(trainer.log_dir) / name, content)
                console.print(f"written: {path}", soft_wrap=True, highlight=False, markup=False)


def prediction_page(
    data: PredictionData, numbers: Tensor, probabilities: Tensor, nearest: Tensor, cosines: Tensor
) -> str:
    """A page of the query images with their classes, and the support image nearest to each.

    Args:
        data: what was predicted.
        numbers: ``[M]``, of the query images.
        probabilities: ``[M, W]``.
        nearest: ``[M]``, numbers of support images.
        cosines: ``[M]``, of the two images' features.
    """
    names, low, high = data.support.class_names, min(data.shots), max(data.shots)
    words = [
        f"{len(numbers)} images, {len(names)} classes of {low if low == high else f'{low} to {high}'} examples each. "
        "The nearest example has the largest cosine of its features with the image's; it may be of another class than "
        "the most probable one. Pictures are shown as the network sees them."
    ]
    if len(numbers) > _MOST_SHOWN:
        words.append(f"The first {_MOST_SHOWN} are shown; {PREDICTIONS_FILE} has all.")
    rows = []
    found = zip(numbers.tolist(), probabilities, nearest.tolist(), cosines, strict=True)
    for number, row, example, cosine in itertools.islice(found, _MOST_SHOWN):
        best, *others = row.argsort(descending=True, stable=True)[: 1 + _MOST_OTHERS].tolist()
        like = f"{names[int(data.support.labels[example])]}/{Path(data.support_files[example]).name}"
        rows.append(
            [
                _thumbnail(data.query[number], Path(data.query_files[number]).name),
                Name(printable(names[best])),
                Strong(f"{row[best]:.3f}"),
                ", ".join(f"{printable(names[other])}\N{NO-BREAK SPACE}{row[other]:.3f}" for other in others),
                _thumbnail(data.support.images[example], like),
                Number(f"{cosine:.3f}"),
            ]
        )
    head = ["image", "class", "probability", "other classes", "nearest example", "cosine"]
    return render("Predictions", [text(" ".join(words)), table(head, rows)])


def _directions(features: Tensor) -> Tensor:
    features = features.float()
    return F.normalize(features.flatten(2).mean(-1) if features.dim() > 2 else features, dim=-1)


def _thumbnail(image: Tensor, name: str) -> Thumbnail:
    return thumbnail(image.movedim(0, -1).squeeze(-1).numpy(), printable(name))


def _table(files: list[str], names: tuple[str, ...], probabilities: Tensor) -> str:
    rows = []
    for image, row in zip(files, probabilities, strict=True):
        values = [f"{value:.6f}" for value in row.tolist()]
        best = int(row.argmax())
        rows.append([image, names[best], values[best], *values])
    return csv_text(("image", "class", "probability", *names), rows)
