"""Statistics of one batch that is spread over several processes.

Two collectives a layer and step forward (statistics, covariance), one backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_synchronized(sync: bool) -> bool:
    """Whether ``sync=True`` has anything to do here: a process group of more than one process."""
    return sync and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_reduce(values: Tensor) -> Tensor:
    """The sum over all processes; so is its gradient."""
    return _AllReduce.apply(values)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _AllReduce.apply(grad)


def _all_gather(values: Tensor) -> Tensor:
    """``[K]`` of every process, ``[world, K]``."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values.contiguous())
    return torch.stack(gathered)


@torch.no_grad()
def merge_moments(mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased variance and count of the whole batch from those of each part (Chan, Golub and LeVeque 1979)."""
    # One value a channel has no unbiased variance; its centred sum of squares is 0.
    squares = variance * (count - 1) if count > 1 else torch.zeros_like(variance)
    parts = _all_gather(torch.cat([_of_part(mean, count), squares, mean.new_full((1,), count)]))
    d = mean.shape[0]
    means, sums, counts = parts[:, :d], parts[:, d : 2 * d], parts[:, 2 * d :]
    total = counts.sum()
    merged_mean = (counts * means).sum(0) / total
    merged_squares = sums.sum(0) + (counts * (means - merged_mean).square()).sum(0)
    return merged_mean, merged_squares / (total - 1), total


@torch.no_grad()
def merge_mean(mean: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Mean and count of the whole batch from those of each process's part."""
    parts = _all_gather(torch.cat([_of_part(mean, count), mean.new_full((1,), count)]))
    means, counts = parts[:, :-1], parts[:, -1:]
    total = counts.sum()
    return (counts * means).sum(0) / total, total


@torch.no_grad()
def merge_covariance(covariance: Tensor, count: int, total: Tensor) -> Tensor:
    """The covariance of the whole batch from each process's, centred by the whole batch's mean."""
    return all_reduce(covariance * (count / total))


def _of_part(mean: Tensor, count: int) -> Tensor:
    return mean if count else torch.zeros_like(mean)  # that of an empty part is NaN
