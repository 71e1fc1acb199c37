"""MNIST and the sets in its form: four files of unsigned bytes in the IDX format, plain or packed by gzip.

The format: two zero bytes, a type, the number of dimensions, each dimension as four bytes with the highest first, then
the values, last dimension fastest (the description at the end of LeCun, Cortes & Burges, "The MNIST database of
handwritten digits"). Read here rather than through torchvision, which reads plain files alone and fails on a truncated
one with an assertion.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swbn_lightning.errors import InputError

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
"""Of the 60,000 training images' pixels in [0, 1]: 0.13066 and 0.30811, as computed from the original files."""

FASHION_MNIST_MEAN, FASHION_MNIST_STD = 0.2860, 0.3530
"""Likewise of Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017): 0.28604 and 0.35302."""

_UNSIGNED_BYTES = 8  # the type


def read_idx(path: Path) -> np.ndarray:
    """The values of an IDX file, uint8.

    Raises:
        InputError: a file that cannot be read, that is not of this format, or that is shorter or longer than it says.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    dimensions = content[3] if len(content) >= 4 else 0
    start = 4 + 4 * dimensions
    if content[:3] != bytes([0, 0, _UNSIGNED_BYTES]) or not dimensions or len(content) < start:
        raise InputError(f"{path} is not an IDX file of unsigned bytes.")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise InputError(
            f"{path} is not whole: it should hold {'x'.join(map(str, shape))} values after the first {start} bytes, "
            f"but holds {len(content) - start}."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_idx_images(images: Path, labels: Path, num_classes: int = 10) -> tuple[Tensor, Tensor]:
    """Gray images uint8 ``[N, 1, 28, 28]`` and labels int64 ``[N]``.

    Raises:
        InputError: as :func:`read_idx`; another shape; numbers of images and labels that differ; a label that names no
            class.
    """
    pixels, classes = read_idx(images), read_idx(labels)
    if pixels.ndim != 3 or pixels.shape[1:] != (28, 28) or not len(pixels):
        raise InputError(f"{images} should hold images of 28x28 pixels, but holds {list(pixels.shape)}.")
    if classes.shape != pixels.shape[:1]:
        raise InputError(f"{labels} should hold a label for each of {len(pixels)} images, has {list(classes.shape)}.")
    if classes.max() >= num_classes:
        raise InputError(f"{labels} holds the label {classes.max()}; labels run from 0 to {num_classes - 1}.")
    return torch.from_numpy(pixels.copy())[:, None], torch.from_numpy(classes.astype(np.int64))
