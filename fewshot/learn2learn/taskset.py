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
    """Our episodes as learn2learn's algorithms take tasks: what its ``Taskset`` is, without learn2learn.

    ``taskset[i]`` is episode i of :class:`~fewshot.EpisodicDataModule`, normalised and, in training, augmented as
    there: images ``[W*(K+Q), C, H, W]`` and labels ``[W*(K+Q)]`` from 0 to W-1, class after class, in each class K
    support images, then Q queries (what learn2learn's ``partition_task`` takes apart, with ``shots=K``).
    :meth:`sample` gives one at random, from Python's generator as learn2learn's does.

    Args:
        data: where images, settings and seeds come from.
        split: ``"train"``, ``"val"`` or ``"test"``.
        epoch: training episodes are others in every epoch; see :meth:`set_epoch`.
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
        """Other episodes from now on; those of validation and test stay."""
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
        """A random one."""
        return self[random.randrange(len(self))]
