"""Count, mean and centred second moment: the state from which every measure of whiteness is computed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from swbn_lightning.errors import InputError
from swbn_lightning.norms.passes.rows import as_rows

_NO_FLOAT64 = ("mps",)  # devices whose features are added up on the CPU
_BLOCK = 2**22  # values that are float64 at a time: 32 MiB


class FeatureMoments(Metric):
    """Count, mean and centred second moment of features, in float64, however the samples are split into batches.

    ``update`` takes ``[N, C]`` or ``[N, C, ...]``: dimension 1 holds the channels and every other position is a sample.
    The first update fixes the number of channels ``d``. Memory is ``d^2``. Batches are merged by the centred formula of
    Chan, Golub and LeVeque (1979), and so are the parts of several processes in ``compute``. ``compute`` returns the
    correlation matrix; the measures reduce it to a number. On a device without float64 (MPS), the state stays on the
    CPU.

    Args:
        kwargs: arguments of torchmetrics' ``Metric``.
    """

    # `forward` would merge a batch with a state of another shape: the first batch decides the channels.
    full_state_update = True
    higher_is_better = False
    is_differentiable = False

    moments: Tensor  # [d + 1, d + 1]: count, mean and scatter in one, so that one reduction sees all of them

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"dist_sync_fn": gather_moments, **kwargs})
        self.add_state("moments", torch.zeros(1, 1, dtype=torch.float64), dist_reduce_fx=merge_moments)

    def update(self, features: Tensor) -> None:
        """Add features ``[N, C]`` or ``[N, C, ...]``.

        Raises:
            InputError: the features have fewer than two dimensions, complex values, or another number of channels than
                before.
        """
        d = self.num_features or (features.shape[1] if features.dim() > 1 else 0)
        if features.dim() < 2 or features.shape[1] != d or d == 0 or features.is_complex():
            expected = d or "C"
            raise InputError(
                f"expected real features [N, {expected}] or [N, {expected}, ...], got {list(features.shape)} "
                f"of {features.dtype}."
            )
        if features.device.type in _NO_FLOAT64:
            features = features.to(self.moments.device)
        self.moments = _resized(self.moments, d)
        rows = as_rows(features.detach())
        if len(rows) == 0:
            return
        for block in rows.split(max(1, _BLOCK // d)):
            self.moments = merge_moments(torch.stack([self.moments, _moments_of(block.double())]))

    def compute(self) -> Tensor:
        """Return the correlation matrix of the ``d'`` channels that vary, ``[d', d']``, float64."""
        return self.correlation()

    @property
    def num_features(self) -> int:
        """Number of channels, ``d``; 0 before the first update."""
        return len(self.moments) - 1

    @property
    def count(self) -> Tensor:
        """Number of samples, ``N``, as a scalar tensor."""
        return self.moments[0, 0]

    @property
    def mean(self) -> Tensor:
        """Mean of each channel, ``[d]``."""
        return self.moments[0, 1:]

    @property
    def scatter(self) -> Tensor:
        """Sum of the outer products of the centred samples, ``[d, d]``."""
        return self.moments[1:, 1:]

    def covariance(self, varying: bool = False) -> Tensor:
        """Return the covariance, divided by the count, ``[d, d]``.

        Args:
            varying: leave out constant channels.
        """
        covariance = self.scatter / self.count
        if varying:
            kept = self.varies()
            return covariance[kept][:, kept]
        return covariance

    def correlation(self, varying: bool = True) -> Tensor:
        """Return the correlation matrix.

        Args:
            varying: leave out constant channels, which have no correlation. Otherwise their rows and columns are NaN.
        """
        covariance, kept = self.covariance(), self.varies()
        deviation = torch.where(kept, covariance.diagonal().clamp(min=0).sqrt(), torch.nan)
        correlation = covariance / torch.outer(deviation, deviation)
        return correlation[kept][:, kept] if varying else correlation

    def varies(self) -> Tensor:
        """Return which channels are not constant, ``[d]``. A non-finite channel does not count as constant."""
        # A constant that float64 cannot average exactly leaves a deviation of rounding size.
        deviation = self.covariance().diagonal().clamp(min=0).sqrt()
        return ~(deviation <= 1e-12 * self.mean.abs())

    def num_constant(self) -> int:
        """Return the number of channels that never varied."""
        return int((~self.varies()).sum())

    def num_samples(self) -> int:
        """Return ``N``. Even independent features have an RMS correlation of about ``1/sqrt(N)``."""
        return int(self.count)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> "FeatureMoments":
        if fn(torch.empty(0)).device.type in _NO_FLOAT64:
            return self

        def moved(tensor: Tensor) -> Tensor:  # not cast, with what holds the metric (`model.to(torch.bfloat16)`)
            new = fn(tensor)
            return new if new.dtype == tensor.dtype else tensor.to(new.device)

        return super()._apply(moved, *args, **kwargs)  # type: ignore[return-value]


def merge_moments(parts: Tensor) -> Tensor:
    """Merge the moments of parts into those of all samples: ``[P, d + 1, d + 1]`` to ``[d + 1, d + 1]``."""
    counts, means = parts[:, 0, 0], parts[:, 0, 1:]
    merged = parts.sum(0)
    mean = (counts / merged[0, 0].clamp(min=1)) @ means
    apart = (means - mean) * counts.sqrt().unsqueeze(1)
    merged[1:, 1:] += apart.mT @ apart
    merged[0, 1:] = merged[1:, 0] = mean
    return merged


def gather_moments(moments: Tensor, group: Any = None) -> list[Tensor]:
    """Return the moments of every process; one without samples gets the size of the others."""
    parts = gather_all_tensors(moments, group)
    sizes = {len(part) - 1 for part in parts if len(part) > 1}
    if len(sizes) > 1:
        raise InputError(f"features of {' and '.join(map(str, sorted(sizes)))} channels cannot be merged.")
    return [_resized(part, max(sizes, default=0)) for part in parts]


def _moments_of(rows: Tensor) -> Tensor:
    mean = rows.mean(0)
    centred = rows - mean
    moments = rows.new_empty(rows.shape[1] + 1, rows.shape[1] + 1)
    moments[0, 0] = len(rows)
    moments[0, 1:] = moments[1:, 0] = mean
    torch.matmul(centred.mT, centred, out=moments[1:, 1:])
    return moments


def _resized(moments: Tensor, num_features: int) -> Tensor:
    """Return moments with ``num_features`` channels if they have none yet."""
    return moments if len(moments) > 1 else moments.new_zeros(num_features + 1, num_features + 1)
