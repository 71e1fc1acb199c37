"""Which kind of pass takes a batch: the one place that knows of kernels, processes and functional transforms."""

from typing import Any

import torch
from torch import Tensor

from swbn_lightning.norms.passes import Batch, StandardizedBatch, kernels
from swbn_lightning.norms.passes.plain import PlainCentred, PlainStandardized
from swbn_lightning.norms.passes.processes import is_synchronized
from swbn_lightning.norms.passes.rows import is_transformed, num_samples
from swbn_lightning.norms.passes.stock import StockCentred, StockStandardized, SynchronizedStandardized


def standardized(x: Tensor, layer: Any, training: bool = True) -> StandardizedBatch | None:
    """Steps 1, 2 and 5 of SWBN's Algorithm 1 for ``[N, C, ...]``; None for an empty batch.

    Only in training are statistics shared with other processes.
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


def centred(x: Tensor, layer: Any, dtype: torch.dtype, training: bool = True) -> Batch | None:
    """``x - mean``, for the layers of batch_whitening.py, its covariance in ``dtype``; else as :func:`standardized`."""
    synchronized = training and is_synchronized(layer.sync)
    if _is_empty(x, synchronized):
        return None
    if is_transformed() and not synchronized:
        return PlainCentred(x, layer.num_groups, dtype)
    return StockCentred(x, layer.num_groups, dtype, synchronized)


def step_by_kernels(layer: Any, batch: StandardizedBatch, covariance: Tensor) -> Tensor | None:
    """Steps 3, 4, 7 and 8 in two launches: W, a tensor of its own; None, and nothing done, where no kernel is."""
    w, samples = layer.whitening_matrix, batch.samples
    statistics = batch.mean, batch.variance, layer.running_mean, layer.running_var
    if not (isinstance(samples, int) and kernels.take_step(w, *statistics)):
        return None
    from swbn_lightning.norms.passes.kernels import launch

    running = None
    if layer.num_batches_tracked is not None and layer.track_running_stats:
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
