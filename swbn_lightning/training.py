"""What both trainings share: optimiser and schedule, the backbone, the images' way to the device."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from pytorch_lightning.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MeanMetric

from swbn_lightning.backbones import Backbone, build_backbone
from swbn_lightning.data import ImageSet
from swbn_lightning.data.augment import CropFlip
from swbn_lightning.errors import InputError, unknown_name
from swbn_lightning.norms import named_norms
from swbn_lightning.norms.base import WhiteningNorm

INTERVALS = ("epoch", "step")


class TrainingModule(pl.LightningModule):
    """A LightningModule with a backbone whose normalisation layers come from the factory.

    A subclass sets its head and defines :meth:`training_loss` and evaluation. Arguments are plain data, so
    that a checkpoint holds them and loads without running code.

    Args:
        backbone: a name from :func:`~swbn_lightning.backbones.available_backbones`; or, in Python, a
            :class:`~swbn_lightning.backbones.Backbone`, which then is not saved with the hyperparameters.
        norm: a name from :meth:`~swbn_lightning.NormFactory.names`.
        norm_args: options of the norm, as ``{step_size: 0.001}``.
        backbone_args: options of the backbone, as ``{in_channels: 1}``.
        optimizer: makes the optimiser from the parameters.
        lr_scheduler: makes the schedule from the optimiser; None for a constant rate.
        lr_interval: what the schedule counts, ``"epoch"`` or ``"step"``.
        warmup_steps: the rate rises linearly over so many steps; 0 for none.
        channels_last: run the backbone in channels_last layout, in which the whitening layers copy nothing
            (a ResNet-20 step on two CPU cores: 1.2 to 1.3 times as fast, whichever norm).

    Raises:
        InputError: an unknown name or option; options for a backbone that is given whole; a negative warm-up.
    """

    head: nn.Module

    def __init__(
        self,
        backbone: str | Backbone = "resnet12",
        norm: str = "bn",
        norm_args: dict[str, Any] | None = None,
        backbone_args: dict[str, Any] | None = None,
        optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=1e-3),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: str = "epoch",
        warmup_steps: int = 0,
        channels_last: bool = True,
    ) -> None:
        super().__init__()
        if lr_interval not in INTERVALS:
            raise unknown_name("lr_interval", lr_interval, INTERVALS)
        if warmup_steps < 0:
            raise InputError(f"warmup_steps must be at least 0, got {warmup_steps}.")
        given = isinstance(backbone, nn.Module)
        self.save_hyperparameters(ignore=["optimizer", "lr_scheduler", *(["backbone"] if given else [])])
        self.backbone = _resolve_backbone(backbone, norm, norm_args, backbone_args)
        if channels_last:
            self.backbone = self.backbone.to(memory_format=torch.channels_last)
        self.channels_last = channels_last
        self._optimizer, self._lr_scheduler = optimizer, lr_scheduler
        self._lr_interval, self._warmup_steps = lr_interval, warmup_steps
        self.train_loss, self.train_accuracy = MeanMetric(), MeanMetric()
        #: What the last evaluation of each split gave, for tables and files; plain data.
        self.results: dict[str, dict[str, Any]] = {}

    def training_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss to minimise and the accuracy (fraction) of one batch."""
        raise NotImplementedError

    def embed(self, images: Tensor) -> Tensor:
        """Features ``[N, C]`` of images ``[N, in_channels, H, W]``."""
        images = images.to(next(self.backbone.parameters()).dtype)  # precision: bf16-true and the like
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.backbone(images)

    def forward(self, images: Tensor) -> Tensor:
        return self.embed(images)

    def setup(self, stage: str) -> None:
        data = self.image_data
        if data.channels != self.backbone.in_channels:
            raise InputError(
                f"the images have {data.channels} channel(s), but the backbone takes {self.backbone.in_channels}: "
                f"set backbone_args: {{in_channels: {data.channels}}}."
            )
        size = getattr(data, "image_size", None)
        if size is not None:
            self.backbone.check_image_size(size, size)

    @property
    def image_data(self) -> "ImageDataModule":
        """The trainer's data module."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, ImageDataModule):
            raise InputError(
                f"{type(self).__name__} needs one of this package's data modules, as in "
                f"trainer.fit(model, datamodule=...); got {type(data).__name__}."
            )
        return data

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, accuracy = self.training_loss(batch)
        self.train_loss.update(loss.detach())
        self.train_accuracy.update(accuracy)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True)
        self.log("train/accuracy", self.train_accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        try:
            return self._configure_optimizers()
        except (ValueError, TypeError) as error:  # torch checks rates and numbers there
            raise InputError(f"optimizer or lr_scheduler cannot be made: {error}") from error

    def _configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self._optimizer(p for p in self.parameters() if p.requires_grad)
        schedulers: list[Any] = []
        if self._warmup_steps:
            warmup = torch.optim.lr_scheduler.LinearLR(
                optimizer, start_factor=1 / (self._warmup_steps + 1), total_iters=self._warmup_steps
            )
            schedulers.append({"scheduler": warmup, "interval": "step", "name": "lr-warmup"})
        if self._lr_scheduler is not None:
            scheduler = self._lr_scheduler(optimizer)
            entry: dict[str, Any] = {"scheduler": scheduler, "interval": self._lr_interval}
            if isinstance(scheduler, ReduceLROnPlateau):
                entry["monitor"] = scheduler.monitor
            schedulers.append(entry)
        return [optimizer], schedulers


def _resolve_backbone(
    backbone: str | Backbone,
    norm: str,
    norm_args: Mapping[str, Any] | None,
    backbone_args: Mapping[str, Any] | None,
) -> Backbone:
    if isinstance(backbone, str):
        return build_backbone(backbone, norm, norm_args, **(backbone_args or {}))
    if norm_args or backbone_args:
        raise InputError("norm_args and backbone_args are for a backbone given by name; this one is built already.")
    return backbone


def check_running_statistics(model: nn.Module) -> None:
    """Raise if an image's features in evaluation mode would depend on the images beside it.

    Raises:
        InputError: a batch normalisation without running statistics, by name.
    """
    for name, layer in named_norms(model):
        by_batch = isinstance(layer, WhiteningNorm | nn.modules.batchnorm._BatchNorm)
        if by_batch and layer.running_mean is None:
            raise InputError(
                f"{name} ({type(layer).__name__}) keeps no running statistics, so it would normalise test "
                "images by the batch they happen to be in; evaluation embeds each image by itself. "
                "Leave out track_running_stats: false."
            )


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

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return len(self._mean)

    @abstractmethod
    def load(self, split: str) -> ImageSet:
        """Read a split (``"train"``, ``"val"`` or ``"test"``); :meth:`image_set` keeps it."""

    def image_set(self, split: str) -> ImageSet:
        """A split, read at first use."""
        if split not in self._sets:
            self._sets[split] = self.load(split)
        return self._sets[split]

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 ``[..., C, H, W]`` to float: ``(x / 255 - mean) / std`` per channel."""
        mean = torch.tensor(self._mean, device=images.device).view(-1, 1, 1)
        std = torch.tensor(self._std, device=images.device).view(-1, 1, 1)
        return (images / 255 - mean) / std

    def sample_images(self, count: int, split: str = "val", seed: int = 0) -> Tensor:
        """A fixed random sample of a split, normalised: float ``[min(count, N), C, H, W]`` on the CPU."""
        images = self.image_set(split).images
        generator = torch.Generator().manual_seed(seed)
        return self.normalize(images[torch.randperm(len(images), generator=generator)[:count]])
