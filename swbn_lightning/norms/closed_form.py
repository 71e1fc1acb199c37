"""The layers' training passes as autograd functions with the backward written out.

An activation is ``rows`` here, ``[n, d]`` with a sample a row: a view of a channels_last tensor, one copy of a
contiguous one. Each function keeps one tensor of the activation's size, as BatchNorm does. Backward passes are made
of differentiable operations on what the function put out, so that derivatives of any order are right.
"""

from typing import Any

import torch
from torch import Tensor

from swbn_lightning.norms import functional as WF
from swbn_lightning.norms import products
from swbn_lightning.norms.base import without_autocast
from swbn_lightning.norms.distributed import all_reduce, merge_covariance, merge_mean


def is_transformed() -> bool:
    """Whether a forward runs under what autograd functions of one's own do not support.

    Tracing by ``torch.jit``, ``torch.export``, transforms by ``torch.func`` and forward-mode derivatives: there the
    layers use the plain formulas, whose backward is autograd's.
    """
    tracing = torch.jit.is_tracing() or torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active()
    return tracing or torch.autograd.forward_ad._current_level >= 0


def laid_out_as(y: Tensor, x: Tensor) -> Tensor:
    """``y`` with the strides that an operator on each value of ``x`` would give it.

    Where a dimension is 1 several strides mean the same places, and what comes next reads a memory format off them.
    A copy where they differ: a view would not let what comes next work in place. Not in a program that is traced or
    compiled, nor in a transform.
    """
    if y.stride() == x.stride() or torch.compiler.is_compiling() or is_transformed():
        return y
    if y.stride() == torch.empty_like(x, device="meta").stride():  # `x` has holes
        return y
    return torch.empty_like(x, dtype=y.dtype).copy_(y)


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
        x: ``[N, C, ...]``, what the gradient is for.
        rows: ``xs``, the standardised ``x`` as ``[n, C]``; a constant. With ``centred``, ``x - mean``.
        rstd: ``1 / sqrt(var + eps)``, ``[C]``; a constant.
        whitening_matrix: ``[g, C/g, C/g]``; a constant.
        weight: gamma, ``[C]``, or None.
        bias: beta, ``[C]``, or None.
        total: samples ``[]`` of all processes, if mean and variance are those of the batch on all of them; then the
            sums of the backward are merged, in one collective.
        centred: the rows are not divided by their deviation; ``A diag(rstd)`` stands for ``A``, and no pass over them
            is needed for it.

    Returns:
        ``[N, C, ...]`` in the dtype and layout of ``x``.
    """
    return _WhitenStandardized.apply(x, weight, bias, rows, rstd, whitening_matrix, total, centred)[0]


class _WhitenStandardized(torch.autograd.Function):
    # rows and rstd are outputs too: a derivative of the backward pass goes on through them to x.

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rows: Tensor,
        rstd: Tensor,
        w: Tensor,
        total: Tensor | None,
        centred: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = products.empty_like_rows(rows, x.shape, WF.channels_are_last(x))
        a = WF.scaled(w, weight)
        a = _times(a, rstd) if centred else a
        return products.multiply_into(y, a, rows, bias), rows.detach(), rstd.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, weight, bias, _, _, w, total, ctx.centred = inputs
        ctx.save_for_backward(weight, w, *output[1:])
        ctx.total = total
        ctx.last = WF.channels_are_last(x)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_rows: Tensor | None, grad_rstd: Tensor | None) -> tuple[Any, ...]:
        weight, w, rows, rstd = ctx.saved_tensors  # once: checkpointing allows no more
        with without_autocast(rows.device.type):
            grads = _gradients(ctx, grad, weight, w, rows, rstd, grad_rows, grad_rstd)
        return *grads, None, None, None, None, None


def _times(a: Tensor, columns: Tensor) -> Tensor:
    """``A diag(columns)``."""
    return a * columns.view(a.shape[0], 1, -1)


def _gradients(
    ctx: Any,
    grad: Tensor | None,
    weight: Tensor | None,
    w: Tensor,
    rows: Tensor,
    rstd: Tensor,
    grad_rows: Tensor | None,
    grad_rstd: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, gamma and beta."""
    g = torch.zeros_like(rows) if grad is None else WF.as_rows(grad)
    p = WF.gram(g, rows, w.shape[0]).to(w.dtype)
    p = _times(p, rstd) if ctx.centred else p
    sums = g.sum(0, dtype=w.dtype)
    grad_weight = grad_bias = grad_x = None
    if weight is not None:
        grad_weight = (w * p).sum(-1).reshape(-1).to(weight.dtype)
    if ctx.bias_dtype is not None:
        grad_bias = sums.to(ctx.bias_dtype)
    if ctx.needs_input_grad[0]:
        a = WF.scaled(w, weight)
        s1 = (a.mT @ sums.view(w.shape[0], -1, 1)).reshape(-1)
        s2 = (a * p).sum(-2).reshape(-1)
        grad_x = _standardize_backward(ctx, g, a, rows, rstd, s1, s2, grad_rows, grad_rstd)
    return grad_x, grad_weight, grad_bias


def _standardize_backward(
    ctx: Any,
    g: Tensor,
    a: Tensor,
    rows: Tensor,
    rstd: Tensor,
    s1: Tensor,
    s2: Tensor,
    grad_rows: Tensor | None,
    grad_rstd: Tensor | None,
) -> Tensor:
    """``dL/dx`` from ``G`` and the sums of ``G A`` and ``G A * xs``."""
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
    rest = torch.addcmul((s1 * scale / -n).to(rows.dtype), rows, slope.to(rows.dtype))
    if grad_rows is not None:
        rest = rest + (grad_rows * scale).to(rest.dtype)
    grad_x = products.multiply(_times(a, scale).mT, g, rest, ctx.shape, ctx.last)
    return grad_x if after is None else (grad_x * WF.per_channel(after, grad_x)).to(rows.dtype)


def center(
    x: Tensor, num_groups: int, synchronized: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch, or this process's part of it, centred, and its covariance; the gradient goes through both.

    With ``xc = x - mean`` and ``S = xc^T xc / n``, from ``G = dL/dxc`` and ``H = dL/dS``::

        dL/dx = G + xc (H + H^T) / n - sum(G) / n

    The mean's gradient through ``S`` is the sum of the second term over all samples, which is 0 as that of ``xc`` is.

    Args:
        x: ``[N, C, ...]``; with ``synchronized`` its samples may be fewer here than elsewhere, or none.
        num_groups: blocks of channels whose covariances are taken apart.
        synchronized: use the statistics of the batch on all processes: two collectives, and one backward.
        dtype: of ``S`` and of what is exchanged, the same in all processes; by default float32 or better.

    Returns:
        ``xc [n, C]`` as rows, in the dtype of ``x``; ``S [g, C/g, C/g]``, divided by the number of samples; the mean
        ``[C]`` and the number of samples ``[]`` (of all processes), which carry no gradient.
    """
    return _Center.apply(x, num_groups, synchronized, dtype or WF.accumulation_dtype(x.dtype))


class _Center(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, num_groups: int, synchronized: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows = WF.as_rows(x)
        count = rows.shape[0]
        mean = WF.batch_mean(rows)
        total = mean.new_full((), count)
        if synchronized:
            mean, total = merge_mean(mean.to(dtype), count)
            mean = mean.to(WF.accumulation_dtype(rows.dtype))
        centred = WF.center(rows, mean)
        s = WF.gram(centred, centred, num_groups, dtype) / max(count, 1)
        if synchronized:
            s = merge_covariance(s, count, total)
        return centred, s, mean, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, _, ctx.synchronized, _ = inputs
        centred, _, mean, total = output
        ctx.save_for_backward(centred)
        ctx.mark_non_differentiable(mean, total)
        ctx.total = total
        ctx.shape, ctx.last = x.shape, WF.channels_are_last(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_s: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (centred,) = ctx.saved_tensors
        with without_autocast(centred.device.type):
            wide = WF.accumulation_dtype(grad.dtype)
            sums, h = grad.sum(0, dtype=wide).to(grad_s.dtype), grad_s + grad_s.mT
            if ctx.synchronized:
                merged = all_reduce(torch.cat([sums, h.flatten()]))
                sums, h = merged[: len(sums)], merged[len(sums) :].view_as(h)
            n = ctx.total if ctx.synchronized else centred.shape[0]
            if centred.dtype == torch.float16:
                # H is of the gradient's size divided by the variance, soon below what float16 holds.
                grad, centred = grad.to(wide), centred.to(wide)
                rest = grad - (sums / n).to(wide)
                dx = products.multiply(h / n, centred, rest, ctx.shape, ctx.last)
                return dx.to(torch.float16), None, None, None
            rest = grad - (sums / n).to(grad.dtype)
            return products.multiply(h / n, centred, rest, ctx.shape, ctx.last), None, None, None


def output(rows: Tensor, whitening_matrix: Tensor, weight: Tensor | None, bias: Tensor | None, x: Tensor) -> Tensor:
    """``gamma * (W x) + beta`` of each row of ``[n, C]``, with the gradient through all of them.

    Returns:
        A tensor with the shape and layout of ``x`` and the dtype of ``rows``.
    """
    return _Output.apply(rows, WF.scaled(whitening_matrix, weight), bias, x.shape, WF.channels_are_last(x))


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, matrix: Tensor, bias: Tensor | None, shape: torch.Size, last: bool) -> Tensor:
        return products.multiply_into(products.empty_like_rows(rows, shape, last), matrix, rows, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, matrix, bias, _, _ = inputs
        ctx.save_for_backward(rows, matrix)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        rows, matrix = ctx.saved_tensors
        with without_autocast(rows.device.type):
            g = WF.as_rows(grad)
            sums = None if ctx.bias_dtype is None else g.sum(0, dtype=WF.accumulation_dtype(g.dtype))
            grad_bias = None if sums is None else sums.to(ctx.bias_dtype)
            grad_matrix = WF.gram(g, rows, matrix.shape[0]).to(matrix.dtype)
            return products.multiply(matrix.mT, g, None, g.shape, True), grad_matrix, grad_bias, None, None
