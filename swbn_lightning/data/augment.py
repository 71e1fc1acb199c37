"""Augmentation a batch at a time, on whatever device holds the images.

Random numbers and their use are apart: the numbers are drawn where the images are chosen, from a generator
of the episode's or the epoch's own, so the same image looks the same on any worker, rank or device.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as tv

from swbn_lightning.data.images import take
from swbn_lightning.errors import InputError, unknown_name

PADDING_MODES = ("constant", "reflect")
"""What a crop finds outside the image, by torchvision's names: zeros, or the image mirrored at its border."""

ERASED_SHARE, ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)

ERASING_TRIES = 10
"""Rectangles drawn until one fits; torchvision's ``RandomErasing`` gives up after as many."""


class CropFlip:
    """Random crop of the padded image and random horizontal flip, per image.

    Args:
        padding: pixels added on every side before a crop of the old size; 0 for no crop, 4 usual for 32x32.
        flip: mirror with probability one half. Wrong for letters and digits.
        padding_mode: ``"constant"``, zeros, as He et al. pad; or ``"reflect"``, as Zagoruyko & Komodakis (Wide
            Residual Networks, section 3) do.

    Raises:
        InputError: a negative padding; another padding mode.
    """

    def __init__(self, padding: int = 0, flip: bool = False, padding_mode: str = "constant") -> None:
        if padding < 0:
            raise InputError(f"crop padding must be at least 0, got {padding}.")
        if padding_mode not in PADDING_MODES:
            raise unknown_name("crop padding mode", padding_mode, PADDING_MODES)
        self.padding, self.flip, self.padding_mode = padding, flip, padding_mode

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return self.padding > 0 or self.flip

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Row offset, column offset and flip for ``count`` images: int64 ``[count, 3]``, on the CPU."""
        offsets = torch.randint(2 * self.padding + 1, (count, 2), generator=generator)
        flips = torch.randint(2, (count, 1), generator=generator) * int(self.flip)
        return torch.cat([offsets, flips], dim=1)

    def apply(self, images: Tensor, drawn: Tensor) -> Tensor:
        """``[N, C, H, W]`` of any dtype with ``drawn [N, 3]``: same shape, same layout.

        Raises:
            InputError: a reflecting border as wide as the image or wider.
        """
        if self.padding:
            images = self._crop(images, drawn[:, 0], drawn[:, 1])
        if self.flip:
            number = torch.arange(len(images), device=images.device)
            images = take(torch.cat([images, images.flip(-1)]), number + len(images) * drawn[:, 2])
        return images

    def _crop(self, images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        padded = self._padded(images)
        image, _, row, column = padded.stride()
        start = torch.arange(len(images), device=images.device) * image + rows * row + columns * column
        # Every window of the size of an image, as a view, by the place of its first pixel: a crop is one of them, and
        # taking it copies whole rows. (Indices for each pixel take twenty times as long.)
        last = (len(images) - 1) * image + 2 * self.padding * (row + column)
        windows = padded.as_strided((last + 1, *images.shape[1:]), (1, *padded.stride()[1:]))
        return take(windows, start)

    def _padded(self, images: Tensor) -> Tensor:
        if self.padding_mode == "constant":
            return F.pad(images, [self.padding] * 4)
        if self.padding >= min(images.shape[2:]):
            raise InputError(
                f"a reflecting border of {self.padding} pixels needs larger images than {list(images.shape[2:])}; "
                "take a smaller crop padding or the mode constant."
            )
        return tv.pad(images, [self.padding], padding_mode="reflect")


class RandomErasing:
    """Random erasing (Zhong et al., AAAI 2020): a rectangle of an image is filled with 0, per image.

    Distributed as torchvision's ``RandomErasing`` with its defaults: :data:`ERASED_SHARE` of the area, and a height
    over width in :data:`ERASED_RATIO`, drawn uniformly in the logarithm.

    Args:
        probability: of an image to be erased in, in [0, 1].

    Raises:
        InputError: another probability.
    """

    def __init__(self, probability: float = 0.5) -> None:
        if not 0 <= probability <= 1:
            raise InputError(f"the probability of erasing must be in [0, 1], got {probability}.")
        self.probability = probability

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return self.probability > 0

    def draw(self, count: int, size: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Top, left, height and width for ``count`` images of ``size`` (H, W): int64 ``[count, 4]``, on the CPU.

        Height and width are 0 where nothing is erased. A rectangle is smaller than the image in both directions, as
        torchvision's; an image for which :data:`ERASING_TRIES` draws gave none stays whole.
        """
        share, log_ratio, place = (
            torch.rand(shape, generator=generator, dtype=torch.float64)
            for shape in ((count, ERASING_TRIES), (count, ERASING_TRIES), (count, 3))
        )
        area = size[0] * size[1] * (ERASED_SHARE[0] + (ERASED_SHARE[1] - ERASED_SHARE[0]) * share)
        low, high = map(math.log, ERASED_RATIO)
        ratio = torch.exp(low + (high - low) * log_ratio)
        heights, widths = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (heights < size[0]) & (widths < size[1])
        first = fits.int().argmax(1, keepdim=True)
        erased = fits.any(1) & (place[:, 2] < self.probability)
        height, width = (sides.gather(1, first).squeeze(1) * erased for sides in (heights, widths))
        top = (place[:, 0] * (size[0] - height + 1)).floor()
        left = (place[:, 1] * (size[1] - width + 1)).floor()
        return torch.stack([top, left, height, width], dim=1).long()

    def apply(self, images: Tensor, drawn: Tensor) -> Tensor:
        """``[N, C, H, W]`` with ``drawn [N, 4]``: same shape, 0 in the rectangles, normalised images' mean colour."""
        inside = []
        for axis, size in enumerate(images.shape[2:]):
            position = torch.arange(size, device=images.device)
            start, length = drawn[:, axis, None], drawn[:, axis + 2, None]
            inside.append((position >= start) & (position < start + length))
        rows, columns = inside
        return images.masked_fill(rows[:, None, :, None] & columns[:, None, None, :], 0)
