"""The measures of whiteness as torchmetrics metrics over a stream of batches.

All have the state of :class:`~swbn_lightning.whiteness.FeatureMoments`. In a ``MetricCollection`` they share it, so
each batch is added only once. :func:`whiteness_metrics` makes such a collection.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from swbn_lightning.norms.functional import check_criterion
from swbn_lightning.whiteness.measures import MEASURES, Matrices
from swbn_lightning.whiteness.moments import FeatureMoments


class _Measure(FeatureMoments):
    measure = ""

    def compute(self) -> Tensor:
        """Return a float64 scalar; NaN if no channel varied."""
        return MEASURES[self.measure](Matrices(self))


class CorrelationDistance(_Measure):
    """Correlation-to-identity distance, ``norm_F(Corr - I)``: 0 for uncorrelated features."""

    measure = "distance"


class RMSCorrelation(_Measure):
    """RMS off-diagonal correlation, ``norm_F(Corr - I) / sqrt(d (d - 1))``, in [0, 1].

    Independent features give about ``1/sqrt(N)``, so log :class:`NumSamples` beside it.
    """

    measure = "rms"


class MeanAbsoluteCorrelation(_Measure):
    """Mean absolute off-diagonal correlation, in [0, 1]."""

    measure = "mean_abs"


class CovarianceDistance(_Measure):
    """``norm_F(Cov - I) / sqrt(d)``, with the covariance divided by ``N``; it also sees variances other than 1."""

    measure = "covariance"


class EffectiveRank(_Measure):
    """Effective rank as a share of ``d``, in [1/d, 1]; 1 is white.

    It is the exponential of the entropy of the covariance's normalised eigenvalues, divided by ``d``.
    """

    higher_is_better = True
    measure = "effective_rank"


class LogConditionNumber(_Measure):
    """log10 of the covariance's condition number; ``inf`` if the covariance is singular, as for ``N <= d``."""

    measure = "log10_condition"


class WhiteningLoss(_Measure):
    """The paper's whitening criterion of the features' covariance ``C`` (equations 1 and 2).

    Args:
        criterion: ``"kl"``: ``(tr C - ln det C - d) / 2``, ``inf`` for a singular ``C``; ``"fro"``: ``norm_F(I - C) /
            2``.
        kwargs: arguments of torchmetrics' ``Metric``.

    Raises:
        InputError: unknown criterion.
    """

    def __init__(self, criterion: str = "fro", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_criterion(criterion)
        self.measure = criterion


class NumSamples(FeatureMoments):
    """Number of samples per channel, ``N``; if it is smaller than ``d``, the covariance is singular."""

    higher_is_better = None  # type: ignore[assignment]

    def compute(self) -> Tensor:
        """Return a float64 scalar."""
        return self.count


class NumConstant(FeatureMoments):
    """Number of channels that never varied, which the measures leave out."""

    def compute(self) -> Tensor:
        """Return a float64 scalar."""
        return (~self.varies()).sum().to(torch.float64)


def whiteness_metrics(prefix: str | None = None) -> MetricCollection:
    """Return all measures over one state, under the names that logs use; ``update`` adds each batch only once.

    Args:
        prefix: goes before each name, such as ``"whiteness/"``.
    """
    metrics: dict[str, FeatureMoments] = {
        "distance": CorrelationDistance(),
        "rms": RMSCorrelation(),
        "mean_abs": MeanAbsoluteCorrelation(),
        "covariance": CovarianceDistance(),
        "effective_rank": EffectiveRank(),
        "log10_condition": LogConditionNumber(),
        "kl": WhiteningLoss("kl"),
        "fro": WhiteningLoss("fro"),
        "num_samples": NumSamples(),
        "num_constant": NumConstant(),
    }
    # Named, not found out: to find out, the first batch would be added up by each.
    return MetricCollection(dict(metrics), prefix=prefix, compute_groups=[sorted(metrics)])
