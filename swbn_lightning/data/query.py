"""Images that ``predict`` names: a folder, or one image."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from swbn_lightning.data.files import require_regular
from swbn_lightning.data.folders import image_files
from swbn_lightning.data.image_data import ImageBatch
from swbn_lightning.errors import InputError


def query_files(query: str) -> list[Path]:
    """The images in the folder ``query``, sorted by name, or that one image.

    Raises:
        InputError: nothing there, no regular file, or a folder without images.
    """
    path = Path(query).expanduser()
    if not path.exists():
        raise InputError(f"predict: query {path} does not exist.")
    if not path.is_dir():
        require_regular(path)
        return [path]
    files = image_files(path)
    if not files:
        raise InputError(f"predict: query folder {path} holds no images.")
    return files


def shown_names(files: Sequence[Path]) -> tuple[str, ...]:
    """Paths as texts; bytes that are not UTF-8, which can be opened but not printed, as escapes."""
    return tuple(os.fsencode(file).decode(errors="backslashreplace") for file in files)


class QueryDataset(Dataset[ImageBatch]):
    """Image files, each read when it is needed; ``read`` makes uint8 ``[C, H, W]`` of one."""

    def __init__(self, files: Sequence[Path], read: Callable[[Path], Tensor]) -> None:
        self.files, self.read = files, read

    def __len__(self) -> int:
        return len(self.files)

    def __getitems__(self, numbers: list[int]) -> ImageBatch:
        return ImageBatch(torch.tensor(numbers), torch.stack([self.read(self.files[number]) for number in numbers]))
