"""Which image files make up a split: listed and checked before any of them is read."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from swbn_lightning.data.cache import ImageCache
from swbn_lightning.data.decode import read_images
from swbn_lightning.data.images import ImageSet
from swbn_lightning.errors import InputError


@dataclass(frozen=True)
class ImageListing:
    """The image files of a split, class by class.

    Args:
        classes: the files of every class; labels are the places of the classes here.
        root: a folder above all files: the cache knows them by their path below it.
    """

    classes: dict[str, list[Path]]
    root: Path

    @property
    def files(self) -> list[Path]:
        """All files, class after class."""
        return [file for files in self.classes.values() for file in files]

    @property
    def labels(self) -> Tensor:
        """int64 ``[N]``, the label of every one of ``files``."""
        counts = torch.tensor([len(files) for files in self.classes.values()])
        return torch.arange(len(self.classes)).repeat_interleave(counts)

    @cached_property
    def content_id(self) -> str:
        """Equal for the same files, wherever they are: made of the names and sizes of the files, class by class."""
        digest = hashlib.sha256()
        for name, files in self.classes.items():
            digest.update(b"\0\0" + os.fsencode(name))
            for file in files:
                digest.update(b"\0" + os.fsencode(file.name) + str(file.stat().st_size).encode())
        return digest.hexdigest()[:16]


def load_listing(
    listing: ImageListing,
    name: str,
    image_size: int,
    channels: int = 3,
    cache: ImageCache | None = None,
    source: str = "",
) -> ImageSet:
    """All images of a listing in memory, from the cache if it has them, as RGB (3 channels) or gray (1)."""
    if cache is None:
        images = read_images(listing.files, image_size, channels, name)
    else:
        images = cache.images(listing.files, listing.root, image_size, channels, name)
    return ImageSet(images, listing.labels, tuple(listing.classes), name, source)


def check_apart(name: str, splits: Mapping[str, ImageListing]) -> None:
    """Raise :class:`InputError` if a class is in two ``splits``, or a file is listed twice, by whatever paths."""
    split_of_class: dict[str, str] = {}
    for split, listing in splits.items():
        for class_name in listing.classes:
            if (other := split_of_class.setdefault(class_name, split)) != split:
                raise InputError(
                    f"{name}: the class {class_name!r} is in both {other} and {split}; a class of evaluation "
                    "must not have been trained on."
                )
    require_distinct_files(name, {split: listing.files for split, listing in splits.items()})


def require_distinct_files(name: str, splits: Mapping[str, Iterable[str | Path]]) -> None:
    """Raise :class:`InputError` if a file is there twice, by whatever paths, in one split or in two.

    In one class too: else one image could be support and query of the same episode.
    """
    seen: dict[tuple[int, int], tuple[str, str | Path]] = {}
    for split, files in splits.items():
        for file in files:
            found = os.stat(file)  # noqa: PTH116 - of what a link points to; a million
            key = (found.st_dev, found.st_ino)
            if key in seen and found.st_ino:  # some file systems number nothing
                other, first = seen[key]
                raise InputError(f"{name}: {first} of {other} and {file} of {split} are one and the same file.")
            seen[key] = split, file
