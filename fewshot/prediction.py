"""Classify your own images from a few examples: the data of ``predict`` and its page."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from swbn_lightning.data import ImageSet
from swbn_lightning.data.decode import read_images
from swbn_lightning.data.folders import list_class_folders
from swbn_lightning.data.listing import load_listing
from swbn_lightning.data.query import query_files, shown_names
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable
from swbn_lightning.runs.folders import PREDICTIONS_FILE
from swbn_lightning.runs.page.render import Name, Number, Strong, Thumbnail, render, table, text, thumbnail

PAGE_FILE = "predictions.html"
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
    support_path = Path(support).expanduser()
    if not support_path.is_dir():
        raise InputError(f"predict: support folder {support_path} does not exist or is not a folder.")
    files = query_files(query)
    listing = list_class_folders(support_path, "support")
    if len(listing.classes) < 2:
        only = ", ".join(listing.classes)
        raise InputError(f"predict: the support folder {support_path} holds one class, {printable(only)}; give two.")
    classes = load_listing(listing, "support", image_size, channels)
    images = read_images(files, image_size, channels, "query")
    classes = replace(classes, images=from_file(classes.images))
    return PredictionData(classes, shown_names(listing.files), from_file(images), shown_names(files))


def nearest_images(support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Number of each query's nearest support image, and the cosine of their features, both ``[M]``.

    Args:
        support: features ``[N, C]``, or maps ``[N, C, h, w]``, which are averaged over their positions.
        query: the same, ``[M, ...]``.
    """
    with torch.autocast(query.device.type, enabled=False):
        cosines, numbers = (_directions(query) @ _directions(support).mT).max(-1)
    return numbers, cosines


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
