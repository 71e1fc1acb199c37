"""Episodes and images for few-shot training and evaluation."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader

from fewshot.datasets import get_dataset
from fewshot.episodes import TEST, TRAIN, VAL, EpisodeSampler, EpisodeSettings, require_shape
from fewshot.prediction import PredictionData, load_prediction_data
from swbn_lightning.data import ImageSet
from swbn_lightning.data.augment import CropFlip, RandomErasing
from swbn_lightning.data.cache import CACHE_FOLDER, ImageCache
from swbn_lightning.data.image_data import SPLITS, ImageBatch, ImageDataModule, ImageDataset, as_is
from swbn_lightning.data.images import take
from swbn_lightning.data.order import EpochDataset, EpochSampler, ResumableLoader, stream_seed, training_seed
from swbn_lightning.errors import InputError, require_not_negative, require_positive
from swbn_lightning.files.reading import printable


class EpisodeBatch(NamedTuple):
    """A batch of ``E`` episodes.

    Images are uint8 until they reach the device. There they become float, augmented and normalised.
    """

    support: Tensor  # [E, W, K, C, H, W]
    query: Tensor  # [E, W*Q, C, H, W], class after class
    classes: Tensor  # [E, W] global class indices
    augmentation: Tensor  # [E, W*(K+Q), 3 or 7], what CropFlip.draw and RandomErasing.draw gave; support first


class EpisodeDataset(EpochDataset[EpisodeBatch]):
    """``settings.episodes`` episodes. Item ``i``, images included, depends only on ``(seed, epoch, i)``."""

    def __init__(
        self,
        image_set: ImageSet,
        settings: EpisodeSettings,
        seed: int,
        augment: CropFlip,
        erasing: RandomErasing = RandomErasing(0.0),  # noqa: B008 (nothing in it changes)
    ) -> None:
        super().__init__()
        self.image_set, self.settings, self.seed = image_set, settings, seed
        self.augment, self.erasing = augment, erasing
        self.sampler = EpisodeSampler(image_set.labels, **settings.shape, class_names=image_set.class_names)

    def __len__(self) -> int:
        return self.settings.episodes

    def __getitems__(self, numbers: list[int]) -> EpisodeBatch:
        epoch = self.epoch
        classes, support, query = self.sampler.draw(numbers, self.seed, epoch)
        images = self.image_set.images
        count = support[0].numel() + query[0].numel()
        drawn = [self._draw_augmentation(epoch, number, count) for number in numbers]
        support_images, query_images = (
            take(images, index.flatten()).unflatten(0, index.shape) for index in (support, query.flatten(1))
        )
        return EpisodeBatch(support_images, query_images, classes, torch.stack(drawn))

    def _draw_augmentation(self, epoch: int, number: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(stream_seed(self.seed, epoch, number))
        drawn = self.augment.draw(count, generator)
        if not self.erasing:
            return drawn
        height, width = self.image_set.images.shape[2:]
        return torch.cat([drawn, self.erasing.draw(count, (height, width), generator)], dim=1)


class EpisodicDataModule(ImageDataModule):
    """Few-shot data: training episodes, and the images of the evaluation splits.

    A training batch is an :class:`EpisodeBatch`. The episodes of an epoch depend on its number, which Lightning passes
    to the loader. In your own loop, call ``loader.sampler.set_epoch(epoch)`` before each pass over
    ``loader = data.train_dataloader()``; otherwise every epoch has the same episodes.

    A validation or test batch holds images. The module embeds each image of the split once, then draws and scores
    episodes in bulk (:func:`fewshot.evaluate_episodes`).

    Args:
        dataset: ``"glyphs"`` (letters drawn in memory, nothing to download), ``"cifar-fs"``, ``"fc100"``,
            ``"mini-imagenet"``, ``"tiered-imagenet"``, ``"cub"``, ``"omniglot"``, ``"omniglot-rotations"``,
            ``"folders"`` (any class folders or lists), or a registered name.
        root: folder of the data set's files; leave it out for glyphs. The layout is detected automatically.
        image_size: side in pixels; None for the data set's default (28 for glyphs and Omniglot, 32 for CIFAR-FS and
            FC100, 84 for the others).
        cache: keep decoded images on disk for the next run (:class:`~swbn_lightning.data.cache.ImageCache`), in as many
            bytes as in memory. Only for image files: pickles hold decoded images already.
        cache_dir: folder of the cache; None for ``.swbn_cache/`` in the root.
        train: training episodes; their ways and shots may differ from those of the test, and may be ranges.
        val: validation episodes, the same in every epoch; use at least 600.
        test: test episodes, fixed as well. Only ``test`` reads the test classes.
        episodes_per_step: training episodes per optimiser step, in each process; 1 if their ways or shots are ranges.
        crop_padding: training augmentation: random crop of the image padded by this many pixels; 0 for none.
        flip: training augmentation: random horizontal flip; not for letters.
        erasing: training augmentation: probability of erasing a random rectangle of an image (:class:`RandomErasing`).
            The public code of cross attention uses 0.5, with slightly larger rectangles.
        seed: seed of the training episodes; None for Lightning's global seed (``seed_everything``), or 0 if there is
            none.
        eval_seed: seed of validation and test episodes. It is separate, so that runs with different training seeds are
            compared on the same episodes.
        eval_batch_size: images embedded at once in evaluation.
        num_workers: worker processes that draw training episodes; 0 is fast enough for images in memory.
        normalize_as: normalise pixels as this data set does; None for the data set itself. A network that was trained
            on one data set and is tested on another has learnt from the first one's normalisation.
        support: for ``predict``: a folder ``<class>/<image>``. Classes may have different numbers of images if the head
            takes them (:meth:`~fewshot.heads.EpisodeHead.uneven_logits`); those of this package do.
        query: for ``predict``: the images to classify, a folder or one image.

    Raises:
        InputError: an unknown data set; ``normalize_as`` one of other channels; a number out of range; ``cache`` for a
            data set that is not read from files; ``cache_dir`` without ``cache``; in :meth:`setup`, a root that does
            not hold the data set, too few classes, or classes with too few images.
    """

    #: Whether training batches hold labelled images, not episodes.
    trains_on_images = False

    def __init__(
        self,
        dataset: str = "glyphs",
        root: str | None = None,
        *,
        image_size: int | None = None,
        train: EpisodeSettings = TRAIN,
        val: EpisodeSettings = VAL,
        test: EpisodeSettings = TEST,
        episodes_per_step: int = 4,
        crop_padding: int = 0,
        flip: bool = False,
        seed: int | None = None,
        eval_seed: int = 0,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        support: str | None = None,
        query: str | None = None,
        cache: bool = False,
        cache_dir: str | None = None,
        erasing: float = 0.0,
        normalize_as: str | None = None,
    ) -> None:
        self.spec = get_dataset(dataset)
        normal = self.spec if normalize_as is None else get_dataset(normalize_as)
        if len(normal.mean) != len(self.spec.mean):
            raise InputError(
                f"normalize_as={normalize_as!r} is for images of {len(normal.mean)} channel(s), but {dataset!r} has "
                f"{len(self.spec.mean)}; name a data set of as many, or leave it out."
            )
        super().__init__(normal.mean, normal.std, CropFlip(crop_padding, flip), erasing)
        self.settings = {"train": train, "val": val, "test": test}
        check_episodes(self.settings, episodes_per_step)
        if image_size is not None:
            require_positive("images", image_size=image_size)
        require_positive("data", eval_batch_size=eval_batch_size)
        require_not_negative("data", num_workers=num_workers, seed=seed, eval_seed=eval_seed)
        if cache_dir is not None and not cache:
            raise InputError(f"cache_dir={cache_dir!r} is for cache: true, which is not given.")
        if cache and not self.spec.cacheable:
            raise InputError(f"cache: true is for images read from files, which {dataset!r} does not; leave it out.")
        self.dataset, self.root = dataset, root
        self.cache, self.cache_dir = cache, cache_dir
        self.image_size = image_size or self.spec.image_size
        self.episodes_per_step, self.eval_batch_size = episodes_per_step, eval_batch_size
        self.num_workers, self.seed, self.eval_seed = num_workers, seed, eval_seed
        self._support, self._query = support, query
        #: What ``predict`` works on, once it is set up.
        self.prediction: PredictionData | None = None

    @property
    def data_name(self) -> str:
        """What results call the data: the data set or, of your own folders, ``folders:`` and the name of the root."""
        if self.dataset != "folders" or self.root is None:
            return self.dataset
        return printable(f"folders:{Path(self.root).expanduser().resolve().name}")

    def facts(self) -> dict[str, Any]:
        # In checkpoints, which name no folder: so that an evaluation sees whether its data are those of the training.
        return {**super().facts(), "data_id": hashlib.sha256(self.data_name.encode()).hexdigest()[:16]}

    def load(self, split: str) -> ImageSet:
        cache = {}
        if self.cache and (self.cache_dir or self.root):  # no root: the loader says so
            cache["cache"] = ImageCache(self.cache_dir or Path(str(self.root)) / CACHE_FOLDER)
        image_set = self.spec.load(split, self.root, self.image_size, **cache)
        # So that no split is mistaken for another.
        source = f", from {image_set.source}" if image_set.source else ""
        rank_zero_info(f"{image_set.name}: {image_set.num_classes} classes, {len(image_set)} images{source}")
        return image_set

    def setup(self, stage: str) -> None:
        """Read the splits that ``stage`` needs and check that their episodes can be drawn."""
        if stage == "predict":
            own = (self.image_size, self.channels, self.spec.from_file)
            self.prediction = load_prediction_data(self._support, self._query, *own)
            self.query_files = self.prediction.query_files
        for split in SPLITS[stage]:
            self._check_split(split)

    def _check_split(self, split: str) -> None:
        image_set = self.image_set(split)
        EpisodeSampler(image_set.labels, **self.settings[split].shape, class_names=image_set.class_names)

    @property
    def num_training_classes(self) -> int:
        """Number of classes in the training split."""
        return self.image_set("train").num_classes

    def train_dataloader(self) -> DataLoader[EpisodeBatch]:
        seed = training_seed(self.seed)
        dataset = EpisodeDataset(self.image_set("train"), self.settings["train"], seed, self.augment, self.erasing)
        return training_loader(self, dataset, self.episodes_per_step)

    def val_dataloader(self) -> DataLoader[ImageBatch]:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[ImageBatch]:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[ImageBatch]:
        assert self.prediction is not None  # setup("predict") has been
        images = self.prediction.query
        return self._image_loader(images, torch.arange(len(images)))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, EpisodeBatch):
            return self._prepare_episodes(batch)
        if isinstance(batch, ImageBatch):
            return batch._replace(images=self.normalize(batch.images))
        return batch

    def _prepare_episodes(self, batch: EpisodeBatch) -> EpisodeBatch:
        ways, shots = batch.support.shape[1:3]
        images = torch.cat([batch.support.flatten(1, 2), batch.query], dim=1)
        crops, erased = (drawn.flatten(0, 1) for drawn in batch.augmentation.split([3, 4 if self.erasing else 0], -1))
        flat = self.prepare(images.flatten(0, 1), crops if self.augment else None, erased if self.erasing else None)
        images = flat.reshape(images.shape)
        return batch._replace(
            support=images[:, : ways * shots].unflatten(1, (ways, shots)), query=images[:, ways * shots :]
        )

    def _evaluation_loader(self, split: str) -> DataLoader[ImageBatch]:
        image_set, s = self.image_set(split), self.settings[split]
        return self._image_loader(image_set.images, _whole_episodes_first(image_set.labels, s.images_per_class))

    def _image_loader(self, images: Tensor, order: Tensor) -> DataLoader[ImageBatch]:
        return DataLoader(
            ImageDataset(images, order),
            batch_size=self.eval_batch_size,
            collate_fn=as_is,
            generator=torch.Generator(),  # DataLoader would draw from the process's stream
        )


def check_episodes(settings: dict[str, EpisodeSettings], episodes_per_step: int) -> None:
    """Raise :class:`InputError` for wrong numbers, or a step of too many episodes or of several shapes."""
    for split, own in settings.items():
        require_shape(f"{split} episodes", **own.shape)
        require_positive(f"{split} episodes", episodes=own.episodes)
    require_positive("data", episodes_per_step=episodes_per_step)
    if episodes_per_step > 1 and not settings["train"].of_one_shape:
        raise InputError(
            f"episodes_per_step={episodes_per_step} needs training episodes of one shape, but ways or shots are a "
            "range: give episodes_per_step: 1, and trainer.accumulate_grad_batches for a step of several episodes."
        )
    if episodes_per_step > settings["train"].episodes:
        raise InputError(
            f"episodes_per_step={episodes_per_step} is more than the {settings['train'].episodes} episodes of an epoch."
        )


def training_loader(data: ImageDataModule, dataset: EpochDataset[Any], number: int) -> DataLoader[EpisodeBatch]:
    """Loader of ``number`` episodes per batch, in each process.

    The processes share the episodes of an epoch. An incomplete last batch is left out.
    """
    order: EpochSampler[Any] = EpochSampler(dataset, *data.processes, shuffle=False, drop_last=True)
    return data.loader(dataset, number, ResumableLoader, sampler=order, drop_last=True)


def _whole_episodes_first(labels: Tensor, per_class: int) -> Tensor:
    """Order images in blocks of ``per_class`` images of a class: one block of every class, then the next blocks.

    An evaluation that is cut short (``fast_dev_run``, Lightning's sanity check) then still holds whole episodes.
    """
    rank = torch.empty_like(labels)
    by_class = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels)
    rank[by_class] = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]
    key = torch.div(rank, per_class, rounding_mode="floor") * len(counts) + labels
    return torch.argsort(key, stable=True)
