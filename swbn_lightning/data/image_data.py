"""Images on their way to the device: what the data modules of both trainings share."""

from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from swbn_lightning.data import ImageSet
from swbn_lightning.data.augment import CropFlip, RandomErasing
from swbn_lightning.data.workers import StayingLoader
from swbn_lightning.errors import InputError

SPLITS = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ()}
"""The splits that each of Lightning's stages reads."""


class ImageBatch(NamedTuple):
    """Images with their numbers in the split; ``images`` is uint8 until it reaches the device."""

    numbers: Tensor  # [B] int64
    images: Tensor  # [B, C, H, W]


class ImageDataset(torch.utils.data.Dataset[ImageBatch]):
    """A split's images in a given order; a whole batch is one gather."""

    def __init__(self, images: Tensor, order: Tensor) -> None:
        self.images, self.order = images, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitems__(self, positions: list[int]) -> ImageBatch:
        numbers = self.order[positions]
        return ImageBatch(numbers, self.images[numbers])


def as_is(batch: Any) -> Any:
    """Collate function for data sets that hand out whole batches."""
    return batch


class ImageDataModule(pl.LightningDataModule):
    """Splits in memory as uint8, made float, augmented and normalised on the device that trains.

    A subclass gives :meth:`load` and the loaders, and says in :meth:`on_after_batch_transfer` what becomes of
    its batches.
    """

    #: Side of the (square) images in pixels; a subclass that sets it has too small ones refused before training.
    image_size: int
    #: Processes that prepare batches; 0 is fast enough for images in memory.
    num_workers: int = 0

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], augment: CropFlip, erasing: float = 0.0
    ) -> None:
        super().__init__()
        self.augment, self.erasing = augment, RandomErasing(erasing)
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

    def load(self, split: str) -> ImageSet:
        """Read a split (``"train"``, ``"val"`` or ``"test"``); :meth:`image_set` keeps it."""
        raise InputError(f"{type(self).__name__} reads images one by one; the {split} split is in memory nowhere.")

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
        """Mean and deviation at every pixel ``[C, H, W]``, on the images' device and in their layout: one run through
        memory a batch; kept, because a copy to a GPU waits for it.
        """
        shape, channels_last = images.shape[-3:], images.stride(-3) == 1
        key = (images.device, shape, channels_last)
        if key not in self._per_pixel:
            layout = torch.channels_last if channels_last else torch.contiguous_format
            values = torch.tensor([self._mean, self._std], device=images.device)[:, :, None, None]
            mean, std = values.expand(2, *shape).contiguous(memory_format=layout)
            self._per_pixel[key] = mean, std
        return self._per_pixel[key]

    def prepare(self, images: Tensor, crops: Tensor | None = None, erased: Tensor | None = None) -> Tensor:
        """A training batch's uint8 images ``[N, C, H, W]`` on their device: cropped and flipped, normalised, erased in.

        In this order, so that erased rectangles get the mean colour, which is 0 then. ``crops`` and ``erased`` are what
        ``augment.draw`` and ``erasing.draw`` gave, or None for nothing to do.
        """
        images = self.normalize(images if crops is None else self.augment.apply(images, crops))
        return images if erased is None else self.erasing.apply(images, erased)

    @property
    def processes(self) -> tuple[int, int]:
        """How many processes train, and which one this is."""
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer is not None else (1, 0)

    def loader(
        self, dataset: Dataset[Any], batch_size: int, kind: type[StayingLoader] = StayingLoader, **options: Any
    ) -> DataLoader[Any]:
        """A loader of a data set that hands out whole batches by ``__getitems__``; ``options`` as ``DataLoader``."""
        return kind(
            dataset,
            batch_size=batch_size,
            collate_fn=as_is,
            generator=torch.Generator(),  # DataLoader would draw from the process's stream
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
            **options,
        )

    def sample_images(self, count: int, split: str = "val", seed: int = 0) -> Tensor:
        """A fixed random sample of a split, normalised: float ``[min(count, N), C, H, W]`` on the CPU."""
        images = self.image_set(split).images
        generator = torch.Generator().manual_seed(seed)
        return self.normalize(images[torch.randperm(len(images), generator=generator)[:count]])
