"""CIFAR-10 and CIFAR-100 as torchvision lays them out: ``cifar-10-batches-py/`` and ``cifar-100-python/``.

Read here rather than through torchvision, which checks MD5 sums that a re-encoded copy cannot have, and
unpickles without restriction. The structure is checked instead; a missing file, or one of another kind, is an
:class:`~swbn_lightning.errors.InputError`.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from swbn_lightning.data.arrays import as_array, text_from
from swbn_lightning.data.safe_pickle import load_pickle
from swbn_lightning.errors import InputError

CIFAR10_BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
CIFAR10_FILES = (*CIFAR10_BATCHES["train"], *CIFAR10_BATCHES["test"], "batches.meta")
CIFAR100_FILES = ("train", "test", "meta")

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the 50,000 training images' pixels in [0, 1], per channel, as computed from the original images."""

CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4866, 0.4409), (0.2673, 0.2564, 0.2762)
"""Likewise of CIFAR-100."""


def read_cifar10(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[N, 3, 32, 32]`` and labels int64 ``[N]`` of ``part`` ("train", five files, or "test")."""
    batches = [_read_batch(folder / name, "CIFAR-10", "labels", 10) for name in CIFAR10_BATCHES[part]]
    images, labels = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    return images, labels


def read_cifar100(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images uint8 ``[N, 3, 32, 32]`` and fine labels int64 ``[N]`` of ``part`` ("train" or "test")."""
    return _read_batch(folder / part, "CIFAR-100", "fine_labels", 100)


def cifar10_class_names(folder: Path) -> tuple[str, ...]:
    """The 10 class names in the order of their labels."""
    return _read_names(folder / "batches.meta", "CIFAR-10", "label_names", 10)


def cifar100_class_names(folder: Path) -> tuple[str, ...]:
    """The 100 fine class names in the order of their labels."""
    return _read_names(folder / "meta", "CIFAR-100", "fine_label_names", 100)


def _read_batch(path: Path, dataset: str, key: str, num_classes: int) -> tuple[Tensor, Tensor]:
    content = load_pickle(path)
    if not isinstance(content, dict) or not {"data", key} <= content.keys():
        raise InputError(f"{path} is not a {dataset} file: it has no 'data' and '{key}'.")
    data, labels = as_array(content["data"]), as_array(content[key])
    shaped = data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == 3072 and labels.shape == data.shape[:1]
    if not shaped or labels.dtype.kind not in "iu" or not len(data):
        raise InputError(
            f"{path} is not a {dataset} file: expected uint8 data [N, 3072] with N whole labels, "
            f"got {data.dtype} {list(data.shape)} with {labels.dtype} labels {list(labels.shape)}."
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise InputError(
            f"{path} is not a {dataset} file: labels run from {labels.min()} to {labels.max()}, "
            f"not from 0 to {num_classes - 1}."
        )
    return torch.from_numpy(data.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(labels.astype(np.int64))


def _read_names(path: Path, dataset: str, key: str, count: int) -> tuple[str, ...]:
    content = load_pickle(path)
    names = content.get(key) if isinstance(content, dict) else None
    if not isinstance(names, list) or len(names) != count:
        raise InputError(f"{path} is not {dataset}'s: expected {count} '{key}'.")
    return tuple(text_from(name, path) for name in names)
