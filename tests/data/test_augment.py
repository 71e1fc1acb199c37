"""Crop and flip against slicing."""

import pytest
import torch
from torch.nn.functional import pad

from swbn_lightning.data.augment import CropFlip


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_and_flip_equal_slicing(dtype):
    augment = CropFlip(padding=3, flip=True)
    images = torch.randint(1, 256, (50, 2, 7, 9)).to(dtype)
    drawn = augment.draw(50, torch.Generator().manual_seed(0))
    for image, (row, column, flip), result in zip(images, drawn, augment.apply(images, drawn), strict=True):
        expected = pad(image, [3] * 4)[:, row : row + 7, column : column + 9]
        assert torch.equal(result, expected.flip(-1) if flip else expected)
    assert {tuple(values) for values in drawn.tolist()} != {(3, 3, 0)}
    assert drawn[:, :2].min() == 0 and drawn[:, :2].max() == 6 and 10 < drawn[:, 2].sum() < 40


def test_nothing_to_do_changes_nothing():
    augment = CropFlip()
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(augment.apply(images, augment.draw(5, torch.Generator())), images)


def test_errors():
    with pytest.raises(ValueError, match="at least 0, got -1"):
        CropFlip(padding=-1)
