"""Measures of how white features are, and the callback that logs them."""

from swbn_lightning.whiteness.measure import LayerWhiteness, feature_moments, measure_whiteness
from swbn_lightning.whiteness.measures import (
    correlation_distance,
    covariance_distance,
    effective_rank,
    log10_condition_number,
    mean_absolute_correlation,
)
from swbn_lightning.whiteness.metrics import (
    CorrelationDistance,
    CovarianceDistance,
    EffectiveRank,
    LogConditionNumber,
    MeanAbsoluteCorrelation,
    NumConstant,
    NumSamples,
    RMSCorrelation,
    WhiteningLoss,
    whiteness_metrics,
)
from swbn_lightning.whiteness.moments import FeatureMoments
from swbn_lightning.whiteness.monitor import WhitenessMonitor
from swbn_lightning.whiteness.records import CorrelationMap, read_heatmap, read_whiteness

__all__ = [
    "CorrelationDistance",
    "CorrelationMap",
    "CovarianceDistance",
    "EffectiveRank",
    "FeatureMoments",
    "LayerWhiteness",
    "LogConditionNumber",
    "MeanAbsoluteCorrelation",
    "NumConstant",
    "NumSamples",
    "RMSCorrelation",
    "WhitenessMonitor",
    "WhiteningLoss",
    "correlation_distance",
    "covariance_distance",
    "effective_rank",
    "feature_moments",
    "log10_condition_number",
    "mean_absolute_correlation",
    "measure_whiteness",
    "read_heatmap",
    "read_whiteness",
    "whiteness_metrics",
]
