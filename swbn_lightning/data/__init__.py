"""Images in memory, shared by both trainings."""

from swbn_lightning.data.images import ImageSet

__all__ = ["ImageSet"]
