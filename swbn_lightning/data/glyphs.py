"""The embedded data set "glyphs": letters of five scripts in the twelve DejaVu faces, for few-shot learning.

The faces come with matplotlib, so nothing is downloaded. A class is a letter with all letters that look the
same; ``glyph_classes.txt`` says which, and how they were found. The classes of the three splits are
disjoint, as few-shot learning needs.
"""

from __future__ import annotations

import zlib
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

from swbn_lightning.data.images import ImageSet
from swbn_lightning.errors import InputError, require_not_negative, require_positive, unknown_name

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

SPLITS = ("train", "val", "test")

GLYPH_MEAN, GLYPH_STD = 0.113, 0.242
"""Mean and deviation of the training split's pixels at 28x28, of pixels in [0, 1]; as measured."""

SMALLEST_SIZE = 28
"""Below 28 pixels a side the marks on letters can no longer be told apart."""

EM = 0.7
"""Font size as part of the image's side: the widest letter (1.39 em) just fits."""

MAX_ROTATION = 20.0  # degrees; more would bring letters near others that differ by their slant
SCALES = (0.75, 1.15)
MAX_SHEAR = 0.25  # as much again as the slant of the oblique faces
MAX_SHIFT = 0.08  # of the side
NOISE = (0.05, 0.1)  # standard deviation, of the full range

_OVERSAMPLING = 2
_BATCH = 1024  # images drawn at once: about 13 MB of samples at 28 pixels, so caches still help


def face_paths() -> tuple[Path, ...]:
    """The font files of the twelve faces: Sans, Mono, Serif, each upright, bold, slanted and bold slanted."""
    import matplotlib  # here, because `import swbn_lightning` must not load it

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    slants = {"DejaVuSans": "Oblique", "DejaVuSansMono": "Oblique", "DejaVuSerif": "Italic"}
    return tuple(
        folder / f"{family}{style}.ttf"
        for family, slant in slants.items()
        for style in ("", "-Bold", f"-{slant}", f"-Bold{slant}")
    )


def glyph_class_names(split: str) -> tuple[str, ...]:
    """The classes of a split, each as the letters that look the same, the drawn one first."""
    if split not in SPLITS:
        raise unknown_name("split of glyphs", split, SPLITS)
    text = (resources.files("swbn_lightning.data") / "glyph_classes.txt").read_text(encoding="utf-8")
    entries = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return tuple(letters for owner, letters in entries if owner == split)


def glyphs(
    split: str, image_size: int = 28, images_per_class: int = 24, seed: int = 0, num_classes: int | None = None
) -> ImageSet:
    """Draws a split of the glyphs data set.

    Image ``j`` of a class is its letter in face ``j % 12``, white on black, randomly rotated (±20 degrees),
    scaled (0.75 to 1.15), sheared (±0.25), shifted (±8 % of the side), with Gaussian noise (standard
    deviation 0.05 to 0.1 of the full range). A letter too large for this is scaled and shifted less, so that
    none is cut. The font size is the same for all letters.

    Args:
        split: ``"train"``, ``"val"`` or ``"test"``; their classes are disjoint.
        image_size: side of the images in pixels, at least 28. Default 28, as MNIST and small Omniglot.
        images_per_class: at least 1. Default 24, two drawings in each face.
        seed: not negative. The same split, sizes and seed give the same images on one platform; a split's
            images do not depend on whether another split was drawn before.
        num_classes: only the first so many classes; their images are those that they have among all. None for all.

    Returns:
        ``ImageSet`` named ``glyphs/<split>``, images uint8 ``[classes * images_per_class, 1, image_size,
        image_size]``, class after class.

    Raises:
        ValueError: for another split or a number out of its range.
    """
    names = glyph_class_names(split)
    classes = len(names) if num_classes is None else num_classes
    require_positive("glyphs", image_size=image_size, images_per_class=images_per_class, num_classes=classes)
    require_not_negative("glyphs", seed=seed)
    if image_size < SMALLEST_SIZE:
        raise InputError(f"glyphs: image_size must be at least {SMALLEST_SIZE}, got {image_size}.")
    if classes > len(names):
        raise InputError(f"glyphs: the {split} split has {len(names)} classes, got num_classes={num_classes}.")
    # Whole batches, so that the random numbers are the same however many classes are wanted.
    count = classes * images_per_class
    labels = torch.arange(len(names)).repeat_interleave(images_per_class)[: -(-count // _BATCH) * _BATCH]
    faces = face_paths()[:images_per_class]
    letters = [name[0] for name in names[: int(labels[-1]) + 1]]
    drawings = torch.stack([_draw_face(letters, path, _OVERSAMPLING * image_size) for path in faces], dim=1)

    face_of_image = torch.arange(len(labels)) % images_per_class % len(faces)
    # The split is part of the seed: else the first classes of all splits would be distorted alike.
    generator = torch.Generator().manual_seed(zlib.crc32(f"glyphs/{split}/{seed}".encode()))
    batches = zip(labels.split(_BATCH), face_of_image.split(_BATCH), strict=True)
    images = [_distort(drawings[label, face], image_size, generator) for label, face in batches]
    return ImageSet(torch.cat(images)[:count], labels[:count], names[:classes], f"glyphs/{split}")


def _draw_face(letters: list[str], path: Path, side: int) -> Tensor:
    """All letters in one face, uint8 ``[len(letters), side, side]``, each centred by its ink."""
    from PIL import ImageFont

    # The basic layout draws one letter as one glyph; another layout engine may not be installed everywhere.
    font = ImageFont.truetype(str(path), size=round(EM * side), layout_engine=ImageFont.Layout.BASIC)
    return torch.stack([_draw_letter(letter, font, side) for letter in letters])


def _draw_letter(letter: str, font: FreeTypeFont, side: int) -> Tensor:
    """A letter in white on black, uint8 ``[side, side]``, its ink's box in the middle."""
    from PIL import Image, ImageDraw

    left, top, right, bottom = font.getbbox(letter)
    image = Image.new("L", (side, side))
    corner = ((side - left - right) // 2, (side - top - bottom) // 2)
    ImageDraw.Draw(image).text(corner, letter, fill=255, font=font)
    return torch.from_numpy(np.array(image))


def _distort(drawings: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Random distortions and noise, uint8 ``[B, S, S]`` to uint8 ``[B, 1, size, size]``."""
    canvas = (drawings[:, None].float() / 255.0).contiguous()
    to_source = _random_affine(_half_extents(drawings), generator)
    side = _OVERSAMPLING * size
    grid = affine_grid(to_source, [len(canvas), 1, side, side], align_corners=False)
    images = avg_pool2d(grid_sample(canvas, grid, align_corners=False), _OVERSAMPLING)
    deviation = _uniform(*NOISE, len(images), generator)[:, None, None, None]
    images = images + deviation * torch.randn(images.shape, generator=generator)
    return (images.clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)


def _half_extents(drawings: Tensor) -> Tensor:
    """Half width and half height of the ink, ``[B, 2]``, where half the canvas is 1."""
    distance = (torch.arange(drawings.shape[-1]) + 0.5) / drawings.shape[-1] * 2 - 1
    reach = distance.abs() + 1.0 / drawings.shape[-1]
    ink = drawings > 0
    return torch.stack([(ink.any(rows) * reach).amax(1) for rows in (1, 2)], dim=1)


def _random_affine(extents: Tensor, generator: torch.Generator) -> Tensor:
    """Random maps from image to drawing, ``[B, 2, 3]``, under which the ink's box stays in the image."""
    # A drawing's point p goes to `scale * rotation @ shear @ p + shift`; `affine_grid` wants the inverse of this.
    count = len(extents)
    angle = torch.deg2rad(_uniform(-MAX_ROTATION, MAX_ROTATION, count, generator))
    shear = _uniform(-MAX_SHEAR, MAX_SHEAR, count, generator)
    scale = _uniform(*SCALES, count, generator)
    shift = 2 * MAX_SHIFT * _uniform(-1.0, 1.0, (count, 2), generator)

    cos, sin = angle.cos(), angle.sin()
    forward = torch.stack([cos, shear * cos - sin, sin, shear * sin + cos], dim=1).view(-1, 2, 2)
    box = (forward.abs() @ extents[:, :, None]).squeeze(2)
    scale = torch.minimum(scale, 1.0 / box.amax(1))
    room = 1.0 - scale[:, None] * box
    shift = shift.clamp(-room, room)

    inverse = torch.linalg.inv(scale[:, None, None] * forward)
    return torch.cat([inverse, -inverse @ shift[:, :, None]], dim=2)


def _uniform(low: float, high: float, shape: int | tuple[int, ...], generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)
