"""Which images an epoch's batches hold, on which process, and the number of the epoch for those who draw by it."""

import itertools
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from swbn_lightning.data.workers import StayingLoader
from swbn_lightning.errors import InputError

Item = TypeVar("Item", covariant=True)


def stream_seed(*numbers: int) -> int:
    """The seed of a random stream of its own for these integers, in [0, 2**63); the same in every process."""
    return hash(numbers) % 2**63  # the hash of integers is not salted, that of strings is


def training_seed(given: int | None) -> int:
    """``given``, or Lightning's global seed (``seed_everything``), or 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0)) if given is None else given


def each_once(numbers: Tensor) -> Tensor:
    """Position of the first occurrence of each distinct value in ``numbers [n]``, in rising order of the values.

    For what several processes gathered: a sampler may give some images to two, so that all have as many.
    """
    order = torch.argsort(numbers, stable=True)
    ordered = numbers[order]
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return order[first]


class EpochDataset(Dataset[Item]):
    """A data set whose items may be others in every epoch."""

    def __init__(self) -> None:
        # Shared, so that workers which outlive an epoch see the next one's number.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        """The epoch whose items are handed out."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Items of another epoch from now on, in every worker."""
        self._epoch.fill_(epoch)


class EpochSampler(DistributedSampler[Item]):
    """Shards a data set over processes, and passes on the epoch, which Lightning announces to samplers."""

    dataset: EpochDataset[Item]
    #: The next iteration (and only that one) skips so many items.
    start = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        start, self.start = self.start, 0
        return itertools.islice(super().__iter__(), start, None)


class ResumableLoader(StayingLoader):
    """Batches in the order of an :class:`EpochSampler`; after an interruption continues in the middle of the epoch.

    Lightning keeps ``state_dict`` in every checkpoint: the epoch, and how many of its batches have been handed out.
    Every other epoch is handed out whole: training resumes from a checkpoint of an epoch's end with the next epoch.

    Nothing is taken from the process's random stream: what DataLoader seeds its workers with is a function of
    (seed of the order, epoch). The arguments are ``DataLoader``'s.

    Raises:
        InputError: when iterated, a state in the middle of an epoch and another sampler than an ``EpochSampler``,
            which Lightning's ``overfit_batches`` puts in its place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"generator": torch.Generator(), **kwargs})
        self._state = {"epoch": 0, "batches": 0}
        self._loaded: dict[str, int] | None = None  # only for the next iteration

    def state_dict(self) -> dict[str, int]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._loaded = dict(state)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Begins with the first batch, not before: in between Lightning tells the sampler its epoch.
        order, epoch = self.sampler, getattr(self.sampler, "epoch", 0)
        loaded, self._loaded = self._loaded, None
        handed_out = loaded["batches"] if loaded and loaded["epoch"] == epoch else 0
        self._state = {"epoch": epoch, "batches": handed_out}
        if isinstance(order, EpochSampler):
            order.start = handed_out * (self.batch_size or 1)
            self.generator.manual_seed(stream_seed(order.seed, epoch))
        elif handed_out:
            raise InputError("with overfit_batches training cannot go on in the middle of an epoch; leave it out.")
        for batch in super().__iter__():
            self._state["batches"] += 1
            yield batch
