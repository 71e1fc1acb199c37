"""Which classes were taken for which: what an evaluation found of its classes, and the two files that hold it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import csv_rows, finite, printable, reading, whole
from swbn_lightning.files.writing import csv_text
from swbn_lightning.runs.folders import CLASSES_FILE, CONFUSION_FILE

_CLASS = ("class", "name", "accuracy")
_PAIR = ("class", "predicted", "count", "of")


@dataclass(frozen=True)
class Confusion:
    """How often what belongs to one class was given another; right answers are pairs of a class with itself.

    Only pairs that occurred are held, so that a thousand classes take no million numbers.

    Args:
        classes: ``[L]`` int64, the labels in rising order; the other tensors name a class by its place here.
        pairs: ``[P, 2]`` int64, class and predicted class of each pair that occurred, in rising order.
        counts: ``[P]`` int64, how many images (of episodes: queries) of the class were given the predicted one.
        of: ``[P]`` int64, out of how many: all images of the class. Of episodes, its queries in the episodes that had
            both classes, because in the others the mistake could not be made.
    """

    classes: Tensor
    pairs: Tensor
    counts: Tensor
    of: Tensor

    @property
    def matrix(self) -> Tensor:
        """``[L, L]`` int64: how many of the row's class were given the column's."""
        found = self.counts.new_zeros(len(self.classes), len(self.classes))
        found[self.pairs[:, 0], self.pairs[:, 1]] = self.counts
        return found

    @property
    def class_accuracies(self) -> Tensor:
        """``[L]`` float64: share of each class that was given its own; NaN for a class that did not occur."""
        right, true, _ = self._sums()
        return right / true

    @property
    def macro_f1(self) -> float:
        """Mean over the classes of ``2 right / (true + predicted)``, the harmonic mean of precision and recall.

        A class that neither occurred nor was predicted is left out, as in scikit-learn and torchmetrics.
        """
        right, true, predicted = self._sums()
        known = true + predicted > 0
        return (2 * right / (true + predicted))[known].mean().item()

    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of each class, float64: what was given it rightly, what belonged to it, what was given it."""
        (true, predicted), own = self.pairs.T, self.pairs[:, 0] == self.pairs[:, 1]
        number, weights = len(self.classes), self.counts.double()
        right = torch.bincount(true[own], weights[own], number)
        return right, torch.bincount(true, weights, number), torch.bincount(predicted, weights, number)


class SavedClass(NamedTuple):
    """A class as ``classes.csv`` has it."""

    name: str
    accuracy: float | None  # a fraction; None for a class that did not occur


class SavedPair(NamedTuple):
    """A line of ``confusion.csv``."""

    label: int
    predicted: int
    times: int  # so many images or queries of the class were given the predicted one
    of: int  # out of so many, as Confusion has it


class SavedConfusion(NamedTuple):
    """What the two files of an evaluation hold."""

    classes: dict[int, SavedClass]  # by label
    pairs: list[SavedPair]


def class_files(confusion: Confusion, names: Sequence[str]) -> dict[str, str]:
    """The text of ``classes.csv`` and ``confusion.csv``, by their names; ``names`` has a name for every label."""
    labels = confusion.classes.tolist()
    accuracies = zip(labels, confusion.class_accuracies.tolist(), strict=True)
    # repr gives the shortest digits that read back as the same number.
    classes = [(label, names[label], "" if value != value else repr(value)) for label, value in accuracies]
    columns = (confusion.pairs.tolist(), confusion.counts.tolist(), confusion.of.tolist())
    pairs = [(labels[true], labels[given], count, of) for (true, given), count, of in zip(*columns, strict=True)]
    return {CLASSES_FILE: csv_text(_CLASS, classes), CONFUSION_FILE: csv_text(_PAIR, pairs)}


def read_confusion(folder: Path) -> SavedConfusion:
    """What :func:`class_files` wrote to a run's folder.

    Raises:
        InputError: a file that is not what it writes.
    """
    classes: dict[int, SavedClass] = {}
    file = folder / CLASSES_FILE
    with reading(file):
        for line, row in csv_rows(file, _CLASS):
            accuracy = finite(row["accuracy"])
            if row["accuracy"] and (accuracy is None or not 0 <= accuracy <= 1):
                raise InputError(f"line {line}: the accuracy {row['accuracy']!r} is not a number from 0 to 1")
            classes[whole(row["class"])] = SavedClass(printable(row["name"]), accuracy)
    pairs, file = [], folder / CONFUSION_FILE
    with reading(file):
        for line, row in csv_rows(file, _PAIR):
            pair = SavedPair(*(whole(row[name]) for name in _PAIR))
            if not {pair.label, pair.predicted} <= classes.keys() or not 0 < pair.times <= pair.of:
                raise InputError(f"line {line}: it is no count of two classes of {CLASSES_FILE}")
            pairs.append(pair)
    return SavedConfusion(classes, pairs)
