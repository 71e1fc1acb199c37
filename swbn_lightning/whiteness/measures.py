"""Measures of how far features are from white, as functions of their correlation or covariance matrix.

A constant channel has no correlation and is left out of both matrices, so ``d`` counts the varying channels. A measure
is ``inf`` if it grows without bound as the covariance becomes singular. It is NaN if no channel varies or if the
features were not finite.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from swbn_lightning.norms.functional import whitening_loss
from swbn_lightning.whiteness.moments import FeatureMoments


class Matrices:
    """The matrices of one set of features; eigenvalues are computed only once."""

    def __init__(self, moments: FeatureMoments) -> None:
        self.correlation = moments.correlation()
        self.covariance = moments.covariance(varying=True)

    @cached_property
    def eigenvalues(self) -> Tensor:
        """The eigenvalues of the covariance, ascending, ``[d]``."""
        if not self.covariance.isfinite().all():  # the decomposition itself would raise an error
            return torch.full_like(self.covariance.diagonal(), torch.nan)
        return torch.linalg.eigvalsh(self.covariance)


def correlation_distance(correlation: Tensor, normalized: bool = False) -> Tensor:
    """Return the correlation-to-identity distance, ``norm_F(Corr - I)``.

    Args:
        correlation: ``[d, d]``.
        normalized: divide by ``sqrt(d (d - 1))``, which gives the RMS off-diagonal correlation.
    """
    d = len(correlation)
    distance = _or_nan(torch.linalg.matrix_norm(correlation - _eye_like(correlation)), d)
    return distance / max(d * (d - 1), 1) ** 0.5 if normalized else distance


def mean_absolute_correlation(correlation: Tensor) -> Tensor:
    """Return the mean of ``|Corr_ij|``, ``i != j``, of a correlation matrix ``[d, d]``."""
    d = len(correlation)
    return _or_nan((correlation - _eye_like(correlation)).abs().sum() / max(d * (d - 1), 1), d)


def covariance_distance(covariance: Tensor) -> Tensor:
    """Return ``norm_F(Cov - I) / sqrt(d)`` of a covariance ``[d, d]``; it also sees variances other than 1."""
    d = len(covariance)
    return _or_nan(torch.linalg.matrix_norm(covariance - _eye_like(covariance)) / max(d, 1) ** 0.5, d)


def effective_rank(eigenvalues: Tensor) -> Tensor:
    """Return ``exp(-sum p_i ln p_i) / d`` with ``p = eigenvalues / sum``.

    It is 1 for equal eigenvalues and ``1/d`` for a single direction. This is the effective rank of Roy and Vetterli
    (EUSIPCO 2007), as a share of ``d``, and of the covariance instead of the data matrix.

    Args:
        eigenvalues: of the covariance, ``[d]``.
    """
    d = len(eigenvalues)
    positive = eigenvalues.clamp(min=0)
    return _or_nan(torch.special.entr(positive / positive.sum()).sum().exp() / max(d, 1), d)


def log10_condition_number(eigenvalues: Tensor) -> Tensor:
    """Return ``log10(largest / smallest)`` of eigenvalues ``[d]``; ``inf`` if the smallest is 0 up to rounding."""
    if len(eigenvalues) == 0:
        return eigenvalues.new_tensor(torch.nan)
    ratio = torch.log10(eigenvalues.max() / eigenvalues.min())
    return torch.where(is_singular(eigenvalues), torch.inf, ratio)


def criterion_of(matrices: Matrices, criterion: str) -> Tensor:
    """Return the whitening criterion ``"kl"`` or ``"fro"`` of the covariance (Zhang et al., CVPR 2021)."""
    d = len(matrices.covariance)
    loss = _or_nan(whitening_loss(matrices.covariance, criterion), d)
    if criterion == "kl" and d:  # rounding gives a singular matrix a determinant of either sign
        return torch.where(is_singular(matrices.eigenvalues), torch.inf, loss)
    return loss


def is_singular(eigenvalues: Tensor) -> Tensor:
    """Return whether the smallest eigenvalue is 0 up to the rounding of the decomposition, ``[]``."""
    smallest = torch.finfo(eigenvalues.dtype).eps * len(eigenvalues) * eigenvalues.max()
    return eigenvalues.min() <= smallest


#: Every measure by the name that logs and tables use.
MEASURES: dict[str, Callable[[Matrices], Tensor]] = {
    "distance": lambda m: correlation_distance(m.correlation),
    "rms": lambda m: correlation_distance(m.correlation, normalized=True),
    "mean_abs": lambda m: mean_absolute_correlation(m.correlation),
    "covariance": lambda m: covariance_distance(m.covariance),
    "effective_rank": lambda m: effective_rank(m.eigenvalues),
    "log10_condition": lambda m: log10_condition_number(m.eigenvalues),
    "kl": lambda m: criterion_of(m, "kl"),
    "fro": lambda m: criterion_of(m, "fro"),
}


def _eye_like(matrix: Tensor) -> Tensor:
    return torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _or_nan(value: Tensor, d: int) -> Tensor:
    return value if d else torch.full_like(value, torch.nan)
