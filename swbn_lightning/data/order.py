"""Which images an epoch's batches hold, on which process, and the number of the epoch for those who draw by it."""

from typing import TypeVar

import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

Item = TypeVar("Item", covariant=True)


def stream_seed(*numbers: int) -> int:
    """The seed of a random stream of its own for these integers, in [0, 2**63); the same in every process."""
    return hash(numbers) % 2**63  # the hash of integers is not salted, that of strings is


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

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.dataset.set_epoch(epoch)
