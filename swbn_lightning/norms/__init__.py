"""Whitening normalisation layers and the factory that puts them into networks."""

from swbn_lightning.norms.factory import NormFactory, named_norms, norm_layer_types
from swbn_lightning.norms.swbn import SWBN1d, SWBN2d, SWBN3d

__all__ = ["NormFactory", "SWBN1d", "SWBN2d", "SWBN3d", "named_norms", "norm_layer_types"]
