"""Image files into uint8 arrays: one way for every kind of picture."""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from rich.progress import track
from torch import Tensor

from swbn_lightning.data.files import require_regular
from swbn_lightning.errors import InputError

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""What is read, by Pillow's names, whatever a file is called. (JPEG opens MPO too, which phones write into ``.jpg``.)
Others are not tried: for PostScript Pillow starts Ghostscript, a program that may do anything."""

MAX_PIXELS = 100_000_000
"""Images with more pixels are refused before they are decoded: a small file can unpack to gigabytes."""

MAX_PASSES = 20
"""How often a JPEG may go over ``MAX_PIXELS`` pixels, and over fewer accordingly more often. A progressive one does so
about ten times; a hostile one of 100 kB can do so for hours."""


def open_image(path: Path, channels: int) -> Image.Image:
    """One image, decoded, as RGB (3 channels) or gray (1).

    Turned upright where EXIF says that the camera was not, and as it is where EXIF cannot be read. Transparent pixels
    (RGBA, LA, a palette's) are laid over white, which is how viewers show them. 16 bits of grey become 8 by
    ``round(value / 257)``; of RGB, Pillow takes the high byte. Of an animation the first picture is taken.

    Raises:
        InputError: the file is not an image of one of ``FORMATS`` or no regular file, is truncated, holds more than
            ``MAX_PIXELS``, or values whose range nobody knows.
    """
    try:
        require_regular(path)
        with Image.open(path, formats=FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise InputError(_too_large(path, f"{opened.width}x{opened.height}"))
            if opened.format in ("JPEG", "MPO"):
                _require_few_scans(path, opened.width * opened.height)
            opened.load()  # what is broken in the pixels is an error, and in EXIF is not
            with contextlib.suppress(Exception):
                ImageOps.exif_transpose(opened, in_place=True)
            return _to_channels(opened, path, channels)
    except InputError:
        raise
    except Image.DecompressionBombError as error:  # Pillow's own limit, 179 million, which it checks first
        raise InputError(_too_large(path, str(error))) from error
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise InputError(f"{path} cannot be read as an image: it is none of {known}, or is broken.") from error
    except Exception as error:  # a broken file raises almost anything
        raise InputError(f"{path} cannot be read as an image: {error}.") from error


def read_image(path: Path, image_size: int, channels: int) -> np.ndarray:
    """One image as uint8 ``[channels, image_size, image_size]``.

    Other sizes are resized (bilinear with antialiasing); the aspect ratio is not kept, so that nothing is cut off.
    Errors as :func:`open_image`.
    """
    image = open_image(path, channels)
    if image.size != (image_size, image_size):
        image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def read_images(files: Sequence[Path], image_size: int, channels: int, name: str) -> Tensor:
    """All ``files`` as one uint8 tensor ``[N, channels, image_size, image_size]``.

    Decoded into their place, so that nothing is held twice. ``name`` is shown by a progress bar on a terminal.

    Raises:
        InputError: as :func:`open_image`, or no memory for so many images.
    """
    shape = (len(files), channels, image_size, image_size)
    try:
        images = np.empty(shape, dtype=np.uint8)
    except MemoryError as error:
        size = np.prod(shape, dtype=np.int64) / 1e9
        raise InputError(f"{name}: {len(files)} images of {image_size}x{image_size} need {size:.1f} GB.") from error
    screen = Console(stderr=True)
    bar = track(files, f"reading {name}", console=screen, transient=True, disable=not sys.stderr.isatty())
    for number, file in enumerate(bar):
        images[number] = read_image(file, image_size, channels)
    return torch.from_numpy(images)


def _to_channels(image: Image.Image, path: Path, channels: int) -> Image.Image:
    mode = "RGB" if channels == 3 else "L"
    if image.mode == "F":
        raise InputError(
            f"{path} cannot be read as an image: its values are floats, of which nobody knows the range; "
            "save it with 8 or 16 bits."
        )
    if image.mode.startswith("I"):  # "I;16" and its byte orders, or "I" where Pillow widened 16 bits
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise InputError(
                f"{path} cannot be read as an image: values from {values.min()} to {values.max()} do not fit 16 bits."
            )
        image = Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def _require_few_scans(path: Path, pixels: int) -> None:
    # Within a scan FF is never followed by DA: the marker counts the scans, and those of a thumbnail.
    scans, rest = 0, b""
    with path.open("rb") as file:
        while content := file.read(2**20):
            scans += (rest + content).count(b"\xff\xda")
            rest = content[-1:]
            if scans * pixels > MAX_PASSES * MAX_PIXELS:
                raise InputError(f"{path} is too large to read: it goes {scans} times over its {pixels} pixels.")


def _too_large(path: Path, found: str) -> str:
    return f"{path} is too large to read ({found}): at most {MAX_PIXELS // 10**6} megapixels are accepted."
