"""Many-shot image classification with any backbone and norm."""

from classification.classifier import ImageClassifier
from classification.datamodules.files import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
)
from classification.datamodules.folders import ImageFolderDataModule
from classification.datamodules.glyphs import GlyphDataModule
from classification.datamodules.imagenet import ImageNetDataModule
from classification.evaluation import ImageResult

__all__ = [
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "FashionMNISTDataModule",
    "GlyphDataModule",
    "ImageClassifier",
    "ImageFolderDataModule",
    "ImageNetDataModule",
    "ImageResult",
    "MNISTDataModule",
]
