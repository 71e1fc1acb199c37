"""A pass by kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swbn_lightning.norms.passes.kernels import launch
from swbn_lightning.norms.passes.rows import as_rows, is_transformed, scaled, without_autocast
from swbn_lightning.norms.passes.stock import whiten_standardized
from swbn_lightning.norms.torch_internals import is_legacy_batched


class KernelBatch:
    """A :class:`.StandardizedBatch`, its channels last in memory, that is standardised wherever it is read."""

    def __init__(self, x: Tensor, eps: float) -> None:
        self._x, rows = x, as_rows(x).detach()
        self._rows, self.samples = rows, rows.shape[0]
        self.mean, self.variance, self._rstd = launch.moments(rows, eps)

    def covariance(self) -> Tensor:
        return launch.covariance(self._rows, self.mean, self._rstd)

    def output(self, w: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return _Whiten.apply(self._x, weight, bias, self.mean, self._rstd, w)


class _Whiten(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, w: Tensor
    ) -> Tensor:
        matrix = scaled(w, weight)[0].to(x.dtype)
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
            if torch.is_grad_enabled() or is_transformed() or is_legacy_batched(grad):
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
            rows = as_rows(x)
            xs = ((rows - mean) * rstd).to(x.dtype)
        bias = None
        if ctx.bias_dtype is not None:  # beta's gradient does not depend on its value
            bias = torch.zeros(x.shape[1], dtype=ctx.bias_dtype, device=x.device, requires_grad=True)
        y = whiten_standardized(x, xs, rstd, w, weight, bias)
        of_which = zip((x, weight, bias), ctx.needs_input_grad, strict=False)
        inputs = [tensor for tensor, needed in of_which if needed and tensor is not None]
        found = iter(torch.autograd.grad(y, inputs, grad, create_graph=differentiable))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:3]]
