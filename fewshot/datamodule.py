"""Episodes and images for few-shot training and evaluation."""

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fewshot.datasets import get_dataset
from fewshot.episodes import EpisodeSampler
from fewshot.prediction import PredictionData, load_prediction_data
from swbn_lightning.data import ImageSet
from swbn_lightning.data.augment import CropFlip
from swbn_lightning.data.order import EpochDataset, EpochSampler, ResumableLoader, stream_seed
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.image_data import ImageBatch, ImageDataModule, ImageDataset, as_is


@dataclass(frozen=True)
class EpisodeSettings:
    """What an episode of one split looks like, and how many there are.

    Args:
        ways: classes an episode.
        shots: support images a class.
        queries: query images a class.
        episodes: in training, an epoch; in validation and test, in all. At least 600 for evaluation: the
            luck of 100 episodes is worth a point and a half.
    """

    ways: int = 5
    shots: int = 1
    queries: int = 15
    episodes: int = 600

    def check(self, split: str) -> None:
        """Raise :class:`InputError` for a number below 1."""
        numbers = {"ways": self.ways, "shots": self.shots, "queries": self.queries, "episodes": self.episodes}
        require_positive(f"{split} episodes", **numbers)


class EpisodeBatch(NamedTuple):
    """``E`` episodes; images are uint8 until they reach the device, then float, augmented and normalised."""

    support: Tensor  # [E, W, K, C, H, W]
    query: Tensor  # [E, W*Q, C, H, W], class after class
    classes: Tensor  # [E, W] global class indices
    augmentation: Tensor  # [E, W*(K+Q), 3], what CropFlip.draw gave; support first


class EvaluationTask(NamedTuple):
    """Which episodes a split is evaluated on."""

    labels: Tensor
    class_names: tuple[str, ...]
    settings: EpisodeSettings
    seed: int

    def whole_classes(self, labels: Tensor) -> Tensor:
        """Of a part of the split with these ``labels``: bool ``[n]``, the classes that have enough images."""
        return torch.bincount(labels)[labels] >= self.settings.shots + self.settings.queries


class EpisodeDataset(EpochDataset[EpisodeBatch]):
    """``settings.episodes`` episodes; item i is a function of (seed, epoch, i) alone, images included."""

    def __init__(self, image_set: ImageSet, settings: EpisodeSettings, seed: int, augment: CropFlip) -> None:
        super().__init__()
        self.image_set, self.settings, self.seed, self.augment = image_set, settings, seed, augment
        self.sampler = EpisodeSampler(
            image_set.labels, settings.ways, settings.shots, settings.queries, image_set.class_names
        )

    def __len__(self) -> int:
        return self.settings.episodes

    def __getitem__(self, number: int) -> EpisodeBatch:
        return self.__getitems__([number])

    def __getitems__(self, numbers: list[int]) -> EpisodeBatch:
        epoch = self.epoch
        classes, support, query = self.sampler.draw(numbers, self.seed, epoch)
        images = self.image_set.images
        drawn = [self._draw_augmentation(epoch, number) for number in numbers]
        return EpisodeBatch(images[support], images[query.flatten(1)], classes, torch.stack(drawn))

    def _draw_augmentation(self, epoch: int, number: int) -> Tensor:
        s = self.settings
        generator = torch.Generator().manual_seed(stream_seed(self.seed, epoch, number))
        return self.augment.draw(s.ways * (s.shots + s.queries), generator)


class EpisodicDataModule(ImageDataModule):
    """Training episodes, and the images of the evaluation splits, from one few-shot data set.

    In training a batch is :class:`EpisodeBatch`. In validation and test a batch is images: the module embeds
    each image of the split once and then draws and scores episodes in bulk (:func:`fewshot.evaluate_episodes`).

    Args:
        dataset: ``"glyphs"`` (letters drawn in memory, nothing to download), ``"cifar-fs"``, or a registered one.
        root: folder of the data set's files; none for glyphs.
        image_size: side in pixels; None for the data set's own (28 for glyphs, 32 for CIFAR-FS).
        train: training episodes; they may have other ways and shots than the test.
        val: validation episodes: fixed, at least 600.
        test: test episodes: fixed. The test classes are read by ``test`` alone.
        episodes_per_step: training episodes in one optimiser step, each process.
        crop_padding: random crop of the image padded by so many pixels, in training; 0 for none.
        flip: random horizontal flip, in training; not for letters.
        seed: of the training episodes; None for Lightning's global seed (``seed_everything``), or 0.
        eval_seed: of validation and test episodes. Its own, so that runs with different training seeds are
            compared on the same episodes.
        eval_batch_size: images embedded at once in evaluation.
        num_workers: worker processes that draw training episodes; 0 is fast enough for images in memory.
        support: for ``predict``: a folder ``<class>/<image>`` with the same number of images of every class.
        query: for ``predict``: the images to name, a folder or one image.

    Raises:
        InputError: an unknown data set; a number below 1; in :meth:`setup`, a root that does not hold the
            data set, more ways than classes, a class with fewer images than shots + queries.
    """

    def __init__(
        self,
        dataset: str = "glyphs",
        root: str | None = None,
        image_size: int | None = None,
        train: EpisodeSettings = EpisodeSettings(episodes=1000),
        val: EpisodeSettings = EpisodeSettings(),
        test: EpisodeSettings = EpisodeSettings(episodes=2000),
        episodes_per_step: int = 4,
        crop_padding: int = 0,
        flip: bool = False,
        seed: int | None = None,
        eval_seed: int = 0,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        support: str | None = None,
        query: str | None = None,
    ) -> None:
        self.spec = get_dataset(dataset)
        super().__init__(self.spec.mean, self.spec.std, CropFlip(crop_padding, flip))
        self.settings = {"train": train, "val": val, "test": test}
        for split, settings in self.settings.items():
            settings.check(split)
        if image_size is not None:
            require_positive("images", image_size=image_size)
        require_positive("data", episodes_per_step=episodes_per_step, eval_batch_size=eval_batch_size)
        if min(num_workers, eval_seed, seed or 0) < 0:
            raise InputError(
                f"num_workers, seed and eval_seed must not be negative, got {num_workers=}, {seed=}, {eval_seed=}."
            )
        if episodes_per_step > train.episodes:
            raise InputError(
                f"episodes_per_step={episodes_per_step} is more than the {train.episodes} episodes of an epoch."
            )
        self.dataset, self.root = dataset, root
        self.image_size = image_size or self.spec.image_size
        self.episodes_per_step, self.eval_batch_size = episodes_per_step, eval_batch_size
        self.num_workers, self.seed, self.eval_seed = num_workers, seed, eval_seed
        self._support, self._query = support, query
        #: What ``predict`` works on, once it is set up.
        self.prediction: PredictionData | None = None

    def load(self, split: str) -> ImageSet:
        return self.spec.load(split, self.root, self.image_size)

    def setup(self, stage: str) -> None:
        """Read the splits that ``stage`` needs and check that their episodes can be drawn."""
        splits = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ()}[stage]
        if stage == "predict":
            self.prediction = load_prediction_data(self._support, self._query, self.image_size, self.channels)
        for split in splits:
            image_set, s = self.image_set(split), self.settings[split]
            EpisodeSampler(image_set.labels, s.ways, s.shots, s.queries, image_set.class_names)

    def evaluation_task(self, split: str) -> EvaluationTask:
        """Labels, class names, episode settings and seed of an evaluation split."""
        image_set = self.image_set(split)
        return EvaluationTask(image_set.labels, image_set.class_names, self.settings[split], self.eval_seed)

    def train_dataloader(self) -> DataLoader[EpisodeBatch]:
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed
        dataset = EpisodeDataset(self.image_set("train"), self.settings["train"], seed, self.augment)
        trainer = self.trainer
        world, rank = (trainer.world_size, trainer.global_rank) if trainer is not None else (1, 0)
        return ResumableLoader(
            dataset,
            batch_size=self.episodes_per_step,
            sampler=EpochSampler(dataset, world, rank, shuffle=False, drop_last=True),
            drop_last=True,
            collate_fn=as_is,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def val_dataloader(self) -> DataLoader[ImageBatch]:
        return self._image_loader("val")

    def test_dataloader(self) -> DataLoader[ImageBatch]:
        return self._image_loader("test")

    def predict_dataloader(self) -> DataLoader[ImageBatch]:
        assert self.prediction is not None  # setup("predict") has been
        numbers = torch.zeros(len(self.prediction.query), dtype=torch.int64)
        queries = ImageSet(self.prediction.query, numbers, ("unknown",), "query")
        return DataLoader(ImageDataset(queries), batch_size=self.eval_batch_size, collate_fn=as_is)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, EpisodeBatch):
            return self._prepare_episodes(batch)
        if isinstance(batch, ImageBatch):
            return batch._replace(images=self.normalize(batch.images))
        return batch

    def _prepare_episodes(self, batch: EpisodeBatch) -> EpisodeBatch:
        ways, shots = batch.support.shape[1:3]
        images = torch.cat([batch.support.flatten(1, 2), batch.query], dim=1)
        if self.augment:
            flat = self.augment.apply(images.flatten(0, 1), batch.augmentation.flatten(0, 1))
            images = flat.reshape(images.shape)
        images = self.normalize(images)
        support = images[:, : ways * shots].unflatten(1, (ways, shots))
        return batch._replace(support=support, query=images[:, ways * shots :])

    def _image_loader(self, split: str) -> DataLoader[ImageBatch]:
        image_set, s = self.image_set(split), self.settings[split]
        order = _whole_episodes_first(image_set.labels, s.shots + s.queries)
        dataset = ImageDataset(image_set, order)
        return DataLoader(
            dataset,
            batch_size=self.eval_batch_size,
            shuffle=False,
            collate_fn=as_is,
            generator=torch.Generator(),  # DataLoader would draw from the process's stream
        )


def _whole_episodes_first(labels: Tensor, per_class: int) -> Tensor:
    """An order in which ``per_class`` images of a class stand together, class after class, then the next ones.

    An evaluation cut short (``fast_dev_run``, Lightning's sanity check) then still holds whole episodes.
    """
    rank = torch.empty_like(labels)
    by_class = torch.argsort(labels, stable=True)
    counts = torch.bincount(labels)
    rank[by_class] = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]
    key = torch.div(rank, per_class, rounding_mode="floor") * len(counts) + labels
    return torch.argsort(key, stable=True)
