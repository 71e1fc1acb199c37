"""Activations as rows, ``[n, C]`` with a sample a row: their layout in memory, their dtypes and their products."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from swbn_lightning.norms.torch_internals import (
    are_transforms_active,
    in_forward_derivatives,
    is_exporting,
    is_legacy_batched,
)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit types, the type itself otherwise: a step of 1e-5 vanishes in bfloat16."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def widest_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Under autocast the products would be cast again, and the state with them.

    Nothing at all where it is off, so that an exported network holds plain operators.
    """
    # torch 2.10's compiler cannot trace is_autocast_available. Every device that it compiles for has autocast.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    if available and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def is_transformed() -> bool:
    """Whether a forward runs under what autograd functions of one's own do not support: there the formulas are plain.

    Tracing by ``torch.jit``, ``torch.export``, transforms by ``torch.func`` and forward-mode derivatives.
    """
    tracing = torch.jit.is_tracing() or is_exporting() or are_transforms_active()
    return tracing or in_forward_derivatives()


def num_samples(x: Tensor) -> int:
    """``n``, the values a channel: ``N``, ``N * L`` or ``N * H * W``."""
    return x.shape[0] * math.prod(x.shape[2:])


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """``[C]`` shaped so that it broadcasts over dimension 1 of ``like``."""
    return values.view(1, -1, *([1] * (like.dim() - 2)))


def batch_mean(x: Tensor) -> Tensor:
    """Mean of each channel, ``[C]``."""
    return x.to(accumulation_dtype(x.dtype)).mean([0, *range(2, x.dim())])


def subtract(x: Tensor, mean: Tensor) -> Tensor:
    """``x - mean`` per channel: in the arithmetic of ``mean``, returned in the dtype of ``x``."""
    return (x - per_channel(mean, x)).to(x.dtype)


def channels_are_last(x: Tensor) -> bool:
    """Whether the channels lie next to each other in memory, so that samples are rows without a copy."""
    return x.dim() == 2 or x.movedim(1, -1).is_contiguous()


def as_rows(x: Tensor) -> Tensor:
    """``[N, C, ...]`` as ``[n, C]``: a view where the channels lie last in memory, a copy otherwise."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


_PART = 1024  # rows that are cast to float32 at a time
_FEWEST_CONVOLVED = 4096  # rows; with fewer there is nothing to gain
_IMAGES = 16  # into which rows are divided for a convolution; of a single one oneDNN makes a matrix product


def convolves(rows: Tensor, num_groups: int) -> bool:
    """Whether products with ``rows`` are made as 1x1 convolutions, without derivatives.

    On a CPU oneDNN's take 0.6 to 0.9 times as long as the matrix product with a tall and narrow matrix.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or is_transformed() or is_legacy_batched(rows):
        return False
    fits = num_groups == 1 and rows.dtype == torch.float32 and len(rows) >= _FEWEST_CONVOLVED
    onednn = torch.backends.mkldnn
    return fits and rows.device.type == "cpu" and onednn.is_available() and bool(onednn.enabled)


def _as_images(rows: Tensor) -> Tensor:
    number = _IMAGES if len(rows) % _IMAGES == 0 else 1
    return rows.reshape(number, -1, 1, rows.shape[1]).movedim(-1, 1)


def gram(a: Tensor, b: Tensor, num_groups: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    """``a^T b`` of two ``[n, C]``, its blocks of ``[g, C/g, C/g]``; summed in ``dtype``, or else float32 or better."""
    dtype = dtype or accumulation_dtype(a.dtype)
    if dtype == torch.float32 and convolves(a, num_groups):
        return _gram_by_convolution(a, b)
    if a.dtype == dtype:
        return _blocks_of_product(a, b, num_groups)
    plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    if plain and a.device.type == "cuda" and dtype == torch.float32:
        return _blocks_of_product(a, b, num_groups, out_dtype=dtype)  # 16-bit operands, which a GPU sums in float32
    if not plain or a.device.type == "cuda" or len(a) <= _PART:
        return _blocks_of_product(a.to(dtype), b.to(dtype), num_groups)
    # Part by part: the whole in float32 would be more than all else that the layer needs.
    width = a.shape[1] // num_groups
    total = a.new_zeros(num_groups, width, width, dtype=dtype)
    for x, y in zip(a.split(_PART), b.split(_PART), strict=True):
        total += _blocks_of_product(x.to(dtype), y.to(dtype), num_groups)
    return total


def _gram_by_convolution(a: Tensor, b: Tensor) -> Tensor:
    """The gradient of a 1x1 convolution's weight."""
    kernel = a.new_empty(a.shape[1], b.shape[1], 1, 1)  # of which only the shape counts
    sizes: tuple[Any, ...] = (None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (False, True, False))
    return torch.ops.aten.convolution_backward(_as_images(a), _as_images(b), kernel, *sizes)[1].view(
        1, *kernel.shape[:2]
    )


def _blocks_of_product(a: Tensor, b: Tensor, num_groups: int, **options: Any) -> Tensor:
    if num_groups == 1:
        return torch.ops.aten.mm(a.mT, b, **options).unsqueeze(0)
    a, b = (rows.unflatten(1, (num_groups, -1)).transpose(0, 1) for rows in (a, b))
    return torch.ops.aten.bmm(a.mT, b, **options)


def scaled(whitening_matrix: Tensor, weight: Tensor | None) -> Tensor:
    """``diag(gamma) W``: folded into ``W``, gamma costs no pass over the activation."""
    w = whitening_matrix
    return w if weight is None else w * weight.to(w.dtype).view(*w.shape[:2], 1)


def multiply_convolved(matrix: Tensor, rows: Tensor, start: Tensor, shape: torch.Size) -> Tensor:
    """The same as :func:`multiply` with channels last and a ``start`` of ``[C]``, where :func:`convolves`."""
    kernel = matrix[0, :, :, None, None].to(rows.dtype)
    y = F.conv2d(_as_images(rows), kernel, start.to(rows.dtype))
    return y.movedim(1, -1).reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def multiply(matrix: Tensor, rows: Tensor, start: Tensor | None, shape: torch.Size, last: bool) -> Tensor:
    """``start + A x`` of each row of ``[n, C]`` as ``[N, C, ...]``, the channels ``last`` in memory or contiguous.

    Args:
        matrix: ``A``, its blocks ``[g, C/g, C/g]``.
        rows: ``[n, C]``.
        start: ``[n, C]`` in the dtype of ``rows``, a tensor of the caller's own that is used up; or None for 0.
        shape: of the result.
        last: where its channels lie; for several groups by way of a copy.
    """
    matrix = matrix.to(rows.dtype)
    groups, batch = matrix.shape[0], shape[0]
    if groups == 1 and start is not None and not last:
        images, start = (values.view(batch, -1, shape[1]).mT for values in (rows, start))
        return torch.baddbmm(start, matrix.expand(batch, -1, -1), images).view(shape)
    if groups == 1:
        y = rows @ matrix[0].mT if start is None else start.addmm_(rows, matrix[0].mT)
    else:
        y = torch.bmm(rows.unflatten(1, (groups, -1)).transpose(0, 1), matrix.mT).transpose(0, 1).reshape(rows.shape)
        y = y if start is None else y + start
    y = y.view(batch, *shape[2:], shape[1]).movedim(-1, 1)
    return y if last else y.contiguous()


def affine(matrix: Tensor, rows: Tensor, start: Tensor | None, shape: torch.Size, last: bool) -> Tensor:
    """``start + A x`` of each row as :func:`multiply`, with a ``start`` of ``[C]``; no view, without a gradient.

    For what a layer puts out: an activation behind it may work in place, which a view would not allow.
    """
    matrix = matrix.to(rows.dtype)
    start = rows.new_zeros(rows.shape[1]) if start is None else start.to(rows.dtype)
    groups, batch = matrix.shape[0], shape[0]
    if last and len(shape) == 4 and convolves(rows, groups):
        images = rows.view(batch, *shape[2:], shape[1]).movedim(-1, 1)
        return F.conv2d(images, matrix[0, :, :, None, None], start)
    y = empty_like_rows(rows, shape, last)
    if groups > 1:
        blocks = torch.bmm(rows.unflatten(1, (groups, -1)).transpose(0, 1), matrix.mT).transpose(0, 1)
        torch.add(blocks.reshape(batch, *y.shape[2:], y.shape[1]), start, out=y.movedim(1, -1))
    elif channels_are_last(y):
        torch.addmm(start, rows, matrix[0].mT, out=y.movedim(1, -1).view(rows.shape))
    else:
        images = rows.view(batch, -1, y.shape[1]).mT
        torch.baddbmm(start.unsqueeze(1), matrix.expand(batch, -1, -1), images, out=y.view(batch, y.shape[1], -1))
    return y


def empty_like_rows(rows: Tensor, shape: torch.Size, last: bool) -> Tensor:
    """An empty ``[N, C, ...]``, the channels last in memory or contiguous; no view, in the dtype of ``rows``."""
    if not last:
        return rows.new_empty(shape)
    strides = [shape[1]]
    for size in reversed(shape[2:]):
        strides.append(strides[-1] * size)
    return rows.new_empty_strided(shape, (strides[-1], 1, *reversed(strides[:-1])))


def whiten(xs: Tensor, whitening_matrix: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``gamma * (W xs) + beta`` of ``[N, C, ...]`` (Algorithm 1, steps 9 and 10), in the dtype and layout of ``xs``."""
    groups, width, _ = whitening_matrix.shape
    matrix = scaled(whitening_matrix, weight).reshape(groups * width, width).to(xs.dtype)
    bias = None if bias is None else bias.to(xs.dtype)
    if xs.dim() == 2:
        return F.conv1d(xs.unsqueeze(-1), matrix.unsqueeze(-1), bias, groups=groups).squeeze(-1)
    # A convolution of size one: the one product that keeps contiguous and channels_last as they are.
    if xs.dim() == 3:
        return F.conv1d(xs, matrix.unsqueeze(-1), bias, groups=groups)
    kernel = matrix[:, :, None, None]
    if xs.dim() == 4:
        return F.conv2d(xs, kernel, bias, groups=groups)
    # On a CPU a 16-bit conv3d does not keep channels_last_3d; depth and height as one dimension is a view of both.
    return F.conv2d(xs.flatten(2, 3), kernel, bias, groups=groups).unflatten(2, xs.shape[2:4])
