"""A labelled set of small images that lies in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageSet:
    """Images with their labels, all in memory.

    Args:
        images: uint8 ``[N, C, H, W]``, values 0 to 255.
        labels: int64 ``[N]``, each from 0 to ``num_classes - 1``.
        class_names: one name a class; label ``k`` means ``class_names[k]``.
        name: which data these are, for messages and reports, e.g. ``"glyphs/train"``.

    Raises:
        ValueError: if a shape or dtype is another one, or a label names no class.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    name: str

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            raise ValueError(f"{self.name}: images must be uint8 [N, C, H, W], got {_describe(self.images)}")
        if self.labels.dtype != torch.int64 or self.labels.dim() != 1:
            raise ValueError(f"{self.name}: labels must be int64 [N], got {_describe(self.labels)}")
        if len(self.labels) != len(self.images):
            raise ValueError(
                f"{self.name}: {len(self.images)} images but {len(self.labels)} labels; each image needs one label"
            )
        self._check_label_range()

    def _check_label_range(self) -> None:
        if len(self.labels) == 0:
            return
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.num_classes:
            raise ValueError(
                f"{self.name}: labels run from {low} to {high}, "
                f"but {self.num_classes} class names allow 0 to {self.num_classes - 1}"
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        """Number of classes, also those of which no image is in the set."""
        return len(self.class_names)

    @property
    def channels(self) -> int:
        """Number of colour channels: 1 for gray, 3 for RGB."""
        return self.images.shape[1]


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
