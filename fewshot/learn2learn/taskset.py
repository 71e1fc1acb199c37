"""Our episodes for learn2learn's algorithms."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from fewshot.datamodule import EpisodeDataset, EpisodicDataModule
from swbn_lightning.data.augment import CropFlip
from swbn_lightning.data.order import training_seed
from swbn_lightning.errors import InputError

SPLITS = ("train", "val", "test")


class EpisodeTaskset(Sequence[tuple[Tensor, Tensor]]):
    """Episodes of this package as tasks for learn2learn's algorithms.

    It replaces learn2learn's ``Taskset`` and does not need learn2learn.

    ``taskset[i]`` is episode i of :class:`~fewshot.EpisodicDataModule`, normalised and, in training, augmented as
    there. It holds images ``[W*(K+Q), C, H, W]`` and labels ``[W*(K+Q)]`` from 0 to W-1, class after class. Each class
    has K support images first, then Q queries; learn2learn's ``partition_task`` with ``shots=K`` separates them.
    :meth:`sample` returns a random episode, drawn from Python's generator as in learn2learn.

    Args:
        data: source of the images, settings and seeds.
        split: ``"train"``, ``"val"`` or ``"test"``.
        epoch: number that selects the training episodes of an epoch; see :meth:`set_epoch`.

    Raises:
        InputError: an unknown split.
    """

    def __init__(self, data: EpisodicDataModule, split: str = "train", epoch: int = 0) -> None:
        if split not in SPLITS:
            raise InputError(f"split must be one of {', '.join(SPLITS)}, got {split!r}.")
        self._data, self._training = data, split == "train"
        seed = training_seed(data.seed) if self._training else data.eval_seed
        augmentation = (data.augment, data.erasing) if self._training else (CropFlip(),)
        self._episodes = EpisodeDataset(data.image_set(split), data.settings[split], seed, *augmentation)
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Switch to the training episodes of another epoch; validation and test episodes do not change."""
        self._episodes.set_epoch(epoch if self._training else 0)

    def __len__(self) -> int:
        return len(self._episodes)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(f"task {number} of {len(self)}")  # ends an iteration
        batch = self._episodes.__getitems__([number])
        if self._training:
            batch = self._data.on_after_batch_transfer(batch, 0)
        else:
            batch = batch._replace(support=self._data.normalize(batch.support), query=self._data.normalize(batch.query))
        ways = batch.support.shape[1]
        images = torch.cat([batch.support[0], batch.query[0].unflatten(0, (ways, -1))], dim=1)
        return images.flatten(0, 1), torch.arange(ways).repeat_interleave(images.shape[1])

    def sample(self) -> tuple[Tensor, Tensor]:
        """Return a random episode."""
        return self[random.randrange(len(self))]
