"""Images in memory: what both trainings share."""

from swbn_lightning.data.images import ImageSet

__all__ = ["ImageSet"]
