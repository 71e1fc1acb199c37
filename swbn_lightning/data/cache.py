"""Decoded images kept on disk, so that the next run need not decode them."""

import glob
import hashlib
import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swbn_lightning.data.decode import read_images
from swbn_lightning.files.reading import printable
from swbn_lightning.files.writing import replacing

CACHE_FOLDER = ".swbn_cache"
"""Below a data set's root, unless another folder is named."""

_FORMAT = 1  # raised when the same files would decode to other pixels


class ImageCache:
    """Decoded splits as ``.npy`` files, which hold only numbers: loading one runs no code.

    A file is named for the data, the image size and the channels, and by a digest of the path below the root, the size
    and the time of change of every image file. So another picture, one more or one less is noticed without reading
    any; a file rewritten in place with the same size *and* an old time is not. Files are written whole or not at all;
    several processes may do so at once. What cannot be written is said in a warning, and the run goes on.

    Args:
        folder: where the files go; made when the first is written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def images(self, files: Sequence[Path], root: Path, image_size: int, channels: int, name: str) -> Tensor:
        """As :func:`~swbn_lightning.data.decode.read_images`, from the cache where it holds just these.

        ``root`` is a folder above all files; files of the cache with another ``name``, as ``"cub/train"``, are left
        alone.
        """
        if self.folder.name == CACHE_FOLDER and self.folder.is_symlink():  # files would be written and deleted anywhere
            warnings.warn(
                f"{name}: {printable(self.folder)} is a link, which may have come with the data, and is not used as "
                "the cache. Name the folder to use (--data.cache_dir DIR).",
                stacklevel=2,
            )
            return read_images(files, image_size, channels, name)
        stem = f"{name.replace('/', '-')}-{image_size}x{channels}-"
        path = self.folder / f"{stem}{_digest(files, root)}.npy"
        shape = (len(files), channels, image_size, image_size)
        if path.is_file():
            try:
                return _read(path, shape)
            except (OSError, ValueError) as error:
                warnings.warn(
                    f"{name}: the cache {printable(path)} is broken ({error}) and is made anew.",
                    stacklevel=2,
                )
        found = (p for p in self.folder.glob(f"{glob.escape(stem)}*.npy") if p != path)
        stale = sorted(p for p in found if p.is_file() and not p.is_symlink())
        if stale:
            warnings.warn(
                f"{name}: the images are not those of the cache {printable(stale[0])} any more; it is made anew.",
                stacklevel=2,
            )
        images = read_images(files, image_size, channels, name)
        self._write(path, images, stale, name)
        return images

    def _write(self, path: Path, images: Tensor, stale: Sequence[Path], name: str) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                np.save(file, images.numpy(), allow_pickle=False)
            for old in stale:
                old.unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(
                f"{name}: the cache cannot be written to {printable(self.folder)} ({error.strerror or error}): the "
                "images will be decoded again by the next run. Name another folder (--data.cache_dir DIR).",
                stacklevel=3,
            )


def _digest(files: Sequence[Path], root: Path) -> str:
    digest = hashlib.sha256(str(_FORMAT).encode())
    for file in files:
        found = file.stat()
        # A name cannot hold a zero byte, so that no two lists of files give the same bytes.
        # Names that are not UTF-8 come with surrogates, which only their own way back turns into bytes.
        digest.update(b"\0" + os.fsencode(file.relative_to(root).as_posix()))
        digest.update(f"\0{found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _read(path: Path, shape: tuple[int, ...]) -> Tensor:
    # The header is known; numpy would evaluate one that somebody spoilt, and allocate what it says.
    expected = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    with path.open("rb") as file:
        start = file.read(10)  # magic string, version, length of the header
        length = int.from_bytes(start[8:], "little")
        good = start[:8] == b"\x93NUMPY\x01\x00" and file.read(length).strip() == expected
    if not good or path.stat().st_size != 10 + length + math.prod(shape):
        raise ValueError(f"it does not hold {list(shape)} bytes")
    return torch.from_numpy(np.fromfile(path, np.uint8, offset=10 + length).reshape(shape))
