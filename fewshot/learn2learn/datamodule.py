"""learn2learn's data sets and tasks for the methods of this package."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fewshot.datamodule import EpisodeBatch, check_episodes, training_loader
from fewshot.episodes import TEST, TRAIN, VAL, EpisodeSettings, in_words
from fewshot.learn2learn.tasks import TaskBatch, TaskEpisodes, TaskSplit, require_learn2learn
from swbn_lightning.data.augment import CropFlip
from swbn_lightning.data.image_data import ImageDataModule
from swbn_lightning.data.order import training_seed
from swbn_lightning.errors import InputError, require_not_negative, require_positive

_NEEDED = {"fit": ("train",), "validate": ("val",), "test": ("test",)}


class Learn2LearnDataModule(ImageDataModule):
    """Episodes from learn2learn's data sets and tasks, for the methods of this package.

    A data set of ``(image, label)`` (from learn2learn, torchvision or your own code, with or without ``MetaDataset``)
    is turned into tasks by the transforms ``NWays``, ``KShots``, ``LoadData``, ``RemapLabels`` and
    ``ConsecutiveLabels``. A ``Taskset`` is used as it is: each of its tasks must hold ``ways`` classes of
    ``shots + queries`` images.

    In each class of a task, the first ``shots`` images are support and the others queries, as in learn2learn's
    ``partition_task``. Augmentation is left to the data set, with random numbers seeded per episode.

    Validation and test embed and score one task after another. This takes more work than
    :class:`~fewshot.EpisodicDataModule`, which embeds each image only once; the figures are the same.

    **Random streams.** learn2learn draws from Python's global generator, which would give every process and worker the
    same tasks. Here, the generators of Python, NumPy and torch are seeded by (seed, epoch, i) to draw task i, and
    restored afterwards. Validation and test tasks are fixed by ``eval_seed``. A ``Taskset`` with a ``num_tasks`` keeps
    its tasks, and training cycles through them.

    Args:
        train: data set or ``Taskset``. In a configuration file, a data set given by ``class_path`` and ``init_args``.
        val: as ``train``; None for no validation.
        test: as ``train``.
        train_episodes: shape of a training task, and tasks per epoch.
        val_episodes: the same for validation; fixed tasks, use at least 600.
        test_episodes: the same for the test; fixed tasks.
        episodes_per_step: training episodes per optimiser step, in each process.
        eval_episodes_per_step: evaluation episodes embedded at once.
        mean: per-channel mean to subtract; None if the images are already normalised. Use the unit of float images; for
            uint8 images, PIL images and arrays, which are divided by 255 first, use values in [0, 1].
        std: per-channel deviation to divide by, in the same unit.
        seed: seed of the training tasks; None for Lightning's global seed (``seed_everything``), or 0 if there is none.
        eval_seed: seed of validation and test tasks.
        num_workers: worker processes that draw tasks and load their images.

    Raises:
        InputError: learn2learn is not installed; a number out of range; ways or shots that are ranges; ``mean`` without
            ``std`` or the reverse; in :meth:`setup`, a split that is needed but not given, or a source or tasks
            that do not fit.
    """

    def __init__(
        self,
        # Not Dataset[Any]: of that the command's parser does not find the arguments of a class_path.
        train: Dataset | None = None,
        val: Dataset | None = None,
        test: Dataset | None = None,
        *,
        train_episodes: EpisodeSettings = TRAIN,
        val_episodes: EpisodeSettings = VAL,
        test_episodes: EpisodeSettings = TEST,
        episodes_per_step: int = 4,
        eval_episodes_per_step: int = 4,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        seed: int | None = None,
        eval_seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        require_learn2learn()
        if (mean is None) != (std is None):
            raise InputError(f"mean and std belong together, got {mean=}, {std=}.")
        super().__init__(mean or (0.0,), std or (1.0,), CropFlip())
        self._sources = {"train": train, "val": val, "test": test}
        self.settings = {"train": train_episodes, "val": val_episodes, "test": test_episodes}
        check_episodes(self.settings, episodes_per_step)
        for split, own in self.settings.items():
            if not own.of_one_shape:
                raise InputError(
                    f"{split}_episodes: learn2learn's tasks have one number of ways and of shots, got "
                    f"ways={in_words(own.ways)}, shots={in_words(own.shots)}; EpisodicDataModule draws ranges."
                )
        require_positive("data", eval_episodes_per_step=eval_episodes_per_step)
        require_not_negative("data", num_workers=num_workers, seed=seed, eval_seed=eval_seed)
        self.episodes_per_step, self.eval_episodes_per_step = episodes_per_step, eval_episodes_per_step
        self.seed, self.eval_seed, self.num_workers = seed, eval_seed, num_workers
        self._splits: dict[str, TaskSplit] = {}
        self._shape: torch.Size | None = None

    @property
    def has_validation(self) -> bool:
        return self._sources["val"] is not None

    @property
    def channels(self) -> int:
        return self._image_shape[0]

    @property
    def image_size(self) -> int:  # type: ignore[override]
        """Side of the images in pixels, measured on a task."""
        return self._image_shape[1]

    @property
    def num_training_classes(self) -> int:
        """Number of classes in the training data set."""
        return len(self.task_split("train").class_numbers)

    def task_split(self, name: str) -> TaskSplit:
        """Tasks of a split, created at first use."""
        if name not in self._splits:
            if self._sources[name] is None:
                raise InputError(f"Learn2LearnDataModule was given no {name} data.")
            self._splits[name] = TaskSplit(name, self._sources[name], self.settings[name])
        return self._splits[name]

    def setup(self, stage: str) -> None:
        """Create the splits that ``stage`` needs, and draw one task from each."""
        if stage == "predict":
            raise InputError("predict names images by a support folder: use EpisodicDataModule with support and query.")
        names = [*_NEEDED[stage], *(["val"] if stage == "fit" and self.has_validation else [])]
        for name in names:
            split = self.task_split(name)
            if name != "train" and split.num_tasks is not None and split.num_tasks < split.settings.episodes:
                raise InputError(
                    f"{name}: a Taskset of {split.num_tasks} tasks has no {split.settings.episodes} episodes; give it "
                    f"num_tasks=-1 or at least so many, or fewer {name}_episodes."
                )
            self._check_images(name)

    def facts(self) -> dict[str, Any]:
        splits = {}
        for name, own in self._splits.items():
            classes = [str(label) for label in own.class_numbers]
            splits[name] = {"name": f"learn2learn/{name}", "images": len(own.taskset.dataset), "classes": classes}
        return {**super().facts(), "splits": splits}

    def train_dataloader(self) -> DataLoader[Any]:
        dataset = TaskEpisodes(self.task_split("train"), training_seed(self.seed), numbered=False)
        return training_loader(self, dataset, self.episodes_per_step)

    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        return self._evaluation_loader("val") if self.has_validation else []

    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, TaskBatch):
            return batch._replace(episodes=self._normalized(batch.episodes))
        return self._normalized(batch) if isinstance(batch, EpisodeBatch) else batch

    def normalize(self, images: Tensor) -> Tensor:
        """Normalise images for the network: divide uint8 by 255, subtract ``mean``, divide by ``std``."""
        if not images.is_floating_point():
            return super().normalize(images)
        mean, std = self._statistics(images)
        return (images - mean).div_(std)

    def sample_images(self, count: int, split: str = "val", seed: int = 0) -> Tensor:
        """Sample normalised images of the first tasks of a split: float ``[count, C, H, W]``.

        Uses ``train`` if the split was not given.
        """
        tasks = self.task_split(split if self._sources[split] is not None else "train")
        images: list[Tensor] = []
        while sum(map(len, images)) < count and len(images) != tasks.num_tasks:
            images.append(tasks.draw(len(images), self.eval_seed + seed)[0].flatten(0, 1))
        return self.normalize(torch.cat(images)[:count])

    def _normalized(self, batch: EpisodeBatch) -> EpisodeBatch:
        return batch._replace(support=self.normalize(batch.support), query=self.normalize(batch.query))

    def _evaluation_loader(self, name: str) -> DataLoader[Any]:
        dataset = TaskEpisodes(self.task_split(name), self.eval_seed, numbered=True)
        return self.loader(dataset, self.eval_episodes_per_step)

    @property
    def _image_shape(self) -> torch.Size:
        if self._shape is None:
            self._check_images(next(name for name in self._sources if self._sources[name] is not None))
        assert self._shape is not None
        return self._shape

    def _check_images(self, name: str) -> None:
        shape = self.task_split(name).draw(0, self.eval_seed)[0].shape[2:]
        if shape[1] != shape[2]:
            raise InputError(f"{name}: images must be square, got {list(shape)}; give the data set a transform.")
        if self._shape is not None and self._shape != shape:
            raise InputError(f"{name}: images are {list(shape)}, those of another split {list(self._shape)}.")
        if len(self._mean) not in (1, shape[0]):
            raise InputError(f"mean and std are of {len(self._mean)} channels, the images of {shape[0]}.")
        self._shape = shape
