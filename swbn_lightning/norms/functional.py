"""The formulas of the whitening layers as pure functions.

Sources: Zhang et al., *Stochastic Whitening Batch Normalization*, CVPR 2021, Algorithm 1 (training),
Algorithm 3 (prediction), equations 1-3; for its peers, Huang et al., *Iterative Normalization*, CVPR 2019, and
Huang et al., *Decorrelated Batch Normalization*, CVPR 2018. Layers, tests and documentation all use these.

Conventions. An activation is ``[N, C]`` or ``[N, C, ...]``: channels are dimension 1 and every other
position is a sample, so ``n = N`` or ``N * L`` or ``N * H * W``. Matrices carry a leading group
dimension, ``[num_groups, C / num_groups, C / num_groups]``; the paper has one group. Whatever is of
size ``C`` or ``C x C`` is float32 or better, whatever the dtype of the activation.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from swbn_lightning.norms.products import accumulation_dtype, as_rows, channels_are_last, gram, scaled

Criterion = Literal["fro", "kl"]
CRITERIA: tuple[str, ...] = get_args(Criterion)


_PART_BYTES = 2**20  # of rows that are squared at a time


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """``[C]`` shaped so that it broadcasts over dimension 1 of ``like``."""
    return values.view(1, -1, *([1] * (like.dim() - 2)))


def num_samples(x: Tensor) -> int:
    """``n``, the values a channel: ``N``, ``N * L`` or ``N * H * W``."""
    return x.shape[0] * math.prod(x.shape[2:])


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Batch mean and *unbiased* variance, ``[C]`` each (Algorithm 1, steps 1 and 2).

    BatchNorm normalises with the biased variance; the paper prints ``1/(n-1)``.
    """
    dims = [0, *range(2, x.dim())]
    variance, mean = torch.var_mean(x.to(accumulation_dtype(x.dtype)), dims, correction=1)
    return mean, variance


def standardize(x: Tensor, mean: Tensor, variance: Tensor, eps: float = 1e-8) -> Tensor:
    """``(x - mean) / sqrt(variance + eps)`` per channel (Algorithm 1, step 5), in the dtype of ``x``.

    The arithmetic is that of ``mean``: the subtraction comes first, so that a mean many deviations
    from zero costs no precision.
    """
    scale = torch.rsqrt(variance + eps)
    return ((x - per_channel(mean, x)) * per_channel(scale, x)).to(x.dtype)


def standardize_plainly(x: Tensor, eps: float = 1e-8) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`standardize` by the batch's own :func:`moments`, ``(xs, mean, variance)``, in operators of one step each.

    What :func:`standardize_batch` does in one operator, whose forward-mode derivative is wrong when it is derived again
    in forward mode. Mean and variance are constants to derivatives of every kind.
    """
    wide = x.to(accumulation_dtype(x.dtype))
    dims = [0, *range(2, x.dim())]
    mean = wide.mean(dims)
    centred = wide - per_channel(mean, x)
    variance = centred.square().sum(dims) / (num_samples(x) - 1)
    xs = centred * per_channel(torch.rsqrt(variance + eps), x)
    return xs.to(x.dtype), mean.detach(), variance.detach()


def standardize_batch(x: Tensor, eps: float = 1e-8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`moments` and :func:`standardize` in BatchNorm's own fused operator: ``(xs, mean, variance, rstd)``.

    The gradient goes through mean and variance. The operator divides by ``sqrt(b + e)`` with the *biased*
    variance ``b``; with ``r = (n - 1) / n``, ``b = r v`` and ``e = r eps`` that is ``sqrt(r) sqrt(v + eps)``, so
    a constant weight of ``sqrt(r)`` makes it the paper's. Mean, variance and ``rstd = 1 / sqrt(v + eps)`` carry no
    gradient.
    """
    shift: Tensor | None = None
    if x.device.type == "cpu" and x.dtype.itemsize >= 4 and channels_are_last(x):
        # There the operator adds rows up one by one, and a mean many deviations from zero leaves noise alone. What is
        # subtracted first is a constant to the gradient, which does not see a shift.
        shift = batch_mean(x).detach()
        x = center(x, shift)
    count = num_samples(x)
    ratio = (count - 1) / count
    dtype = accumulation_dtype(x.dtype)
    weight = torch.full((x.shape[1],), math.sqrt(ratio), dtype=dtype, device=x.device)
    xs, mean, inverse = torch.native_batch_norm(x, weight, None, None, None, True, 0.0, ratio * eps)
    # torch.compile takes them for 16 bit on a CPU; they are not.
    mean, inverse = mean.to(dtype).detach(), inverse.to(dtype).detach()
    variance = inverse.pow(-2).div_(ratio).sub_(eps).clamp_(min=0)
    mean = mean if shift is None else mean + shift
    return xs, mean, variance, inverse * math.sqrt(ratio)


def centers_first(x: Tensor) -> bool:
    """Whether :func:`center_batch` is the better start: on a CPU PyTorch's operator takes longer."""
    return x.device.type == "cpu" and x.dtype.itemsize >= 4


def center_batch(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``rows - mean`` of ``[n, C]``, with :func:`moments`; without a gradient.

    The deviation is left to be folded into whatever the rows are multiplied by next, so that no pass over them divides
    by it.
    """
    mean = batch_mean(rows)
    centred = rows - mean
    return centred, mean, _sum_of_squares(centred) / (len(rows) - 1)


def _sum_of_squares(rows: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return rows.square().sum(0)
    # Part by part, a second tensor of this size being more than the layer otherwise needs.
    part = max(1, _PART_BYTES // (rows.shape[1] * rows.element_size()))
    total = rows.new_zeros(rows.shape[1])
    for values in rows.split(part):
        total += values.square().sum(0)
    return total


def standardize_fixed(x: Tensor, mean: Tensor, variance: Tensor, eps: float = 1e-8) -> Tensor:
    """:func:`standardize` by statistics that are constants, in one pass (Algorithm 3, step 1)."""
    dtype = accumulation_dtype(x.dtype)
    return F.batch_norm(x, mean.to(dtype), variance.to(dtype), training=False, eps=eps)


def batch_mean(x: Tensor) -> Tensor:
    """Mean of each channel, ``[C]``."""
    return x.to(accumulation_dtype(x.dtype)).mean([0, *range(2, x.dim())])


def center(x: Tensor, mean: Tensor) -> Tensor:
    """``x - mean`` per channel: subtracted in the arithmetic of ``mean``, returned in the dtype of ``x``."""
    return (x - per_channel(mean, x)).to(x.dtype)


def covariance(
    xs: Tensor, num_groups: int = 1, scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """``xs^T xs / n`` of standardised (or centred) activations, ``[g, C/g, C/g]`` (Algorithm 1, step 6).

    Divided by ``n``, not by ``n - 1``; 0 for no samples. The values of ``xs`` as they are, multiplied and summed in
    float32 or better.

    Args:
        xs: ``[N, C, ...]``.
        num_groups: blocks of channels whose covariances are taken apart.
        scale: ``[C]``, by which ``xs`` would have to be multiplied first, such as ``1 / sqrt(var + eps)``.
        dtype: of the result and its sums; by default float32 or better.
    """
    rows = as_rows(xs)
    s = gram(rows, rows, num_groups, dtype) / max(rows.shape[0], 1)
    return s if scale is None else scaled(scaled(s, scale).mT, scale)


def whitening_loss(covariance_of_output: Tensor, criterion: str = "fro") -> Tensor:
    """How far a covariance is from the identity: the whitening criteria of equations 1 and 2.

    Args:
        covariance_of_output: ``W S W^T``, ``[..., d, d]``.
        criterion: ``"kl"``: ``(tr C - ln det C - d) / 2``, infinite for a singular ``C``;
            ``"fro"``: ``norm_F(I - C) / 2``.

    Returns:
        ``[...]``, zero only at the identity.
    """
    _check_criterion(criterion)
    d = covariance_of_output.shape[-1]
    if criterion == "kl":
        trace = covariance_of_output.diagonal(dim1=-2, dim2=-1).sum(-1)
        return 0.5 * (trace - torch.logdet(covariance_of_output) - d)
    eye = torch.eye(d, dtype=covariance_of_output.dtype, device=covariance_of_output.device)
    return 0.5 * torch.linalg.matrix_norm(eye - covariance_of_output)


def whitening_update(whitening_matrix: Tensor, covariance: Tensor, step_size: float, criterion: str = "fro") -> Tensor:
    """One step of W and its symmetrisation (Algorithm 1, steps 7 and 8; equation 3).

    ========  ======================================================
    ``kl``    ``dW = (W S W^T - I) W`` (a relative gradient)
    ``fro``   ``dW = (W S W^T - I) W S / norm_F(I - W S W^T)``; 0 where that norm is 0
    ========  ======================================================

    Args:
        whitening_matrix: ``W``, ``[..., d, d]``.
        covariance: ``S``, the covariance of the standardised batch, ``[..., d, d]``.
        step_size: ``alpha``; 1e-5 in the paper.
        criterion: ``"fro"`` or ``"kl"``.

    Returns:
        ``(V + V^T) / 2`` with ``V = W - alpha dW``: a new tensor.
    """
    _check_criterion(criterion)
    w = whitening_matrix
    ws = w @ covariance
    excess = ws @ w.mT
    excess.diagonal(dim1=-2, dim2=-1).sub_(1)
    if criterion == "kl":
        delta = excess @ w
    else:
        norm = torch.linalg.matrix_norm(excess, keepdim=True)
        delta = excess @ ws / norm.clamp(min=torch.finfo(norm.dtype).tiny)  # 0 where the norm is; NaN where it is NaN
    stepped = torch.sub(w, delta, alpha=step_size)
    return (stepped + stepped.mT) / 2


def keep_in_range(
    whitening_matrix: Tensor, covariance: Tensor, samples: int | Tensor, weight: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``W``, made smaller as a whole where a value of ``gamma * (W xs)`` could otherwise overflow in ``dtype``.

    No value exceeds ``gamma_i sqrt(n (W S W^T)_ii)``, because ``sum_j y_ij^2 = gamma_i^2 n (W S W^T)_ii``. Where ``W``
    whitens, that diagonal is 1: only a ``W`` that has diverged is touched, and each group's by itself.

    Args:
        whitening_matrix: ``W``, ``[g, d, d]``.
        covariance: ``S`` of the standardised batch, ``[g, d, d]``.
        samples: ``n``.
        weight: gamma, ``[g * d]``, or None for ones.
        dtype: of the output.
    """
    w = whitening_matrix
    if weight is not None:
        w = w * weight.to(w.dtype).view(*w.shape[:2], 1)
    largest = w.abs().amax((-2, -1), keepdim=True).clamp(min=1)
    w = w / largest  # so that no square overflows on the way
    variances = ((w @ covariance) * w).sum(-1).amax(-1)[:, None, None]
    bound = largest * (samples * variances).sqrt().clamp(min=1)
    return whitening_matrix * (torch.finfo(dtype).max / bound).clamp(max=1)


def whiten(xs: Tensor, whitening_matrix: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``gamma * (W xs) + beta`` (SWBN's Algorithm 1, steps 9 and 10), in the dtype and layout of ``xs``.

    Gamma is folded into ``W``, so that it costs no pass over the activation.

    Args:
        xs: standardised activation, ``[N, C, ...]``.
        whitening_matrix: ``[g, C/g, C/g]``.
        weight: gamma, ``[C]``, or None for ones.
        bias: beta, ``[C]``, or None for zeros.
    """
    groups, width, _ = whitening_matrix.shape
    matrix = whitening_matrix.reshape(groups * width, width)
    if weight is not None:
        matrix = matrix * weight.to(matrix.dtype).unsqueeze(1)
    matrix = matrix.to(xs.dtype)
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


def _check_criterion(criterion: str) -> None:
    if criterion not in CRITERIA:
        raise ValueError(f"unknown whitening criterion {criterion!r}; known: {', '.join(CRITERIA)}.")
