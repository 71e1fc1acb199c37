"""A labelled set of small images in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swbn_lightning.errors import InputError


@dataclass(frozen=True)
class ImageSet:
    """Labelled images, all in memory.

    Args:
        images: uint8 ``[N, C, H, W]``, values 0 to 255.
        labels: int64 ``[N]``, each from 0 to ``num_classes - 1``.
        class_names: one name per class; label ``k`` means ``class_names[k]``.
        name: name of the data for messages and reports, e.g. ``"glyphs/train"``.
        source: description for the user of where the images come from: the files and, for a split made by this package,
            how it was made.
        content_id: for data that their class names do not tell from others: equal if the images are the same, in
            whatever size and place. Evaluations on other images are then not taken for the same test.

    Raises:
        ValueError: a wrong shape or dtype, different numbers of images and labels, or a label without a class name.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    name: str
    source: str = ""
    content_id: str = ""

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            found = f"{self.images.dtype} {list(self.images.shape)}"
            raise ValueError(f"{self.name}: images must be uint8 [N, C, H, W], got {found}")
        if self.labels.dtype != torch.int64 or self.labels.dim() != 1:
            found = f"{self.labels.dtype} {list(self.labels.shape)}"
            raise ValueError(f"{self.name}: labels must be int64 [N], got {found}")
        if len(self.labels) != len(self.images):
            raise ValueError(
                f"{self.name}: {len(self.images)} images but {len(self.labels)} labels; each image needs one label"
            )
        low, high = (int(self.labels.min()), int(self.labels.max())) if len(self.labels) else (0, 0)
        if low < 0 or high >= max(self.num_classes, 1):
            raise ValueError(
                f"{self.name}: labels run from {low} to {high}, "
                f"but {self.num_classes} class names allow 0 to {self.num_classes - 1}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, numbers: Tensor, name: str) -> ImageSet:
        """Select images by ``numbers`` (int64 ``[n]``), in that order, with the same class names."""
        return replace(self, images=take(self.images, numbers), labels=self.labels[numbers], name=name)

    @property
    def num_classes(self) -> int:
        """Number of classes, including those without images in the set."""
        return len(self.class_names)


def take(images: Tensor, numbers: Tensor) -> Tensor:
    """``images[numbers]`` for ``[N, C, H, W]`` and ``numbers [n]``, in the memory layout of ``images``.

    Copies whole images, or whole rows where images are windows of larger ones. Plain indexing copies pixel by pixel,
    which takes fifteen times as long.
    """
    if images.stride(1) == 1 and images.shape[1] > 1:  # channels_last
        return images.movedim(1, -1).index_select(0, numbers).movedim(-1, 1)
    return images.index_select(0, numbers)


def hold_out(labels: Tensor, name: str, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Numbers of the images to keep and of those to hold out, int64, each in rising order.

    The seed draws ``share`` (in [0, 1)) of the images of each class in ``labels [N]``, rounded. Both parts therefore
    have the same mixture of classes. A class never loses all its images.

    Raises:
        InputError: the share, which is the option ``name``, holds out no image.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[torch.argsort(labels[shuffled], stable=True)]
    counts = torch.bincount(labels)
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]
    quota = torch.minimum((counts.double() * share).round().long(), (counts - 1).clamp(min=0))
    held = rank < quota[labels[by_class]]
    if not held.any():
        classes = len(labels.unique())
        raise InputError(
            f"{name}={share} of {len(labels)} images in {classes} classes holds out none; take a larger share."
        )
    return by_class[~held].sort().values, by_class[held].sort().values
