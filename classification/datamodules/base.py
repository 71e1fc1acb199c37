"""The part that the data modules of many-shot classification share: batches, their order, their way to the device."""

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSampler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from swbn_lightning.data import ImageSet
from swbn_lightning.data.augment import CropFlip, RandomErasing
from swbn_lightning.data.decode import read_image
from swbn_lightning.data.image_data import SPLITS, ImageBatch, ImageDataModule
from swbn_lightning.data.images import hold_out, take
from swbn_lightning.data.order import EpochDataset, EpochSampler, ResumableLoader, stream_seed, training_seed
from swbn_lightning.data.query import QueryDataset, query_files, shown_names
from swbn_lightning.errors import InputError, require_not_negative, require_positive


class LabelledBatch(NamedTuple):
    """Images with their classes; images are uint8 until they reach the device, then float and normalised."""

    images: Tensor  # [B, C, H, W]
    labels: Tensor  # [B] int64


class NumberedBatch(NamedTuple):
    """An evaluation batch: as a :class:`LabelledBatch`, with each image's number in its split."""

    images: Tensor  # [B, C, H, W]
    labels: Tensor  # [B] int64
    numbers: Tensor  # [B] int64


class RawBatch(NamedTuple):
    """A training batch on its way to the device, where it becomes a :class:`LabelledBatch`."""

    images: Tensor  # [B, C, H, W] uint8
    labels: Tensor  # [B] int64
    crops: Tensor | None  # [B, 3], what CropFlip.draw gave
    erased: Tensor | None  # [B, 4], what RandomErasing.draw gave


class LabelledDataset(Dataset[NumberedBatch]):
    """A split in memory; a whole batch is gathered at once."""

    def __init__(self, image_set: ImageSet) -> None:
        self.image_set = image_set

    def __len__(self) -> int:
        return len(self.image_set)

    def __getitems__(self, numbers: list[int]) -> NumberedBatch:
        index = torch.tensor(numbers)
        return NumberedBatch(take(self.image_set.images, index), self.image_set.labels[index], index)


class TrainingDataset(EpochDataset[RawBatch]):
    """The training split with its augmentation; image i depends only on (seed, epoch, i)."""

    def __init__(self, image_set: ImageSet, crop_flip: CropFlip, erasing: RandomErasing, seed: int) -> None:
        super().__init__()
        self.image_set, self.crop_flip, self.erasing, self.seed = image_set, crop_flip, erasing, seed
        self._drawn_epoch = -1
        self._crops: Tensor | None = None
        self._erased: Tensor | None = None

    def __len__(self) -> int:
        return len(self.image_set)

    def __getitems__(self, numbers: list[int]) -> RawBatch:
        self._draw()
        index, data = torch.tensor(numbers), self.image_set
        crops, erased = (None if drawn is None else drawn[index] for drawn in (self._crops, self._erased))
        return RawBatch(take(data.images, index), data.labels[index], crops, erased)

    def _draw(self) -> None:
        """Draw for all images at an epoch's first batch: 2 ms for 50,000 crops, 50 ms with erasing."""
        epoch = self.epoch
        if self._drawn_epoch == epoch:
            return
        generator = torch.Generator().manual_seed(stream_seed(self.seed, epoch))
        count, (height, width) = len(self.image_set), self.image_set.images.shape[2:]
        self._crops = self.crop_flip.draw(count, generator) if self.crop_flip else None
        self._erased = self.erasing.draw(count, (height, width), generator) if self.erasing else None
        self._drawn_epoch = epoch


class ClassificationDataModule(ImageDataModule):
    """Base of the classification data modules: batches of labelled images.

    A subclass defines :meth:`load` and :attr:`num_classes`.

    Splits are kept in memory as uint8. A training batch is gathered there and augmented as a whole on the training
    device. A subclass whose images do not fit in memory overrides :meth:`training_dataset`, :meth:`evaluation_dataset`
    and :meth:`class_names` instead.

    In your own loop, call ``loader.sampler.set_epoch(epoch)`` before each pass over
    ``loader = data.train_dataloader()``; otherwise every epoch has the same order. In distributed training, each
    process gets different images. All training batches have the same size: an incomplete last batch is left out.

    Args:
        mean: per-channel mean of the training pixels, in [0, 1].
        std: per-channel deviation of the training pixels.
        batch_size: training images per batch, in each process; 128 as in the paper (section 4.1).
        eval_batch_size: evaluation images per batch. With several processes it may be slightly larger, so that all have
            the same number of batches and no image is used twice.
        crop_padding: training augmentation: random crop of the image padded by this many pixels; 0 for none, usually 4
            for CIFAR.
        crop_padding_mode: ``"constant"`` (zeros) or ``"reflect"``, see :class:`~swbn_lightning.data.augment.CropFlip`.
        flip: training augmentation: random horizontal flip; not for letters and digits.
        erasing: training augmentation: probability of random erasing, see
            :class:`~swbn_lightning.data.augment.RandomErasing`.
        seed: seed of the order of the images and of their augmentation; None for Lightning's global seed
            (``seed_everything``), or 0 if there is none.
        num_workers: worker processes that gather batches; 0 is fast enough for images in memory.
        curve_split: ``"test"`` evaluates the test split after each epoch, as in the paper's curves; only without
            validation images. The curve is logged and drawn, but never selects a model.
        query: for ``predict``: the images to classify, a folder or one image.

    Raises:
        InputError: a number out of range; an unknown ``curve_split``; in :meth:`setup`, no images to classify,
            ``curve_split`` together with validation images, missing or broken files, a batch larger than the training
            set of a process, or a split with fewer images than processes.
    """

    def __init__(
        self,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        crop_padding: int = 0,
        crop_padding_mode: str = "constant",
        flip: bool = False,
        erasing: float = 0.0,
        seed: int | None = None,
        num_workers: int = 0,
        curve_split: str | None = None,
        query: str | None = None,
    ) -> None:
        super().__init__(mean, std, CropFlip(crop_padding, flip, crop_padding_mode), erasing)
        require_positive("data", batch_size=batch_size, eval_batch_size=eval_batch_size)
        require_not_negative("data", num_workers=num_workers, seed=seed)
        if curve_split not in (None, "test"):
            raise InputError(f"curve_split must be 'test', or left out, got {curve_split!r}.")
        self.curve_split = curve_split
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self._seed, self.num_workers = seed, num_workers
        self._query = query
        self._query_paths: list[Path] = []

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes, the same in every split."""

    def class_names(self, split: str) -> tuple[str, ...]:
        """Return the names of the classes, by number; their numbers if a subclass gives neither names nor images."""
        if type(self).load is ImageDataModule.load:
            return tuple(map(str, range(self.num_classes)))
        return self.image_set(split).class_names

    def chosen_by(self, split: str) -> str:
        """Return what chooses a split's images, such as a seed or the names of their files; empty if nothing does.

        It is part of :meth:`ImageResult.identity <classification.ImageResult.identity>`, by which tests are paired.
        """
        return ""

    @property
    def training_seed(self) -> int:
        """Seed of the order of the images and of their augmentation."""
        return training_seed(self._seed)

    def image_set(self, split: str) -> ImageSet:
        """Return a split, read at first use, with images in channels_last layout as networks prefer."""
        if split not in self._sets:
            found = self.load(split)
            images = found.images.contiguous(memory_format=torch.channels_last)
            self._sets[split] = replace(found, images=images)
        return self._sets[split]

    def training_dataset(self) -> EpochDataset[Any]:
        """Return the augmented training split; its batches go to :meth:`on_after_batch_transfer`."""
        return TrainingDataset(self.image_set("train"), self.augment, self.erasing, self.training_seed)

    def evaluation_dataset(self, split: str) -> Dataset[NumberedBatch]:
        """Return any split for evaluation, without augmentation."""
        return LabelledDataset(self.image_set(split))

    def setup(self, stage: str) -> None:
        """Read the splits that ``stage`` needs, so that errors in them appear before training."""
        if stage == "predict":
            if self._query is None:
                raise InputError("predict needs images to name: --data.query PATH (a folder of images, or one image).")
            self._query_paths = query_files(self._query)
            self.query_files = shown_names(self._query_paths)
            return
        if stage == "validate" and not self.has_validation:
            raise InputError(f"{type(self).__name__} holds out no images for validation; set val_share above 0.")
        if self.curve_split and self.has_validation:
            raise InputError(
                "curve_split: test is for trainings without validation: set val_share to 0, or leave it out."
            )
        for split in (*SPLITS[stage], *([self.curve_split] if self.curve_split and stage == "fit" else [])):
            if split != "val" or self.has_validation:
                self._check_split(split)

    def _check_split(self, split: str) -> None:
        count, (world, _) = _length(self.evaluation_dataset(split)), self.processes
        if split == "train":
            check_batch_size(self.batch_size, count, world)
        if count < world:
            raise InputError(f"the {split} split has {count} images, too few for {world} processes.")

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.loader(QueryDataset(self._query_paths, self.read_file), self.eval_batch_size)

    def read_file(self, path: Path) -> Tensor:
        """Read an image for ``predict`` as those of the test were read, into uint8 ``[C, H, W]``."""
        return torch.tensor(read_image(path, self.image_size, self.channels))

    def train_dataloader(self) -> DataLoader[Any]:
        return shuffled_loader(self, self.training_dataset(), self.batch_size, self.training_seed)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        # Without data loaders Lightning trains without validation.
        split = "val" if self.has_validation else self.curve_split
        return self._evaluation_loader(split) if split else []

    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return prepared(self, batch)

    def sample_images(self, count: int, split: str | None = None, seed: int = 0) -> Tensor:
        """Return a fixed random sample, normalised and not augmented: float ``[min(count, N), C, H, W]`` on the CPU.

        By default from ``"val"``, or from ``"train"`` if nothing is held out.
        """
        dataset = self.evaluation_dataset(split or ("val" if self.has_validation else "train"))
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randperm(_length(dataset), generator=generator)[:count].tolist()
        return self.normalize(dataset.__getitems__(numbers).images)  # type: ignore[attr-defined]

    def _evaluation_loader(self, split: str) -> DataLoader[Any]:
        return each_once_loader(self, self.evaluation_dataset(split), self.eval_batch_size)


class HeldOutDataModule(ClassificationDataModule):
    """Base of data sets with a training and a test set: validation images are held out of the training set.

    Args:
        val_share: share of the training images that is held out for validation, the same for every class (stratified).
            These images select the checkpoint and do not train. With 0, as in the paper, all images train, there is no
            validation, and the run keeps the checkpoint of the last epoch. The test set never selects a checkpoint.
        split_seed: seed of the held-out images. It is separate, so that runs with different training seeds validate on
            the same images.
        kwargs: as in :class:`ClassificationDataModule`.

    Raises:
        InputError: as :class:`ClassificationDataModule`; a share outside [0, 1), or one that holds out no image.
    """

    def __init__(self, val_share: float = 0.1, split_seed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_share("val_share", val_share)
        require_not_negative("data", split_seed=split_seed)
        self.val_share, self.split_seed = val_share, split_seed

    @property
    def has_validation(self) -> bool:
        return self.val_share > 0

    def chosen_by(self, split: str) -> str:
        return "" if split == "test" else f"val_share={self.val_share} split_seed={self.split_seed}"

    def divide(self, labels: Tensor) -> dict[str, Tensor]:
        """Image numbers of the training set's parts: ``"train"`` and, if images are held out, ``"val"``."""
        if not self.val_share:
            return {"train": torch.arange(len(labels))}
        kept, held = hold_out(labels, "val_share", self.val_share, self.split_seed)
        return {"train": kept, "val": held}


def prepared(data: ImageDataModule, batch: Any) -> Any:
    """A batch of images, with or without labels, as the network takes it; any other batch as it is."""
    if isinstance(batch, RawBatch):
        return LabelledBatch(data.prepare(batch.images, batch.crops, batch.erased), batch.labels)
    if isinstance(batch, LabelledBatch | NumberedBatch | ImageBatch):
        return batch._replace(images=data.normalize(batch.images))
    return batch


def shuffled_loader(data: ImageDataModule, dataset: EpochDataset[Any], size: int, seed: int) -> DataLoader[Any]:
    """Training batches of ``size`` images in each process, in another order in each epoch."""
    world, rank = data.processes
    # The seed for the order is not the seed itself, to which the sampler adds the epoch: seeds 0 and 1 would
    # give the same orders, one epoch apart.
    order: EpochSampler[Any] = EpochSampler(dataset, world, rank, shuffle=True, seed=stream_seed(seed), drop_last=True)
    return data.loader(dataset, size, ResumableLoader, sampler=order, drop_last=True)


def each_once_loader(data: ImageDataModule, dataset: Dataset[Any], size: int) -> DataLoader[Any]:
    """Evaluation batches of about ``size`` images, over all processes each image once."""
    world, rank = data.processes
    if world == 1:
        return data.loader(dataset, size)
    # No image twice, as the stock sampler would have it. Some processes then have an image more, and must not
    # have a batch more, for which they would wait for the others in vain.
    least = _length(dataset) // world
    while least % size == 0:
        size += 1
    return data.loader(dataset, size, sampler=UnrepeatedDistributedSampler(dataset, world, rank, shuffle=False))


def check_batch_size(size: int, images: int, processes: int) -> None:
    """Raise :class:`InputError` if a process's share of the training images fills no batch."""
    if images // processes < size:
        raise InputError(
            f"batch_size={size} is more than the {images // processes} training images of each process, so an epoch "
            "would have no batch."
        )


def check_share(name: str, share: float) -> None:
    """Raise :class:`InputError` for a share outside [0, 1)."""
    if not 0 <= share < 1:
        raise InputError(f"{name} must be in [0, 1), got {share}.")


def _length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]
