"""CIFAR-100 as torchvision lays it out: ``cifar-100-python/{train,test,meta}``.

Read here rather than through torchvision, which checks MD5 sums that a re-encoded copy cannot have, and
unpickles without restriction. The structure is checked instead.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swbn_lightning.errors import InputError
from swbn_lightning.safe_pickle import load_pickle

CIFAR100_FILES = ("train", "test", "meta")


def is_cifar100(folder: Path) -> bool:
    """Whether ``folder`` holds CIFAR-100's three files."""
    return all((folder / name).is_file() for name in CIFAR100_FILES)


def read_cifar100(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[N, 3, 32, 32]`` and fine labels int64 ``[N]`` of ``part`` ("train" or "test").

    Raises:
        InputError: the file is missing or is not CIFAR-100's.
    """
    path = folder / part
    content = load_pickle(path)
    if not isinstance(content, dict) or not {"data", "fine_labels"} <= content.keys():
        raise InputError(f"{path} is not a CIFAR-100 file: it has no 'data' and 'fine_labels'.")
    data, labels = np.asarray(content["data"]), np.asarray(content["fine_labels"])
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072 or labels.shape != data.shape[:1]:
        raise InputError(
            f"{path} is not a CIFAR-100 file: expected uint8 data [N, 3072] with N labels, "
            f"got {data.dtype} {list(data.shape)} with labels {list(labels.shape)}."
        )
    return torch.from_numpy(data.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(labels.astype(np.int64))


def cifar100_class_names(folder: Path) -> tuple[str, ...]:
    """The 100 fine class names in the order of their labels.

    Raises:
        InputError: the file is missing or is not CIFAR-100's.
    """
    content = load_pickle(folder / "meta")
    names = content.get("fine_label_names") if isinstance(content, dict) else None
    if not isinstance(names, list) or len(names) != 100:
        raise InputError(f"{folder / 'meta'} is not CIFAR-100's: expected 100 'fine_label_names'.")
    return tuple(str(name) for name in names)
