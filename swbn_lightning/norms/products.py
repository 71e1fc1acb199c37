"""Activations as rows, ``[n, C]`` with a sample a row: their layout in memory, their dtypes and their products."""

from typing import Any

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit types, the type itself otherwise: a step of 1e-5 vanishes in bfloat16."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def widest_dtype(device: torch.device) -> torch.dtype:
    """float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def channels_are_last(x: Tensor) -> bool:
    """Whether the channels lie next to each other in memory, so that samples are rows without a copy."""
    return x.dim() == 2 or x.movedim(1, -1).is_contiguous()


def as_rows(x: Tensor) -> Tensor:
    """``[N, C, ...]`` as ``[n, C]``: a view where the channels lie last in memory, a copy otherwise."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


_PART = 1024  # rows that are cast to float32 at a time


def gram(a: Tensor, b: Tensor, num_groups: int = 1, dtype: torch.dtype | None = None) -> Tensor:
    """``a^T b`` of two ``[n, C]``, its blocks of ``[g, C/g, C/g]``; summed in ``dtype``, or else float32 or better."""
    dtype = dtype or accumulation_dtype(a.dtype)
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


def _blocks_of_product(a: Tensor, b: Tensor, num_groups: int, **options: Any) -> Tensor:
    if num_groups == 1:
        return torch.ops.aten.mm(a.mT, b, **options).unsqueeze(0)
    a, b = (rows.unflatten(1, (num_groups, -1)).transpose(0, 1) for rows in (a, b))
    return torch.ops.aten.bmm(a.mT, b, **options)


def scaled(whitening_matrix: Tensor, weight: Tensor | None) -> Tensor:
    """``diag(gamma) W``: folded into ``W``, gamma costs no pass over the activation."""
    w = whitening_matrix
    return w if weight is None else w * weight.to(w.dtype).view(*w.shape[:2], 1)


def multiply(matrix: Tensor, rows: Tensor, start: Tensor | None, shape: torch.Size, last: bool) -> Tensor:
    """``start + A x`` of each row of ``[n, C]``, in its dtype.

    Args:
        matrix: ``A``, its blocks ``[g, C/g, C/g]``.
        rows: ``[n, C]``.
        start: ``[n, C]`` in the dtype of ``rows``, a tensor of the caller's own that is used up; or None for 0.
        shape: of the result, ``[N, C, ...]``.
        last: whether the result shall have its channels last in memory, or else be contiguous; written so at once, but
            by way of a copy for several groups.
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


def multiply_into(y: Tensor, matrix: Tensor, rows: Tensor, start: Tensor | None) -> Tensor:
    """``start + A x`` of each row into ``y``, with a ``start`` of ``[C]``; without a gradient.

    For what a layer puts out: an activation behind it may work in place, which a view would not allow.
    """
    matrix = matrix.to(rows.dtype)
    start = rows.new_zeros(rows.shape[1]) if start is None else start.to(rows.dtype)
    groups, batch = matrix.shape[0], y.shape[0]
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
