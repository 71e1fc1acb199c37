"""Images on their way to the device: what the data modules of both trainings share."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor

from swbn_lightning.data import ImageSet
from swbn_lightning.data.augment import CropFlip


class ImageBatch(NamedTuple):
    """Images with their numbers in the split; ``images`` is uint8 until it reaches the device."""

    numbers: Tensor  # [B] int64
    images: Tensor  # [B, C, H, W]


class ImageDataset(torch.utils.data.Dataset[ImageBatch]):
    """A split image by image, in a given order; a whole batch is one gather."""

    def __init__(self, image_set: ImageSet, order: Tensor | None = None) -> None:
        self.image_set = image_set
        self.order = torch.arange(len(image_set)) if order is None else order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> ImageBatch:
        return self.__getitems__([position])

    def __getitems__(self, positions: list[int]) -> ImageBatch:
        numbers = self.order[positions]
        return ImageBatch(numbers, self.image_set.images[numbers])


def as_is(batch: Any) -> Any:
    """Collate function for data sets that hand out whole batches."""
    return batch


class ImageDataModule(pl.LightningDataModule, ABC):
    """Splits in memory as uint8, made float, augmented and normalised on the device that trains.

    A subclass gives :meth:`load` and the loaders, and says in :meth:`on_after_batch_transfer` what becomes of
    its batches.
    """

    #: Side of the (square) images in pixels; a subclass that sets it has too small ones refused before training.
    image_size: int

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], augment: CropFlip) -> None:
        super().__init__()
        self.augment = augment
        self._mean, self._std = mean, std
        self._sets: dict[str, ImageSet] = {}
        self._per_pixel: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return len(self._mean)

    @property
    def has_validation(self) -> bool:
        """Whether there are images to validate on, and so to choose a checkpoint by."""
        return True

    @abstractmethod
    def load(self, split: str) -> ImageSet:
        """Read a split (``"train"``, ``"val"`` or ``"test"``); :meth:`image_set` keeps it."""

    def image_set(self, split: str) -> ImageSet:
        """A split, read at first use."""
        if split not in self._sets:
            self._sets[split] = self.load(split)
        return self._sets[split]

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 ``[..., C, H, W]`` to float: ``(x / 255 - mean) / std`` per channel, in the same layout."""
        mean, std = self._statistics(images)
        return (images / 255).sub_(mean).div_(std)

    def _statistics(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation at every pixel ``[C, H, W]``, on the images' device and in their layout.

        Whole images, so that a pass over a batch is one run through memory; kept, because a copy to a GPU waits for it.
        """
        shape, channels_last = images.shape[-3:], images.stride(-3) == 1
        key = (images.device, shape, channels_last)
        if key not in self._per_pixel:
            layout = torch.channels_last if channels_last else torch.contiguous_format
            values = torch.tensor([self._mean, self._std], device=images.device)[:, :, None, None]
            mean, std = values.expand(2, *shape).contiguous(memory_format=layout)
            self._per_pixel[key] = mean, std
        return self._per_pixel[key]

    def sample_images(self, count: int, split: str = "val", seed: int = 0) -> Tensor:
        """A fixed random sample of a split, normalised: float ``[min(count, N), C, H, W]`` on the CPU."""
        images = self.image_set(split).images
        generator = torch.Generator().manual_seed(seed)
        return self.normalize(images[torch.randperm(len(images), generator=generator)[:count]])
