"""Crop, flip and erasing against loops over images and pixels, and against torchvision's distribution."""

import math

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from swbn_lightning.data.augment import CropFlip, RandomErasing

LAYOUTS = [torch.contiguous_format, torch.channels_last]


def cropped_and_flipped_by_pixels(image, row, column, flip, padding, mode):
    """One image ``[C, H, W]`` by the definition, a pixel at a time."""
    _, height, width = image.shape
    out = np.zeros_like(image)
    for y in range(height):
        for x in range(width):
            source_y, source_x = y + row - padding, (width - 1 - x if flip else x) + column - padding
            if mode == "reflect":  # about the outermost pixels, which are not doubled
                source_y = height - 1 - abs(height - 1 - abs(source_y))
                source_x = width - 1 - abs(width - 1 - abs(source_x))
            if 0 <= source_y < height and 0 <= source_x < width:
                out[:, y, x] = image[:, source_y, source_x]
    return out


@pytest.mark.parametrize(("layout", "channels"), zip(LAYOUTS, (1, 3), strict=True))
@pytest.mark.parametrize(
    ("padding", "flip", "mode"),
    [(2, True, "constant"), (2, True, "reflect"), (4, False, "reflect"), (0, True, "constant")],
)
def test_crop_and_flip_equal_a_loop_over_pixels_in_any_layout(layout, channels, padding, flip, mode):
    augment = CropFlip(padding, flip, mode)
    images = torch.randint(1, 256, (20, channels, 6, 5), dtype=torch.uint8).contiguous(memory_format=layout)
    drawn = augment.draw(20, torch.Generator().manual_seed(1))
    result = augment.apply(images, drawn)
    assert result.dtype == torch.uint8 and result.is_contiguous(memory_format=layout)
    for image, numbers, found in zip(images.numpy(), drawn.tolist(), result.numpy(), strict=True):
        assert np.array_equal(found, cropped_and_flipped_by_pixels(image, *numbers, padding, mode))


def test_nothing_to_do_changes_nothing():
    augment = CropFlip()
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(augment.apply(images, augment.draw(5, torch.Generator())), images)
    assert not augment and CropFlip(padding=1) and CropFlip(flip=True)
    assert not RandomErasing(0.0) and RandomErasing(0.1)


def test_erasing_equals_a_loop_over_pixels():
    erasing = RandomErasing(0.7)
    images = torch.randn(40, 3, 9, 12)
    drawn = erasing.draw(40, (9, 12), torch.Generator().manual_seed(0))
    expected = images.clone()
    for number, (top, left, height, width) in enumerate(drawn.tolist()):
        for y in range(top, top + height):
            for x in range(left, left + width):
                expected[number, :, y, x] = 0
    found = erasing.apply(images, drawn)
    assert torch.equal(found, expected) and not torch.equal(found, images)


def test_rectangles_are_distributed_as_torchvisions():
    ours = RandomErasing(1.0).draw(20_000, (24, 32), torch.Generator().manual_seed(0)).double()
    theirs = v2.RandomErasing(p=1.0)
    image = [torch.zeros(3, 24, 32)]
    torch.manual_seed(0)
    drawn = [theirs.make_params(image) for _ in range(3_000)]
    theirs = torch.tensor([[p["i"], p["j"], p["h"], p["w"]] for p in drawn if p["v"] is not None]).double()
    for mine, other in (
        *zip(ours.T, theirs.T, strict=True),
        (ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]),
        ((ours[:, 2] / ours[:, 3]).log(), (theirs[:, 2] / theirs[:, 3]).log()),
    ):
        # Two-sample Kolmogorov-Smirnov distance; 1.95 is its critical value at a level of 0.001.
        grid = torch.cat([mine, other]).unique()
        share = [torch.searchsorted(values.sort().values, grid, right=True) / len(values) for values in (mine, other)]
        assert (share[0] - share[1]).abs().max() < 1.95 * (1 / len(mine) + 1 / len(other)) ** 0.5


def test_the_share_of_erased_images_is_the_probability():
    for probability in (0.0, 0.25, 1.0):
        drawn = RandomErasing(probability).draw(10_000, (32, 32), torch.Generator().manual_seed(0))
        erased = (drawn[:, 2] > 0).double().mean()
        assert erased == pytest.approx(probability, abs=5 * (probability * (1 - probability) / 10_000) ** 0.5 + 1e-9)
        assert ((drawn[:, 2] > 0) == (drawn[:, 3] > 0)).all()
    # Where no rectangle is smaller than the image, it stays whole.
    assert (RandomErasing(1.0).draw(100, (1, 1), torch.Generator())[:, 2:] == 0).all()


def test_errors():
    with pytest.raises(ValueError, match="at least 0, got -1"):
        CropFlip(padding=-1)
    with pytest.raises(ValueError, match="unknown crop padding mode 'reflected'; did you mean 'reflect'"):
        CropFlip(padding=1, padding_mode="reflected")
    augment = CropFlip(padding=8, padding_mode="reflect")
    with pytest.raises(ValueError, match=r"border of 8 pixels needs larger images than \[8, 9\]"):
        augment.apply(torch.zeros(2, 1, 8, 9, dtype=torch.uint8), augment.draw(2, torch.Generator()))
    with pytest.raises(ValueError, match=r"must be in \[0, 1\], got nan"):
        RandomErasing(math.nan)
