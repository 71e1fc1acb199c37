"""SWBN's training pass by kernels: what stands in for the stock operators where :mod:`.kernels` says so."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from swbn_lightning.norms import functional as WF
from swbn_lightning.norms.base import without_autocast
from swbn_lightning.norms.closed_form import is_transformed, whiten_standardized
from swbn_lightning.norms.kernels import launch

if TYPE_CHECKING:
    from swbn_lightning.norms.swbn import SWBN


class Batch:
    """A batch with its statistics, which is standardised wherever it is read and never as a whole.

    Args:
        x: ``[N, C, ...]``, its channels last in memory.
        eps: added to the variance.
    """

    def __init__(self, x: Tensor, eps: float) -> None:
        self.rows = WF.as_rows(x)
        self.mean, self.variance, self.rstd = launch.moments(self.rows, eps)

    def covariance(self, rows: Tensor, num_groups: int) -> Tensor:
        """``S`` of the batch; as :func:`.functional.covariance` of standardised ones."""
        assert num_groups == 1
        return launch.covariance(rows, self.mean, self.rstd)


def whiten(x: Tensor, batch: Batch, w: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``gamma * (W xs) + beta`` with the gradient through mean and variance: :func:`.closed_form.whiten_standardized`.

    Args:
        x: ``[N, C, ...]``.
        batch: its statistics.
        w: the whitening matrix, ``[1, C, C]``; a constant.
        weight: gamma, ``[C]``, or None.
        bias: beta, ``[C]``, or None.
    """
    return _Whiten.apply(x, weight, bias, batch.mean, batch.rstd, w)


class _Whiten(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, w: Tensor
    ) -> Tensor:
        matrix = WF.scaled(w, weight)[0].to(x.dtype)
        ctx.save_for_backward(x, weight, mean, rstd, w, matrix)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return launch.output(x, mean, rstd, matrix, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, mean, rstd, w, matrix = ctx.saved_tensors  # once: checkpointing allows no more
        of_x, of_weight, of_bias, *rest = ctx.needs_input_grad
        grads: Sequence[Tensor | None]
        with without_autocast(x.device.type):
            # A batch of gradients (`is_grads_batched`) has no memory that a kernel could read.
            if torch.is_grad_enabled() or is_transformed() or torch._C._functorch.is_legacy_batchedtensor(grad):
                grads = _by_stock_operators(ctx, grad, x, weight, mean, rstd, w)
            else:
                dtypes = weight.dtype if of_weight else None, ctx.bias_dtype if of_bias else None
                grads = launch.gradients(grad, x, mean, rstd, w, matrix, (of_x, *dtypes))
        return *grads, *(None for _ in rest)


def _by_stock_operators(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, w: Tensor
) -> list[Tensor | None]:
    """The gradients as differentiable operations on ``grad``, ``x`` and ``weight``: for derivatives of higher order."""
    differentiable = torch.is_grad_enabled()
    with torch.enable_grad():
        with torch.no_grad():
            rows = WF.as_rows(x)
            xs = ((rows - mean) * rstd).to(x.dtype)
        bias = None
        if ctx.bias_dtype is not None:  # beta's gradient does not depend on its value
            bias = torch.zeros(x.shape[1], dtype=ctx.bias_dtype, device=x.device, requires_grad=True)
        y = whiten_standardized(x, xs, rstd, w, weight, bias)
        of_which = zip((x, weight, bias), ctx.needs_input_grad, strict=False)
        inputs = [tensor for tensor, needed in of_which if needed and tensor is not None]
        found = iter(torch.autograd.grad(y, inputs, grad, create_graph=differentiable))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]


def update_state(norm: "SWBN", mean: Tensor, variance: Tensor, s: Tensor, samples: int) -> Tensor:
    """What :meth:`SWBN._update_state` does, in two launches."""
    running = None
    if norm.num_batches_tracked is not None and norm.track_running_stats:
        running = norm.get_buffer("running_mean"), norm.get_buffer("running_var"), norm.num_batches_tracked
    return launch.update_state(
        norm.whitening_matrix, s, mean, variance, running, norm.num_batches_rejected, norm.num_batches_small,
        samples < norm.num_features // norm.num_groups, norm.criterion, norm.step_size, norm.momentum,
    )  # fmt: skip
