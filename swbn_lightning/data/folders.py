"""Class folders, ``<class>/<image>``, into memory."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from swbn_lightning.data.images import ImageSet
from swbn_lightning.errors import InputError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})


def class_folders(root: Path) -> list[Path]:
    """The folders directly below ``root``, sorted by name; hidden ones are passed over."""
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def image_files(folder: Path) -> list[Path]:
    """The image files directly in ``folder``, sorted by name; hidden and foreign files are passed over."""
    return sorted(
        p for p in folder.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES and not p.name.startswith(".") and p.is_file()
    )


def require_classes(name: str, folder: Path, wanted: Iterable[str], whose: str) -> None:
    """Raise :class:`InputError` unless the class folders below ``folder`` are those ``wanted``.

    Args:
        name: of the data set, for the message.
        folder: whose class folders are compared.
        wanted: their names.
        whose: whose classes they are, for the message: "the test split".
    """
    found, expected = {p.name for p in class_folders(folder)}, set(wanted)
    if found != expected:
        missing, foreign = sorted(expected - found), sorted(found - expected)
        raise InputError(
            f"{name}: {folder} does not hold the {len(expected)} classes of {whose}: "
            f"missing {', '.join(missing[:5]) or 'none'}{' ...' if len(missing) > 5 else ''} ({len(missing)}), "
            f"foreign {', '.join(foreign[:5]) or 'none'}{' ...' if len(foreign) > 5 else ''} ({len(foreign)})."
        )


def open_image(path: Path, channels: int) -> Image.Image:
    """One image, decoded, as RGB (3 channels) or gray (1).

    Raises:
        InputError: the file is not an image or is truncated.
    """
    try:
        with Image.open(path) as opened:
            return opened.convert("RGB" if channels == 3 else "L")
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise InputError(f"{path} cannot be read as an image: {error}.") from error


def class_images(root: Path, name: str) -> Iterator[tuple[str, list[Path]]]:
    """Every class folder below ``root`` with its images, class after class, sorted by name.

    Raises:
        InputError: no class folder below ``root``; a class folder without an image.
    """
    folders = class_folders(root)
    if not folders:
        raise InputError(f"{name}: {root} holds no class folders (expected {root}/<class>/<image>).")
    for folder in folders:
        files = image_files(folder)
        if not files:
            kinds = " ".join(sorted(IMAGE_SUFFIXES))
            raise InputError(f"{name}: class folder {folder} holds no images (looked for {kinds}).")
        yield folder.name, files


def read_image(path: Path, image_size: int, channels: int) -> np.ndarray:
    """One image as uint8 ``[channels, image_size, image_size]``; other sizes are resized (bilinear).

    Raises:
        InputError: the file is not an image or is truncated.
    """
    image = open_image(path, channels)
    if image.size != (image_size, image_size):
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def load_class_folders(root: Path, name: str, image_size: int, channels: int = 3) -> ImageSet:
    """Every image of every class folder below ``root``; labels follow the sorted class names.

    Raises:
        InputError: no class folder below ``root``; a class folder without an image; an unreadable image.
    """
    found = list(class_images(root, name))
    images = [read_image(file, image_size, channels) for _, files in found for file in files]
    labels = [label for label, (_, files) in enumerate(found) for _ in files]
    return ImageSet(torch.from_numpy(np.stack(images)), torch.tensor(labels), tuple(c for c, _ in found), name)
