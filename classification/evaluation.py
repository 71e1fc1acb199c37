"""What a classifier named each image of a split, and what follows from it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torchmetrics.utilities.distributed import gather_all_tensors

from swbn_lightning.data.order import each_once
from swbn_lightning.files.writing import csv_text
from swbn_lightning.runs.confusion import Confusion, class_files
from swbn_lightning.runs.folders import IMAGES_FILE
from swbn_lightning.runs.intervals import share_half_width

Rows = tuple[Tensor, Tensor]  # of images: [N, 4] int64 and [N, 2] float32, the columns of an ImageResult
_TOP = 5


@dataclass(frozen=True)
class ImageResult:
    """An evaluation of a classifier, image by image, each image once and in the order of their numbers; on the CPU.

    Args:
        numbers: ``[N]`` int64, each image's place in the split.
        labels: ``[N]`` int64, its class.
        predicted: ``[N]`` int64, the class of the highest logit.
        in_top5: ``[N]`` bool, whether its class is among the five highest logits.
        probabilities: ``[N]`` float32, the softmax of the predicted class.
        losses: ``[N]`` float32, its cross-entropy in nats.
        num_classes: classes that the network tells apart.
    """

    numbers: Tensor
    labels: Tensor
    predicted: Tensor
    in_top5: Tensor
    probabilities: Tensor
    losses: Tensor
    num_classes: int

    @property
    def accuracy(self) -> float:
        """Share of the images whose predicted class is their class."""
        return (self.predicted == self.labels).double().mean().item()

    @property
    def ci95(self) -> float | None:
        """Half-width of the accuracy's 95% interval over images, with Student's t; None if all images are alike."""
        return share_half_width(self.accuracy, len(self.labels))

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats."""
        return self.losses.double().mean().item()

    @property
    def top5(self) -> float:
        """Share of the images whose class is among the five highest logits."""
        return self.in_top5.double().mean().item()

    @cached_property
    def confusion(self) -> Confusion:
        """Which classes were taken for which."""
        number = self.num_classes
        codes, counts = torch.unique(self.labels * number + self.predicted, return_counts=True)
        of = torch.bincount(self.labels, minlength=number)[codes // number]
        return Confusion(torch.arange(number), torch.stack([codes // number, codes % number], dim=1), counts, of)

    def identity(self, class_names: Sequence[str], chosen_by: str) -> str:
        """Identifier of the set of images, equal if every number is the same image.

        It is computed from the numbers, the labels, the class names and what else chose the images
        (:meth:`~classification.datamodules.base.ClassificationDataModule.chosen_by`). Pixels are not part of it, so
        runs with other image sizes can be compared.
        """
        digest = hashlib.sha256("\n".join([chosen_by, *class_names]).encode())
        digest.update(torch.stack([self.numbers, self.labels]).numpy().tobytes())
        return digest.hexdigest()[:16]

    def files(self, class_names: Sequence[str]) -> dict[str, str]:
        """Text of ``images.csv``, ``classes.csv`` and ``confusion.csv``, by their names."""
        numbers = (column.tolist() for column in (self.numbers, self.labels, self.predicted))
        rows = zip(*numbers, (f"{value:.6f}" for value in self.probabilities.tolist()), strict=True)
        images = csv_text(("image", "class", "predicted", "probability"), rows)
        return {IMAGES_FILE: images, **class_files(self.confusion, class_names)}


def rows_of(numbers: Tensor, labels: Tensor, logits: Tensor) -> Rows:
    """What is kept of a batch, on its device; logits ``[B, num_classes]`` of any precision."""
    log_probabilities = logits.float().log_softmax(-1)
    best, predicted = log_probabilities.max(-1)
    top = log_probabilities.topk(min(_TOP, logits.shape[1])).indices
    in_top = (top == labels[:, None]).any(-1)
    losses = -log_probabilities.gather(1, labels[:, None])[:, 0]
    return torch.stack([numbers, labels, predicted, in_top], dim=1), torch.stack([best.exp(), losses], dim=1)


def image_result(rows: Sequence[Rows], num_classes: int, processes: int) -> ImageResult:
    """The result of all processes' batches; every process must call it, and has at least one batch."""
    columns = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    if processes > 1:  # not all need have as many images
        columns = [torch.cat(gather_all_tensors(part)) for part in columns]
    whole, real = (part.cpu() for part in columns)
    first = each_once(whole[:, 0])
    numbers, labels, predicted, in_top5 = whole[first].T.contiguous()
    probabilities, losses = real[first].T.contiguous()
    return ImageResult(numbers, labels, predicted, in_top5.bool(), probabilities, losses, num_classes)
