"""Augmentation a batch at a time, on whatever device holds the images.

Random numbers and their use are apart: the numbers are drawn where the images are chosen, from a generator
of the episode's own, so the same episode looks the same on any worker, rank or device.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from swbn_lightning.errors import InputError


class CropFlip:
    """Random crop of the zero-padded image and random horizontal flip, per image.

    Args:
        padding: pixels added on every side before a crop of the old size; 0 for no crop, 4 usual for 32x32.
        flip: mirror with probability one half. Wrong for letters and digits.
    """

    def __init__(self, padding: int = 0, flip: bool = False) -> None:
        if padding < 0:
            raise InputError(f"crop padding must be at least 0, got {padding}.")
        self.padding, self.flip = padding, flip

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Row offset, column offset and flip for ``count`` images: int64 ``[count, 3]``, on the CPU."""
        offsets = torch.randint(2 * self.padding + 1, (count, 2), generator=generator)
        flips = torch.randint(2, (count, 1), generator=generator) * int(self.flip)
        return torch.cat([offsets, flips], dim=1)

    def apply(self, images: Tensor, drawn: Tensor) -> Tensor:
        """``[N, C, H, W]`` of any dtype with ``drawn [N, 3]``, same shape; one gather for all images."""
        height, width = images.shape[2:]
        padded = F.pad(images, [self.padding] * 4)
        rows = torch.arange(height, device=images.device) + drawn[:, :1]
        columns = torch.arange(width, device=images.device).expand(len(images), -1)
        columns = torch.where(drawn[:, 2:] > 0, width - 1 - columns, columns) + drawn[:, 1:2]
        index = torch.arange(len(images), device=images.device)[:, None, None]
        # Advanced indices around a slice put the sliced dimension last.
        return padded[index, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
