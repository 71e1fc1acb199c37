"""How white features are, as torchmetrics metrics over a stream of batches."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from swbn_lightning.errors import InputError


class FeatureMoments(Metric):
    """Count, mean and centred second moment of features, in float64, exact whatever the batches.

    ``update`` takes ``[N, C]`` or ``[N, C, ...]``: channels are dimension 1, every other position is a sample.
    Batches are merged by the centred formula of Chan, Golub and LeVeque (1979), so a large mean costs no
    precision. The first update decides the number of channels ``d``; memory is ``d^2``. ``compute`` gives the
    correlation matrix; the measures below reduce it.

    Args:
        kwargs: as torchmetrics' ``Metric``.
    """

    full_state_update = False
    higher_is_better = False
    is_differentiable = False

    count: Tensor
    mean: Tensor
    scatter: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # None: processes' states are stacked, and merged where they are read.
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)
        self.add_state("mean", torch.zeros(0, dtype=torch.float64), dist_reduce_fx=None)
        self.add_state("scatter", torch.zeros(0, 0, dtype=torch.float64), dist_reduce_fx=None)
        self.set_dtype(torch.float64)

    def update(self, features: Tensor) -> None:
        """Take in ``[N, C]`` or ``[N, C, ...]``.

        Raises:
            InputError: fewer than two dimensions, or another number of channels than before.
        """
        d = self.num_features or (features.shape[1] if features.dim() > 1 else 0)
        if features.dim() < 2 or features.shape[1] != d:
            expected = d or "C"
            raise InputError(f"expected features [N, {expected}] or [N, {expected}, ...], got {list(features.shape)}.")
        if self.num_features == 0:
            self.mean, self.scatter = self.mean.new_zeros(d), self.scatter.new_zeros(d, d)
        samples = features.detach().movedim(1, -1).reshape(-1, d).double()
        if len(samples) == 0:
            return
        mean = samples.mean(0)
        centred = samples - mean
        count = self.count.new_tensor(float(len(samples)))
        merged = _merge((self.count, self.mean, self.scatter), (count, mean, centred.mT @ centred))
        self.count, self.mean, self.scatter = merged

    def compute(self) -> Tensor:
        """The correlation matrix of the features that vary, ``[d', d']``; float64."""
        return self.correlation()

    @property
    def num_features(self) -> int:
        """``d``; 0 before the first update."""
        return self.mean.shape[-1]

    def covariance(self) -> Tensor:
        """The covariance, divided by the count, ``[d, d]``."""
        count, _, scatter = self._merged()
        return scatter / count

    def correlation(self) -> Tensor:
        """The correlation matrix. A constant channel has no correlation and is kept out."""
        covariance = self.covariance()
        kept = self._varies()
        deviation = covariance.diagonal()[kept].sqrt()
        return covariance[kept][:, kept] / torch.outer(deviation, deviation)

    def num_constant(self) -> int:
        """Channels that never varied."""
        return int((~self._varies()).sum())

    def num_samples(self) -> int:
        """``N``. Independent features still show an RMS correlation of about ``1/sqrt(N)``."""
        return int(self._merged()[0])

    def _varies(self) -> Tensor:
        # A constant that float64 cannot average exactly leaves a deviation of rounding size.
        _, mean, _ = self._merged()
        return self.covariance().diagonal().sqrt() > 1e-12 * mean.abs()

    def _merged(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.count.dim() == 0:
            return self.count, self.mean, self.scatter
        parts = list(zip(self.count, self.mean, self.scatter, strict=True))  # after a distributed sync
        merged = parts[0]
        for part in parts[1:]:
            merged = _merge(merged, part)
        return merged


class CorrelationDistance(FeatureMoments):
    """Correlation-to-identity distance, ``norm_F(Corr - I)``: 0 for uncorrelated features.

    Args:
        normalized: divide by ``sqrt(d (d - 1))``: the RMS off-diagonal correlation, in [0, 1], which compares
            layers of different width.
        kwargs: as torchmetrics' ``Metric``.
    """

    def __init__(self, normalized: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.normalized = normalized

    def compute(self) -> Tensor:
        """A float64 scalar; NaN if no channel varied."""
        return correlation_distance(self.correlation(), self.normalized)


def correlation_distance(correlation: Tensor, normalized: bool = False) -> Tensor:
    """``norm_F(Corr - I)`` of ``[d, d]``; with ``normalized`` divided by ``sqrt(d (d - 1))``."""
    d = len(correlation)
    if d == 0:
        return correlation.new_tensor(float("nan"))
    distance = torch.linalg.matrix_norm(correlation - torch.eye(d, dtype=correlation.dtype, device=correlation.device))
    return distance / max(d * (d - 1), 1) ** 0.5 if normalized else distance


def _merge(a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    count = a[0] + b[0]
    difference = b[1] - a[1]
    share = torch.where(count > 0, b[0] / count.clamp(min=1), 0.0)
    scatter = a[2] + b[2] + torch.outer(difference, difference) * (a[0] * share)
    return count, a[1] + difference * share, scatter
