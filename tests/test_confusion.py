"""Confusion against numpy, and the files that hold it."""

import numpy as np
import pytest
import torch

from classification.evaluation import ImageResult
from swbn_lightning.errors import InputError
from swbn_lightning.runs.confusion import SavedClass, class_files, read_confusion


def confusion_of(labels, predicted, number):
    labels, predicted, ones = torch.tensor(labels), torch.tensor(predicted), torch.ones(len(labels))
    result = ImageResult(torch.arange(len(labels)), labels, predicted, ones.bool(), ones, ones, number)
    return result.confusion


def literal_f1(labels, predicted):
    """The mean over classes of the harmonic mean of precision and recall."""
    scores = []
    for own in sorted({*labels, *predicted}):
        right = sum(a == b == own for a, b in zip(labels, predicted, strict=True))
        precision, recall = (right / n if (n := list(side).count(own)) else 0.0 for side in (predicted, labels))
        scores.append(2 * precision * recall / (precision + recall) if right else 0.0)
    return np.mean(scores)


def test_counts_accuracies_and_macro_f1_are_numpys():
    rng = np.random.default_rng(0)
    labels = rng.choice([0, 1, 2, 4], 300, p=[0.5, 0.3, 0.15, 0.05])  # of 7 classes: 3 is only predicted, 5, 6 never
    predicted = np.where(rng.random(300) < 0.6, labels, rng.integers(0, 5, 300))
    found = confusion_of(labels.tolist(), predicted.tolist(), 7)
    expected = np.zeros((7, 7), int)
    np.add.at(expected, (labels, predicted), 1)
    assert (expected[labels, predicted] > 0).all() and expected[:, 3].sum() and not expected[3].sum()
    assert found.matrix.tolist() == expected.tolist() and (found.counts > 0).all()
    np.testing.assert_array_equal(found.of, expected.sum(1)[found.pairs[:, 0]])
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(found.class_accuracies, expected.diagonal() / expected.sum(1), equal_nan=True)
    assert found.macro_f1 == pytest.approx(literal_f1(labels.tolist(), predicted.tolist()), abs=1e-12)
    # By hand: class 0 has precision 1/2 and recall 1, class 1 recall 1/2 and precision 1.
    assert confusion_of([0, 1, 1], [0, 0, 1], 2).macro_f1 == pytest.approx(2 / 3)


def saved(folder, **changed):
    files = class_files(confusion_of([0, 0, 2, 2], [0, 2, 2, 2], 4), ["a", "b\x1b", "c, d", "é"])
    for name, text in {**files, **changed}.items():
        (folder / name).write_text(text)
    return folder


def test_files_read_back_as_they_were_written(tmp_path):
    found = read_confusion(saved(tmp_path))
    assert found.classes == {
        0: SavedClass("a", 0.5), 1: SavedClass(r"b\x1b", None), 2: SavedClass("c, d", 1.0), 3: SavedClass("é", None),
    }  # fmt: skip
    assert found.pairs == [(0, 0, 1, 2), (0, 2, 1, 2), (2, 2, 2, 2)]


@pytest.mark.parametrize(("file", "line", "reason"), [
    ("classes.csv", "0,a,2", r"line 2: the accuracy '2' is not"), ("classes.csv", "x,a,", "'x' is not a whole number"),
    ("confusion.csv", "0,9,1,1", "line 2: it is no count of two classes"), ("confusion.csv", "0,0,3,2", "no count of"),
    ("confusion.csv", "0,0,0,2", "no count of two classes"), ("confusion.csv", "0,0,1.5,2", "'1.5' is not a whole"),
])  # fmt: skip
def test_files_that_are_none(tmp_path, file, line, reason):
    head = {"classes.csv": "class,name,accuracy", "confusion.csv": "class,predicted,count,of"}[file]
    with pytest.raises(InputError, match=rf"{file} cannot be read: .*{reason}"):
        read_confusion(saved(tmp_path, **{file: f"{head}\n{line}\n"}))
