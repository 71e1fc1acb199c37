"""Data modules of many-shot classification, one a data set."""

from classification.datamodules.base import ClassificationDataModule, LabelledBatch
from classification.datamodules.files import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
)
from classification.datamodules.folders import ImageFolderDataModule
from classification.datamodules.glyphs import GlyphDataModule
from classification.datamodules.imagenet import ImageNetDataModule

__all__ = [
    "CIFAR10DataModule",
    "CIFAR100DataModule",
    "ClassificationDataModule",
    "FashionMNISTDataModule",
    "GlyphDataModule",
    "ImageFolderDataModule",
    "ImageNetDataModule",
    "LabelledBatch",
    "MNISTDataModule",
]
