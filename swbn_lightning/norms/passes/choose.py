"""Which kind of pass takes a batch: the one place that knows of kernels, processes and functional transforms."""

from typing import Protocol

import torch
from torch import Tensor

from swbn_lightning.norms.passes import Batch, StandardizedBatch, kernels
from swbn_lightning.norms.passes.plain import PlainCentred, PlainStandardized
from swbn_lightning.norms.passes.processes import is_synchronized
from swbn_lightning.norms.passes.rows import is_transformed, num_samples
from swbn_lightning.norms.passes.stock import StockCentred, StockStandardized
from swbn_lightning.norms.passes.synchronized import SynchronizedCentred, SynchronizedStandardized


class _Layer(Protocol):
    """What a choice depends on besides the batch."""

    eps: float
    num_groups: int
    sync: bool
    weight: Tensor | None
    bias: Tensor | None


class _SteppedLayer(_Layer, Protocol):
    criterion: str
    step_size: float
    momentum: float | None
    track_running_stats: bool
    whitening_matrix: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    num_batches_rejected: Tensor
    num_batches_small: Tensor


def standardized(x: Tensor, layer: _SteppedLayer, training: bool = True) -> StandardizedBatch | None:
    """Steps 1, 2 and 5 of SWBN's Algorithm 1; None for an empty batch.

    Args:
        x: ``[N, C, ...]``.
        layer: what normalises it.
        training: otherwise no statistics are shared with other processes.

    Raises:
        ValueError: one value a channel, in all processes, has no variance.
    """
    synchronized = training and is_synchronized(layer.sync)
    if _is_empty(x, synchronized):
        return None
    if synchronized:
        return SynchronizedStandardized(x, layer.num_groups, layer.eps)
    if is_transformed():
        return PlainStandardized(x, layer.num_groups, layer.eps)
    if kernels.take_samples(x, layer.whitening_matrix, layer.weight, layer.bias):
        from swbn_lightning.norms.passes.kernels.batch import KernelBatch  # loads Triton

        return KernelBatch(x, layer.eps)
    return StockStandardized(x, layer.num_groups, layer.eps)


def centred(x: Tensor, layer: _Layer, dtype: torch.dtype, training: bool = True) -> Batch | None:
    """``x - mean``, for IterNorm and DBN; as :func:`standardized`.

    Args:
        x: ``[N, C, ...]``.
        layer: what normalises it.
        dtype: of the covariance and its sums.
        training: otherwise no statistics are shared with other processes.
    """
    synchronized = training and is_synchronized(layer.sync)
    if _is_empty(x, synchronized):
        return None
    if synchronized:
        return SynchronizedCentred(x, layer.num_groups, dtype)
    kind = PlainCentred if is_transformed() else StockCentred
    return kind(x, layer.num_groups, dtype)


def step_by_kernels(layer: _SteppedLayer, batch: StandardizedBatch, covariance: Tensor) -> Tensor | None:
    """Steps 3, 4, 7 and 8 in two launches, where the kernels take them.

    Returns:
        The W of this batch, a tensor of its own; None, and nothing done, where they do not.
    """
    w, samples = layer.whitening_matrix, batch.samples
    statistics = batch.mean, batch.variance, layer.running_mean, layer.running_var
    if not (isinstance(samples, int) and kernels.take_step(w, *statistics)):
        return None
    from swbn_lightning.norms.passes.kernels import launch

    running = None
    if layer.num_batches_tracked is not None and layer.track_running_stats:
        assert layer.running_mean is not None and layer.running_var is not None
        running = layer.running_mean, layer.running_var, layer.num_batches_tracked
    return launch.update_state(
        w, covariance, batch.mean, batch.variance, running, layer.num_batches_rejected, layer.num_batches_small,
        samples < w.shape[-1], layer.criterion, layer.step_size, layer.momentum,
    )  # fmt: skip


def _is_empty(x: Tensor, synchronized: bool) -> bool:
    count = num_samples(x)
    if count == 1 and not synchronized:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
    return count == 0 and not synchronized
