"""Many-shot image classification with any backbone and norm."""

from classification.classifier import ImageClassifier
from classification.datamodules import GlyphDataModule

__all__ = ["GlyphDataModule", "ImageClassifier"]
