"""MNIST and the sets in its form: four files of unsigned bytes in the IDX format, plain or packed by gzip.

The format: two zero bytes, a type, the number of dimensions, each dimension as four bytes with the highest first, then
the values, last dimension fastest (the description at the end of LeCun, Cortes & Burges, "The MNIST database of
handwritten digits"). Read here rather than through torchvision, which reads only plain files and fails on a truncated
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

from swbn_lightning.data.files import open_regular
from swbn_lightning.errors import InputError

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
"""Of the 60,000 training images' pixels in [0, 1]: 0.13066 and 0.30811, as computed from the original files."""

FASHION_MNIST_MEAN, FASHION_MNIST_STD = 0.2860, 0.3530
"""Likewise of Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017): 0.28604 and 0.35302."""

MAX_VALUES = 2**31
"""Values in a file, four times as many as the largest set of this form has (EMNIST "by class", 547 million)."""

_UNSIGNED_BYTES = 8  # the type
_MAX_DIMENSIONS = 32
_GZIP_RATIO = 1032  # more than which deflate cannot pack (zlib's technical notes)


def read_idx(path: Path) -> np.ndarray:
    """The values of an IDX file, uint8: the header is read first, then no more than it says.

    Raises:
        InputError: a file that cannot be read, that is not of this format, that is shorter or longer than it says, or
            that says more than it can hold or than ``MAX_VALUES``.
    """
    packed = path.suffix == ".gz"
    try:
        with open_regular(path) as plain, gzip.open(plain) if packed else plain as file:
            head = file.read(4)
            dimensions = head[3] if len(head) == 4 else 0
            lengths = file.read(4 * dimensions) if dimensions <= _MAX_DIMENSIONS else b""
            if head[:3] != bytes([0, 0, _UNSIGNED_BYTES]) or not dimensions or len(lengths) < 4 * dimensions:
                raise InputError(f"{path} is not an IDX file of unsigned bytes.")
            shape = struct.unpack(f">{dimensions}I", lengths)
            count = math.prod(shape)
            most = min(MAX_VALUES, path.stat().st_size * (_GZIP_RATIO if packed else 1))
            content = file.read(count + 1) if count <= most else b""
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error
    should = f"it should hold {'x'.join(map(str, shape))} values"
    if count > most:
        raise InputError(f"{path} is not whole: {should}, but cannot hold more than {most}.")
    if len(content) != count:
        raise InputError(
            f"{path} is not whole: {should}, but holds {len(content) if len(content) < count else 'more'}."
        )
    return np.frombuffer(bytearray(content), np.uint8).reshape(shape)


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
    return torch.from_numpy(pixels)[:, None], torch.from_numpy(classes.astype(np.int64))
