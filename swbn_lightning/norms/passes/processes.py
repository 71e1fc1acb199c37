"""Statistics of one batch that is spread over several processes.

One collective a layer and step forward, one backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swbn_lightning.norms.passes.rows import gram


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


@torch.no_grad()
def merge_statistics(mean: Tensor, squares: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, covariance and count of the whole batch from those of each process's part, in one collective.

    With ``N = sum_p n_p``, means ``m_p`` and their merged mean ``m`` (Chan, Golub and LeVeque 1979)::

        S = (sum_p C_p + sum_p n_p (m_p - m) (m_p - m)^T) / N

    The sum of the ``C_p`` needs no mean of others. So one sum over the processes brings it, and the counts and means,
    each in a place of its own that holds zeros in the other processes.

    Args:
        mean: of this part, ``[C]``; of an empty part it does not matter.
        squares: ``C_p``, the products of this part's samples, centred by their own mean and summed, ``[g, d, d]``.
        count: samples of this part.

    Returns:
        Mean ``[C]``, covariance ``[g, d, d]`` (divided by ``N``) and ``N``, ``[]``, in the dtype of ``squares``.
    """
    world, d = dist.get_world_size(), mean.shape[0]
    parts = squares.new_zeros(world, d + 1)
    if count:  # the mean of an empty part is NaN
        own = parts[dist.get_rank()]
        own[:d], own[d] = mean, count
    merged = all_reduce(torch.cat([parts.flatten(), squares.flatten()]))
    parts, total_squares = merged[: parts.numel()].view_as(parts), merged[parts.numel() :].view_as(squares)
    means, counts = parts[:, :d], parts[:, d:]
    total = counts.sum()
    merged_mean = (counts * means).sum(0) / total
    between = (means - merged_mean) * counts.sqrt()
    covariance = (total_squares + gram(between, between, squares.shape[0])) / total
    return merged_mean, covariance, total
