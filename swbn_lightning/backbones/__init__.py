"""Networks that turn images into features, each with a normalisation layer of one's choice."""

from swbn_lightning.backbones.base import Backbone
from swbn_lightning.backbones.registry import available_backbones, build_backbone

__all__ = ["Backbone", "available_backbones", "build_backbone"]
