"""Many-shot image classification with any backbone and norm."""

from classification.classifier import ImageClassifier
from classification.datamodules import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    GlyphDataModule,
    ImageFolderDataModule,
    ImageNetDataModule,
    MNISTDataModule,
)

__all__ = [
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "FashionMNISTDataModule",
    "GlyphDataModule",
    "ImageClassifier",
    "ImageFolderDataModule",
    "ImageNetDataModule",
    "MNISTDataModule",
]
