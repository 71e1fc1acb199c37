"""Images on their way to the device: the part that the data modules of both trainings share."""

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
    """A split's images in a given order; a whole batch is gathered at once."""

    def __init__(self, images: Tensor, order: Tensor) -> None:
        self.images, self.order = images, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitems__(self, positions: list[int]) -> ImageBatch:
        numbers = self.order[positions]
        return ImageBatch(numbers, self.images[numbers])


def as_is(batch: Any) -> Any:
    """Collate function for data sets that return whole batches."""
    return batch


class ImageDataModule(pl.LightningDataModule):
    """Base of the data modules: splits in memory as uint8; the device converts, augments and normalises batches.

    A subclass defines :meth:`load` and the loaders, and processes its batches in :meth:`on_after_batch_transfer`.
    """

    #: Side of the (square) images in pixels; a subclass that sets it has too small ones refused before training.
    image_size: int
    #: Processes that prepare batches; 0 is fast enough for images in memory.
    num_workers: int = 0
    #: The images that ``predict`` names, as they are shown; by the numbers in its batches.
    query_files: tuple[str, ...] = ()

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
        """Number of channels of the images."""
        return len(self._mean)

    @property
    def has_validation(self) -> bool:
        """Whether there are validation images, which can select a checkpoint."""
        return True

    def load(self, split: str) -> ImageSet:
        """Read a split (``"train"``, ``"val"`` or ``"test"``); :meth:`image_set` keeps it."""
        raise InputError(f"{type(self).__name__} reads images one by one; its {split} split is not in memory.")

    def image_set(self, split: str) -> ImageSet:
        """Return a split, read at first use."""
        if split not in self._sets:
            self._sets[split] = self.load(split)
        return self._sets[split]

    def facts(self) -> dict[str, Any]:
        """What a card tells of the data, as plain values: image size, normalisation, and the splits read so far.

        Of a split: its name, the number of its images and the names of its classes; no paths.
        """
        return {
            "image_size": getattr(self, "image_size", None),
            "mean": list(self._mean),
            "std": list(self._std),
            "splits": {
                split: {"name": own.name, "images": len(own), "classes": list(own.class_names)}
                for split, own in self._sets.items()
            },
        }

    def normalize(self, images: Tensor) -> Tensor:
        """Convert uint8 ``[..., C, H, W]`` to float: ``(x / 255 - mean) / std`` per channel, in the same layout."""
        mean, std = self._statistics(images)
        return (images / 255).sub_(mean).div_(std)

    def _statistics(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation at every pixel, ``[C, H, W]``, on the device and in the layout of the images.

        With these, normalisation reads memory once per batch. They are kept, because a copy to a GPU waits for it.
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
        """Crop, flip, normalise and erase a training batch of uint8 images ``[N, C, H, W]`` on their device.

        Erasing comes last, so that rectangles get the mean colour, which is 0 after normalisation. ``crops`` and
        ``erased`` are the results of ``augment.draw`` and ``erasing.draw``, or None to skip the step.
        """
        images = self.normalize(images if crops is None else self.augment.apply(images, crops))
        return images if erased is None else self.erasing.apply(images, erased)

    @property
    def processes(self) -> tuple[int, int]:
        """Number of training processes, and the rank of this one."""
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer is not None else (1, 0)

    def loader(
        self, dataset: Dataset[Any], batch_size: int, kind: type[StayingLoader] = StayingLoader, **options: Any
    ) -> DataLoader[Any]:
        """Create a loader for a data set that returns whole batches; ``options`` as for ``DataLoader``."""
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
        """Return a fixed random sample of a split, normalised: float ``[min(count, N), C, H, W]`` on the CPU."""
        images = self.image_set(split).images
        generator = torch.Generator().manual_seed(seed)
        return self.normalize(images[torch.randperm(len(images), generator=generator)[:count]])
