"""Class folders, ``<class>/<image>``, into memory."""

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


def read_image(path: Path, image_size: int, channels: int) -> np.ndarray:
    """One image as uint8 ``[channels, image_size, image_size]``; other sizes are resized (bilinear).

    Raises:
        InputError: the file is not an image or is truncated.
    """
    try:
        with Image.open(path) as opened:
            image = opened.convert("RGB" if channels == 3 else "L")
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise InputError(f"{path} cannot be read as an image: {error}.") from error
    if image.size != (image_size, image_size):
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def load_class_folders(root: Path, name: str, image_size: int, channels: int = 3) -> ImageSet:
    """Every image of every class folder below ``root``; labels follow the sorted class names.

    Raises:
        InputError: no class folder below ``root``; a class folder without an image; an unreadable image.
    """
    folders = class_folders(root)
    if not folders:
        raise InputError(f"{name}: {root} holds no class folders (expected {root}/<class>/<image>).")
    images, labels = [], []
    for label, folder in enumerate(folders):
        files = image_files(folder)
        if not files:
            kinds = " ".join(sorted(IMAGE_SUFFIXES))
            raise InputError(f"{name}: class folder {folder} holds no images (looked for {kinds}).")
        images += [read_image(file, image_size, channels) for file in files]
        labels += [label] * len(files)
    return ImageSet(torch.from_numpy(np.stack(images)), torch.tensor(labels), tuple(f.name for f in folders), name)
