"""Whiteness of features: measures, and the callback that logs them."""

from swbn_lightning.whiteness.measure import LayerWhiteness, measure_whiteness
from swbn_lightning.whiteness.metrics import CorrelationDistance, FeatureMoments, correlation_distance
from swbn_lightning.whiteness.monitor import WhitenessMonitor

__all__ = [
    "CorrelationDistance",
    "FeatureMoments",
    "LayerWhiteness",
    "WhitenessMonitor",
    "correlation_distance",
    "measure_whiteness",
]
