"""The formulas of SWBN as pure functions.

Source: Zhang et al., *Stochastic Whitening Batch Normalization*, CVPR 2021: Algorithm 1 (training), Algorithm 3
(prediction) and equations 1 to 3.

An activation is ``[N, C]`` or ``[N, C, ...]``. Dimension 1 holds the channels and every other position is a sample, so
``n`` is ``N``, ``N * L`` or ``N * H * W``. Matrices have a leading group dimension, ``[num_groups, C / num_groups, C /
num_groups]``; the paper has one group. Everything of size ``C`` or ``C x C`` is float32 or better, whatever the dtype
of the activation.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from swbn_lightning.errors import unknown_name
from swbn_lightning.norms.passes.rows import accumulation_dtype, as_rows, gram, per_channel

Criterion = Literal["fro", "kl"]
CRITERIA: tuple[str, ...] = get_args(Criterion)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the batch mean and *unbiased* variance, ``[C]`` each (Algorithm 1, steps 1 and 2).

    The paper prints ``1/(n-1)``. BatchNorm normalises with the biased variance.
    """
    dims = [0, *range(2, x.dim())]
    variance, mean = torch.var_mean(x.to(accumulation_dtype(x.dtype)), dims, correction=1)
    return mean, variance


def standardize(x: Tensor, mean: Tensor, variance: Tensor, eps: float = 1e-8) -> Tensor:
    """Return ``(x - mean) / sqrt(variance + eps)`` per channel, in the dtype of ``x`` (Algorithm 1, step 5).

    The computation uses the dtype of ``mean``. The mean is subtracted first, so a mean many standard deviations from
    zero costs no precision.
    """
    scale = torch.rsqrt(variance + eps)
    return ((x - per_channel(mean, x)) * per_channel(scale, x)).to(x.dtype)


def covariance(xs: Tensor, num_groups: int = 1) -> Tensor:
    """Return ``xs^T xs / n`` of standardised or centred activations, ``[g, C/g, C/g]`` (Algorithm 1, step 6).

    The divisor is ``n``, not ``n - 1``; without samples the result is 0. Products are computed and summed in float32 or
    better.

    Args:
        xs: ``[N, C, ...]``.
        num_groups: number of channel groups, each with a covariance of its own.
    """
    rows = as_rows(xs)
    return gram(rows, rows, num_groups) / max(rows.shape[0], 1)


def whitening_loss(covariance_of_output: Tensor, criterion: str = "fro") -> Tensor:
    """Return the distance of a covariance from the identity, by the criteria of equations 1 and 2.

    Args:
        covariance_of_output: ``C = W S W^T``, ``[..., d, d]``.
        criterion: ``"kl"``: ``(tr C - ln det C - d) / 2``, infinite for a singular ``C``; ``"fro"``: ``norm_F(I - C) /
            2``.

    Returns:
        ``[...]``; zero only at the identity.

    Raises:
        InputError: unknown criterion.
    """
    check_criterion(criterion)
    d = covariance_of_output.shape[-1]
    if criterion == "kl":
        trace = covariance_of_output.diagonal(dim1=-2, dim2=-1).sum(-1)
        return 0.5 * (trace - torch.logdet(covariance_of_output) - d)
    eye = torch.eye(d, dtype=covariance_of_output.dtype, device=covariance_of_output.device)
    return 0.5 * torch.linalg.matrix_norm(eye - covariance_of_output)


def whitening_update(whitening_matrix: Tensor, covariance: Tensor, step_size: float, criterion: str = "fro") -> Tensor:
    """Return W after one step and its symmetrisation (Algorithm 1, steps 7 and 8; equation 3).

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
        ``(V + V^T) / 2`` with ``V = W - alpha dW``, in a new tensor.

    Raises:
        InputError: unknown criterion.
    """
    check_criterion(criterion)
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


def check_criterion(criterion: str) -> None:
    """Raise :class:`InputError` if there is no such criterion."""
    if criterion not in CRITERIA:
        raise unknown_name("whitening criterion", criterion, CRITERIA)
