"""Networks that turn images into features, each with any normalisation layer."""

from swbn_lightning.backbones.base import Backbone
from swbn_lightning.backbones.registry import available_backbones, build_backbone

__all__ = ["Backbone", "available_backbones", "build_backbone"]
