"""Statistics of one batch that is spread over several processes.

Two collectives a layer and step forward (statistics, covariance), one backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swbn_lightning.norms import functional as WF


def is_synchronized(sync: bool) -> bool:
    """Whether ``sync=True`` has anything to do here: a process group of more than one process."""
    return sync and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _AllReduce(torch.autograd.Function):
    """The sum over all processes; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _AllReduce.apply(grad)


class _AllGather(torch.autograd.Function):
    """``[K]`` of every process, ``[world, K]``; the gradient is summed over the processes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, values.contiguous())
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _AllReduce.apply(grad)[dist.get_rank()]


def merge_moments(mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased variance and count of the whole batch from those of each process's part.

    The gradient goes through, to every process's part. Parts of different size are weighted by
    their counts, and centred second moments are added, so that a large mean costs no precision
    (Chan, Golub and LeVeque 1979).
    """
    # One value a channel has no unbiased variance; its centred sum of squares is 0.
    squares = variance * (count - 1) if count > 1 else torch.zeros_like(variance)
    mean = _of_part(mean, count)
    counted = torch.cat([mean, squares, mean.new_tensor([count])])
    parts = _AllGather.apply(counted)
    d = mean.shape[0]
    means, sums, counts = parts[:, :d], parts[:, d : 2 * d], parts[:, 2 * d :]
    counts = counts.detach()
    total = counts.sum()
    merged_mean = (counts * means).sum(0) / total
    merged_squares = sums.sum(0) + (counts * (means - merged_mean).square()).sum(0)
    return merged_mean, merged_squares / (total - 1), total


def _of_part(mean: Tensor, count: int) -> Tensor:
    # A process may have an empty part, whose mean is NaN. Not a constant: its backward collective must be called too.
    return mean if count else mean.nan_to_num()


def merge_covariance(covariance: Tensor, count: int, total: Tensor) -> Tensor:
    """The covariance of the whole batch from each process's, centred by the whole batch's mean."""
    return _AllReduce.apply(covariance * (count / total))


def merged_center(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This process's part of a batch, centred, with the statistics of the whole batch; the gradient goes through.

    Args:
        x: ``[N, C, ...]``; its samples may be fewer here than elsewhere, or none.
        num_groups: blocks of channels whose covariances are taken apart.

    Returns:
        ``x - mean`` in the dtype of ``x``; the covariance ``[g, C/g, C/g]`` divided by the number of samples; the
        mean ``[C]`` and the number of samples ``[]``, which carry no gradient.
    """
    return _MergedCenter.apply(x, num_groups)


class _MergedCenter(torch.autograd.Function):
    """Centring and covariance in one, so that their gradients need one collective together.

    With ``xc = x - mean`` and ``S = xc^T xc / n``, from ``G = dL/dxc`` and ``H = dL/dS`` (summed over the processes)::

        dL/dx = G + xc (H + H^T) / n - sum(G) / n

    The mean's gradient through ``S`` is the sum of the second term over all samples, which is 0 as that of ``xc`` is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_groups: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = WF.num_samples(x)
        mean = WF.batch_mean(x)
        parts = _AllGather.apply(torch.cat([_of_part(mean, count), mean.new_tensor([count])]))
        means, counts = parts[:, :-1], parts[:, -1:]
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        centred = WF.center(x, mean)
        s = merge_covariance(WF.covariance(centred, num_groups), count, total)
        ctx.save_for_backward(centred, total)
        ctx.mark_non_differentiable(mean, total)
        return centred, s, mean, total

    @staticmethod
    def backward(ctx: Any, grad_centred: Tensor, grad_s: Tensor, *_: Any) -> tuple[Tensor, None]:
        centred, total = ctx.saved_tensors
        d = grad_centred.shape[1]
        sums = grad_centred.to(grad_s.dtype).sum([0, *range(2, grad_centred.dim())])
        merged = _AllReduce.apply(torch.cat([sums, (grad_s + grad_s.mT).flatten()])) / total
        through_s = WF.whiten(centred, merged[d:].view_as(grad_s), None, None)
        return grad_centred + through_s - WF.per_channel(merged[:d], centred).to(centred.dtype), None
