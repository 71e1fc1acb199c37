"""Tests of the embedded data set "glyphs" and of its class list."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from matplotlib.ft2font import FT2Font

from swbn_lightning.data.glyphs import SPLITS, face_paths, glyph_class_names, glyphs
from swbn_lightning.data.images import ImageSet


@pytest.fixture(scope="module")
def val() -> ImageSet:
    return glyphs("val")


def all_classes() -> list[str]:
    return [letters for split in SPLITS for letters in glyph_class_names(split)]


def test_every_letter_is_in_one_class_of_one_split() -> None:
    counts = Counter("".join(all_classes()))
    assert set(counts.values()) == {1}


def test_sizes_of_the_splits() -> None:
    sizes = [len(glyph_class_names(split)) for split in SPLITS]
    assert sum(sizes) >= 600
    assert [size / sum(sizes) for size in sizes] == pytest.approx([0.64, 0.16, 0.20], abs=0.002)


@pytest.mark.parametrize("letters", ["AΑА", "cCсС", "oOοО", "sS", "vV", "xX", "zZ", "źŹ", "Il"])
def test_letters_that_look_the_same_are_one_class(letters: str) -> None:
    assert [name for name in all_classes() if set(letters) & set(name)] == [
        name for name in all_classes() if set(letters) <= set(name)
    ]


@pytest.mark.parametrize("letters", ["Aa", "EF", "OQ", "Uu", "Kk", "nu", "pq", "Cç", "óò", "жШ"])
def test_letters_that_look_different_are_two_classes(letters: str) -> None:
    assert not [name for name in all_classes() if set(letters) <= set(name)]


def test_the_classes_hold_the_letters_of_all_faces() -> None:
    assert len(face_paths()) == len(set(face_paths())) == 12
    charmaps = [set(FT2Font(str(path)).get_charmap()) for path in face_paths()]
    assert {ord(letter) for letter in "".join(all_classes())} <= set.intersection(*charmaps)


def test_shapes(val: ImageSet) -> None:
    count = len(glyph_class_names("val"))
    assert val.images.shape == (24 * count, 1, 28, 28)
    assert val.images.dtype == torch.uint8
    assert val.name == "glyphs/val"
    assert torch.equal(val.labels.bincount(), torch.full((count,), 24))
    assert val.class_names == glyph_class_names("val")


@pytest.mark.parametrize("number", [1, 43])  # 24 images each: 43 classes end in the second batch that is drawn
def test_a_few_classes_have_the_images_they_have_among_all(val: ImageSet, number: int) -> None:
    few = glyphs("val", num_classes=number)
    assert few.class_names == val.class_names[:number] and few.name == val.name
    assert torch.equal(few.images, val.images[: 24 * number]) and torch.equal(few.labels, val.labels[: 24 * number])


def test_seed_decides() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (glyphs("val", 40, images_per_class=2, seed=seed).images for seed in (3, 3, 4))
    assert first.shape[1:] == (1, 40, 40) and torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_images_of_a_class_are_nearer_to_each_other_than_to_other_classes(val: ImageSet) -> None:
    means = torch.nn.functional.avg_pool2d(val.images.float(), 4).view(-1, 24, 49)
    first, second = means[:, :12].mean(1), means[:, 12:].mean(1)
    nearest = torch.cdist(second, first).argmin(1)
    assert float((nearest == torch.arange(len(nearest))).float().mean()) > 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "dev"}, "'dev'.*test, train, val"),
        ({"image_size": 27}, "image_size .*28, got 27"),
        ({"images_per_class": 0}, "images_per_class .*1, got 0"),
        ({"seed": -1}, "must not be negative, got seed=-1"),
        ({"num_classes": 127}, "the val split has 126 classes, got num_classes=127"),
    ],
)
def test_errors_say_what_was_given_and_what_is_accepted(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        glyphs(**{"split": "val", **arguments})


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64), "uint8.*float32"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"\[2, 4, 4\]"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2), "int64.*float32"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), "2 images but 3"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 2]), "0 to 2.*0 to 1"),
        (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([-1, 0]), "-1 to 0.*0 to 1"),
    ],
)
def test_image_set_rejects(images: torch.Tensor, labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageSet(images, labels, ("a", "b"), "toy")
