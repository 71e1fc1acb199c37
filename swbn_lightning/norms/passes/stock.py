"""Passes out of PyTorch's operators, as autograd functions with the backward written out.

An activation is ``rows`` here, ``[n, d]`` with a sample a row: a view of a channels_last tensor, one copy of a
contiguous one. Each function keeps one tensor of the activation's size, as BatchNorm does. Backward passes are made
of differentiable operations on what the function put out, so that derivatives of any order are right.
"""

import math
from typing import Any

import torch
from torch import Tensor

from swbn_lightning.norms.passes.processes import all_reduce, merge_statistics
from swbn_lightning.norms.passes.rows import (
    accumulation_dtype,
    affine,
    as_rows,
    batch_mean,
    channels_are_last,
    convolves,
    gram,
    multiply,
    multiply_convolved,
    per_channel,
    scaled,
    subtract,
    without_autocast,
)


class StockStandardized:
    """A :class:`.StandardizedBatch`.

    On a CPU the rows are centred only, and the deviations, which the products have on their diagonal, folded into the
    matrices that the rows are multiplied by: no pass over the rows sums squares or divides.
    """

    def __init__(self, x: Tensor, num_groups: int, eps: float) -> None:
        self._x, self._num_groups = x, num_groups
        with torch.no_grad():
            rows = as_rows(x)
            self.samples = rows.shape[0]
            self._centred = x.device.type == "cpu" and x.dtype.itemsize >= 4
            if self._centred:
                self.mean = batch_mean(rows)
                self._rows = rows - self.mean
                self._squares = gram(self._rows, self._rows, num_groups)
                self.variance = self._squares.diagonal(dim1=-2, dim2=-1).flatten() / (self.samples - 1)
                self._rstd = torch.rsqrt(self.variance + eps)
            else:
                self._rows, self.mean, self.variance, self._rstd = _standardize(rows, eps)

    def covariance(self) -> Tensor:
        if self._centred:
            return scaled(scaled(self._squares / self.samples, self._rstd).mT, self._rstd)
        return gram(self._rows, self._rows, self._num_groups) / self.samples

    def output(self, w: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return whiten_standardized(self._x, self._rows, self._rstd, w, weight, bias, centred=self._centred)


def _standardize(rows: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``xs [n, C]``, mean, unbiased variance and ``1 / sqrt(variance + eps)``, by BatchNorm's own fused operator.

    The operator divides by ``sqrt(b + e)`` with the *biased* variance ``b``; with ``r = (n - 1) / n``, ``b = r v`` and
    ``e = r eps`` that is ``sqrt(r) sqrt(v + eps)``, so a constant weight of ``sqrt(r)`` makes it the paper's.
    """
    ratio = (rows.shape[0] - 1) / rows.shape[0]
    dtype = accumulation_dtype(rows.dtype)
    weight = torch.full((rows.shape[1],), math.sqrt(ratio), dtype=dtype, device=rows.device)
    xs, mean, inverse = torch.native_batch_norm(rows, weight, None, None, None, True, 0.0, ratio * eps)
    # torch.compile takes them for 16 bit on a CPU; they are not.
    mean, inverse = mean.to(dtype), inverse.to(dtype)
    variance = inverse.pow(-2).div_(ratio).sub_(eps).clamp_(min=0)
    return xs, mean, variance, inverse * math.sqrt(ratio)


class SynchronizedStandardized:
    """A :class:`.StandardizedBatch` with the statistics of all processes; this one's part may be empty."""

    def __init__(self, x: Tensor, num_groups: int, eps: float) -> None:
        self._x, self._num_groups = x, num_groups
        with torch.no_grad():
            rows = as_rows(x)
            centred, s, self.mean, self.samples = _centre_together(rows, num_groups, accumulation_dtype(x.dtype))
            self.variance = s.diagonal(dim1=-2, dim2=-1).flatten() * (self.samples / (self.samples - 1))
            self._rstd = torch.rsqrt(self.variance + eps)
            self._covariance = scaled(scaled(s, self._rstd).mT, self._rstd)
            self._centred = x.dtype.itemsize >= 4
            self._rows = centred if self._centred else ((rows - self.mean) * self._rstd).to(x.dtype)

    def covariance(self) -> Tensor:
        return self._covariance

    def output(self, w: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return whiten_standardized(self._x, self._rows, self._rstd, w, weight, bias, self.samples, self._centred)


def _centre_together(rows: Tensor, num_groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``[n, C]`` centred by the mean of all processes, their covariance in ``dtype``, that mean, and their samples."""
    own = batch_mean(rows)
    centred = subtract(rows, own)
    mean, s, total = merge_statistics(own, gram(centred, centred, num_groups, dtype), rows.shape[0])
    mean = mean.to(own.dtype)
    # Rounded to 16 bits only once.
    centred = centred.sub_(mean - own) if centred.dtype == own.dtype else subtract(rows, mean)
    return centred, s, mean, total


def whiten_standardized(
    x: Tensor,
    rows: Tensor,
    rstd: Tensor,
    whitening_matrix: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    total: Tensor | None = None,
    centred: bool = False,
) -> Tensor:
    """``gamma * (W xs) + beta`` of SWBN (Algorithm 1, steps 9 and 10), with the gradient through mean and variance.

    ``W`` is a constant to the task. From ``G = dL/dy`` over ``n`` samples, with ``A = diag(gamma) W``::

        P = G^T xs                                                    d x d
        dL/dbeta = sum(G);   dL/dgamma_i = sum_k W_ik P_ik
        s1 = sum(G A) = A^T dL/dbeta;   s2_k = sum(G A * xs)_k = sum_i A_ik P_ik
        dL/dx = (G A - s1 / n - xs s2 / (n - 1)) / sqrt(var + eps)

    so that with covariance and output four products over the samples are all, and no sum over them but that for beta.

    Args:
        x: ``[N, C, ...]``, what the gradient is for; the output has its dtype and layout.
        rows: ``xs``, the standardised ``x`` as ``[n, C]``; a constant. With ``centred``, ``x - mean``.
        rstd: ``1 / sqrt(var + eps)``, ``[C]``; a constant.
        whitening_matrix: ``[g, C/g, C/g]``; a constant.
        weight: gamma, ``[C]``, or None.
        bias: beta, ``[C]``, or None.
        total: samples ``[]`` of all processes, if the statistics are theirs: the backward merges its sums, too.
        centred: the rows are not divided by their deviation; ``A diag(rstd)`` stands for ``A``.
    """
    return _WhitenStandardized.apply(x, weight, bias, rows, rstd, whitening_matrix, total, centred)[0]


class _WhitenStandardized(torch.autograd.Function):
    # rows and rstd are outputs too: a derivative of the backward pass goes on through them to x. No setup_context, here
    # and below: PyTorch would inspect the signature of forward at every call.

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: Tensor,
        rstd: Tensor,
        w: Tensor,
        total: Tensor | None,
        centred: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, rstd = rows.detach(), rstd.detach()
        ctx.save_for_backward(weight, w, rows, rstd)
        ctx.set_materialize_grads(False)
        ctx.total, ctx.centred = total, centred
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.shape, ctx.last, ctx.device_type = x.shape, channels_are_last(x), x.device.type
        a = scaled(w, weight)
        a = _times(a, rstd) if centred else a
        return affine(a, rows, bias, x.shape, ctx.last), rows, rstd

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_rows: Tensor | None, grad_rstd: Tensor | None) -> tuple[Any, ...]:
        with without_autocast(ctx.device_type):
            return *_gradients(ctx, grad, grad_rows, grad_rstd), None, None, None, None, None


def _times(a: Tensor, columns: Tensor) -> Tensor:
    """``A diag(columns)``."""
    return a * columns.view(a.shape[0], 1, -1)


def _gradients(
    ctx: Any, grad: Tensor | None, grad_rows: Tensor | None, grad_rstd: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, gamma and beta."""
    weight, w, rows, rstd = ctx.saved_tensors  # once: checkpointing allows no more
    g = torch.zeros_like(rows) if grad is None else as_rows(grad)
    p = gram(g, rows, w.shape[0]).to(w.dtype)
    p = _times(p, rstd) if ctx.centred else p
    sums = g.sum(0, dtype=w.dtype)
    grad_weight = None if weight is None else (w * p).sum(-1).reshape(-1).to(weight.dtype)
    grad_bias = None if ctx.bias_dtype is None else sums.to(ctx.bias_dtype)
    if not ctx.needs_input_grad[0]:
        return None, grad_weight, grad_bias
    a = scaled(w, weight)
    s1 = (a.mT @ sums.view(w.shape[0], -1, 1)).reshape(-1)
    s2 = (a * p).sum(-2).reshape(-1)
    if grad_rows is not None:
        if ctx.centred:  # as of `rows / rstd`, whose part through rstd is not among them
            grad_rows = grad_rows / rstd
        else:
            s2 = s2 + (grad_rows * rows).sum(0, dtype=s2.dtype)
        s1 = s1 + grad_rows.sum(0, dtype=s1.dtype)
    if grad_rstd is not None:
        s2 = s2 + grad_rstd * rstd  # of rstd itself: -rstd^2 xs / (n - 1)
    if ctx.total is None:
        n: int | Tensor = rows.shape[0]
    else:
        n = ctx.total
        s1, s2 = all_reduce(torch.cat([s1, s2])).chunk(2)
    # In float16 rstd stays out of the product: times W it can overflow where a channel is constant.
    after = rstd if rows.dtype == torch.float16 else None
    scale = torch.ones_like(rstd) if after is not None else rstd
    slope = s2 * (scale * rstd if ctx.centred else scale) / (1 - n)
    start = (s1 * scale / -n).to(rows.dtype)
    if ctx.last and grad_rows is None and convolves(g, w.shape[0]):
        grad_x = multiply_convolved(_times(a, scale).mT, g, start, ctx.shape)
        as_rows(grad_x).addcmul_(rows, slope)
        return grad_x, grad_weight, grad_bias
    rest = torch.addcmul(start, rows, slope.to(rows.dtype))
    if grad_rows is not None:
        rest = rest + (grad_rows * scale).to(rest.dtype)
    grad_x = multiply(_times(a, scale).mT, g, rest, ctx.shape, ctx.last)
    grad_x = grad_x if after is None else (grad_x * per_channel(after, grad_x)).to(rows.dtype)
    return grad_x, grad_weight, grad_bias


class StockCentred:
    """A :class:`.Batch` whose covariance and output have gradients, the one through mean and covariance.

    With ``xc = x - mean`` and ``S = xc^T xc / n``, from ``G = dL/dxc`` and ``H = dL/dS``::

        dL/dx = G + xc (H + H^T) / n - sum(G) / n

    The mean's gradient through ``S`` is the sum of the second term over all samples, which is 0 as that of ``xc`` is.
    """

    def __init__(self, x: Tensor, num_groups: int, dtype: torch.dtype, synchronized: bool = False) -> None:
        self._x = x
        self._rows, self._covariance, self.mean, total = _Center.apply(x, num_groups, synchronized, dtype)
        self.samples: int | Tensor = self._rows.shape[0] if total is None else total

    def covariance(self) -> Tensor:
        return self._covariance

    def output(self, w: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return _Output.apply(self._rows, scaled(w, weight), bias, self._x.shape, channels_are_last(self._x))


class _Center(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, num_groups: int, synchronized: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        rows = as_rows(x)
        total = None  # over the processes
        if synchronized:
            centred, s, mean, total = _centre_together(rows, num_groups, dtype)
            ctx.mark_non_differentiable(mean, total)
        else:
            mean = batch_mean(rows)
            centred = subtract(rows, mean)
            s = gram(centred, centred, num_groups, dtype) / len(rows)
            ctx.mark_non_differentiable(mean)
        ctx.save_for_backward(centred)
        ctx.total = total
        ctx.shape, ctx.last = x.shape, channels_are_last(x)
        return centred, s, mean, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_s: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (centred,) = ctx.saved_tensors
        with without_autocast(centred.device.type):
            wide = accumulation_dtype(grad.dtype)
            sums, h = grad.sum(0, dtype=wide).to(grad_s.dtype), grad_s + grad_s.mT
            n = centred.shape[0]
            if ctx.total is not None:
                merged = all_reduce(torch.cat([sums, h.flatten()]))
                sums, h, n = merged[: len(sums)], merged[len(sums) :].view_as(h), ctx.total
            if centred.dtype == torch.float16:
                # H is of the gradient's size divided by the variance, soon below what float16 holds.
                grad, centred = grad.to(wide), centred.to(wide)
                rest = grad - (sums / n).to(wide)
                dx = multiply(h / n, centred, rest, ctx.shape, ctx.last)
                return dx.to(torch.float16), None, None, None
            if ctx.last and convolves(centred, len(h)):
                grad_x = multiply_convolved(h / n, centred, sums / -n, ctx.shape)
                as_rows(grad_x).add_(grad)
                return grad_x, None, None, None
            rest = grad - (sums / n).to(grad.dtype)
            return multiply(h / n, centred, rest, ctx.shape, ctx.last), None, None, None


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, bias: Tensor | None, shape: torch.Size, last: bool) -> Tensor:
        ctx.save_for_backward(rows, matrix)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return affine(matrix, rows, bias, shape, last)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, matrix = ctx.saved_tensors
        with without_autocast(rows.device.type):
            g = as_rows(grad)
            sums = None if ctx.bias_dtype is None else g.sum(0, dtype=accumulation_dtype(g.dtype))
            grad_bias = None if sums is None else sums.to(ctx.bias_dtype)
            grad_matrix = gram(g, rows, matrix.shape[0]).to(matrix.dtype)
            return multiply(matrix.mT, g, None, g.shape, True), grad_matrix, grad_bias, None, None
