"""Makes ``glyph_classes.txt``, the list of the classes of the glyphs data set and their splits.

``python -m benchmarks.make_glyph_classes`` writes the list again; with ``--check`` it compares and
exits with 1 on a difference. The list is kept with the code, so that the classes never depend on the
version of FreeType that draws the letters.

Two letters are one class if they look the same when only position and size differ, as Latin A, Greek Α and
Cyrillic А do, or c and C: the data set varies both, and its upright faces differ in both.
"""

from __future__ import annotations

import argparse
import random
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from swbn_lightning.data.glyphs import face_paths

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

SCRIPTS = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "GEORGIAN")
COMPARED_FACES = ("DejaVuSans", "DejaVuSansMono", "DejaVuSerif")
"""The upright regular faces: the others are their slanted or bold forms."""

SIDE = 40
"""Pixels of the longer side of a letter's ink when two letters are compared."""

SAME_IN_ONE_FACE = 2.1
"""Largest distance, in pixels of ``SIDE``, of two letters that look the same: about one pixel of a 28-pixel
image. At 2.3 already I is joined with Ì, Î, ι, ʅ and some fifty other narrow letters."""

SAME_IN_TWO_FACES = 2.9
"""The same where it holds in two of the three faces. It joins the marks that a pixel tells apart, as in Û and
Ŭ; at 3.1 letters with quite different marks follow, as Ö, Ů and ὂ."""

SAME_IN_BOTH_CASES = 3.7
"""The same for large and small forms of one letter, as X and x, whose strokes differ in thickness when scaled
to one size. It still keeps U and u (5.4), K and k (11) apart."""

FRACTIONS = (0.64, 0.16, 0.20)
"""Parts of train, val and test: those of miniImageNet's 64, 16 and 20 classes."""

SPLIT_SEED = 0

HEADER = """\
# The classes of the glyphs data set: {letters} letters in {classes} classes.
# A line is a split and the letters of one class, which look the same; the first one is drawn.
# Made by `python -m benchmarks.make_glyph_classes` from the DejaVu faces of matplotlib: all single
# letters of Latin, Greek, Cyrillic, Armenian and Georgian in all twelve faces, joined where their ink, scaled
# to one size, is nearly the same, then split at random with a fixed seed.
"""


def candidate_letters() -> list[str]:
    """All single letters of the five scripts that every one of the twelve faces can draw, by code point."""
    from matplotlib.ft2font import FT2Font

    charmaps = [set(FT2Font(str(path)).get_charmap()) for path in face_paths()]
    common = sorted(set.intersection(*charmaps))
    return [chr(code) for code in common if is_single_letter(chr(code))]


def is_single_letter(char: str) -> bool:
    """Whether ``char`` is one letter of the five scripts.

    Modifier letters (category Lm) are left out: they are small raised or lowered copies of other letters.
    Ligatures and digraphs are left out too: they are two letters, each of which is a class already, and
    could so bring a letter of one split into another.
    """
    name = unicodedata.name(char, "")
    category = unicodedata.category(char)
    if name.split(" ")[0] not in SCRIPTS or not category.startswith("L") or category == "Lm":
        return False
    return not ("LIGATURE" in name or "DIGRAPH" in name or _stands_for_two_letters(char))


def _stands_for_two_letters(char: str) -> bool:
    """Unicode itself splits letters as DZ, LJ and NJ in two (a compatibility decomposition)."""
    kind, *codes = unicodedata.decomposition(char).split() or [""]
    letters = [code for code in codes if unicodedata.category(chr(int(code, 16))).startswith("L")]
    return kind == "<compat>" and len(letters) > 1


def normalised_drawings(letters: Sequence[str], font_path: Path) -> Tensor:
    """The letters' ink, cropped, its longer side scaled to ``SIDE`` pixels and centred.

    Returns:
        bool ``[len(letters), SIDE, SIDE]``, true where there is ink.
    """
    from PIL import ImageFont

    font = ImageFont.truetype(str(font_path), size=160, layout_engine=ImageFont.Layout.BASIC)
    return torch.stack([_normalised(letter, font) for letter in letters])


def _normalised(letter: str, font: FreeTypeFont) -> Tensor:
    from PIL import Image, ImageDraw

    canvas = Image.new("L", (480, 480))
    ImageDraw.Draw(canvas).text((120, 120), letter, fill=255, font=font)
    ink = canvas.crop(canvas.getbbox())
    scale = SIDE / max(ink.size)
    size = (max(1, round(ink.width * scale)), max(1, round(ink.height * scale)))
    square = Image.new("L", (SIDE, SIDE))
    square.paste(ink.resize(size, Image.Resampling.BOX), ((SIDE - size[0]) // 2, (SIDE - size[1]) // 2))
    return torch.from_numpy(np.array(square)) > 127


def distance_to_ink(ink: Tensor) -> Tensor:
    """Euclidean distance of every pixel to the nearest pixel with ink, ``[N, S, S]`` bool to float32.

    Exact and separable: first along the columns, then along the rows.
    """
    steps = torch.arange(ink.shape[-1], dtype=torch.float32)
    squared = (steps[:, None] - steps[None, :]).square()
    fields = []
    for part in ink.split(32):  # few at once, so that the sums, S times as large as the drawings, stay in cache
        field = torch.where(part, 0.0, 1e6)
        field = (field[:, None, :, :] + squared[None, :, :, None]).amin(2)
        fields.append((field[:, :, None, :] + squared[None, None, :, :]).amin(3).sqrt())
    return torch.cat(fields)


def within(ink: Tensor, to_ink: Tensor, limit: float) -> Tensor:
    """Which drawings have a Hausdorff distance of at most ``limit`` pixels.

    That is the largest distance from the ink of one to the nearest ink of the other. Unlike the overlap it
    grows with a small extra mark far from the rest, and hardly with the thickness of the strokes, which
    differs between c and a C scaled to the same size.

    Args:
        ink: bool ``[N, S, S]``
        to_ink: ``distance_to_ink(ink)``, float32 ``[N, S, S]``
        limit: in pixels of these drawings.

    Returns:
        bool ``[N, N]``, symmetric.
    """
    far = (to_ink > limit).flatten(1).float()
    one_way = ink.flatten(1).float() @ far.T < 0.5  # no pixel of drawing i is far from the ink of drawing j
    return one_way & one_way.T


def look_alikes(letters: Sequence[str]) -> Tensor:
    """Which letters look the same but for position and size, bool ``[N, N]``."""
    paths = [path for path in face_paths() if path.stem in COMPARED_FACES]
    drawings = [normalised_drawings(letters, path) for path in paths]
    fields = [distance_to_ink(ink) for ink in drawings]

    def faces_within(limit: float) -> Tensor:
        pairs = zip(drawings, fields, strict=True)
        return torch.stack([within(ink, field, limit) for ink, field in pairs]).sum(0)

    in_one = faces_within(SAME_IN_ONE_FACE) >= 1
    in_two = faces_within(SAME_IN_TWO_FACES) >= 2
    in_cases = faces_within(SAME_IN_BOTH_CASES) >= 1
    return in_one | in_two | (in_cases & _plain_case_pairs(letters))


def _plain_case_pairs(letters: Sequence[str]) -> Tensor:
    """Which letters are the large and the small form of one letter without marks, bool ``[N, N]``."""
    index = {letter: i for i, letter in enumerate(letters)}
    pairs = torch.zeros(len(letters), len(letters), dtype=torch.bool)
    for large, i in index.items():
        small = index.get(large.lower(), i)
        if small != i and len(unicodedata.normalize("NFD", large)) == 1:
            pairs[i, small] = pairs[small, i] = True
    return pairs


def merge(letters: Sequence[str], alike: Tensor) -> list[str]:
    """Joins look-alikes, and their look-alikes in turn, to classes in the order of their first letters.

    If a plain letter looks the same in both cases, as Z and z do, it does so with the same marks (Ź and ź)
    too, though the marks take another part of the height.
    """
    classes = _Classes(letters)
    for i, j in alike.nonzero().tolist():
        classes.join(letters[i], letters[j])
    for large in letters:
        small = large.lower()
        a, b = unicodedata.normalize("NFD", large), unicodedata.normalize("NFD", small)
        if small in classes and a[1:] == b[1:] and classes.joined(a[0], b[0]):
            classes.join(large, small)
    return classes.listed()


class _Classes:
    """Union-find over letters; the first letter by code point stands for its class."""

    def __init__(self, letters: Iterable[str]) -> None:
        self._parent = {letter: letter for letter in letters}

    def __contains__(self, letter: str) -> bool:
        return letter in self._parent

    def _root(self, letter: str) -> str:
        while self._parent[letter] != letter:
            letter = self._parent[letter]
        return letter

    def join(self, a: str, b: str) -> None:
        first, second = sorted((self._root(a), self._root(b)))
        self._parent[second] = first

    def joined(self, a: str, b: str) -> bool:
        return a in self and b in self and self._root(a) == self._root(b)

    def listed(self) -> list[str]:
        members: dict[str, list[str]] = {}
        for letter in sorted(self._parent):
            members.setdefault(self._root(letter), []).append(letter)
        return ["".join(group) for group in members.values()]


def split_classes(classes: Sequence[str]) -> list[tuple[str, str]]:
    """Gives each class a split at random, always the same.

    Returns:
        ``(split, letters)`` for each class, in the given order.
    """
    order = list(range(len(classes)))
    random.Random(SPLIT_SEED).shuffle(order)
    val_from = round(FRACTIONS[0] * len(order))
    test_from = round((FRACTIONS[0] + FRACTIONS[1]) * len(order))
    owner = dict.fromkeys(order[:val_from], "train")
    owner |= dict.fromkeys(order[val_from:test_from], "val")
    owner |= dict.fromkeys(order[test_from:], "test")
    return [(owner[i], letters) for i, letters in enumerate(classes)]


def class_list() -> str:
    """The text of ``glyph_classes.txt``."""
    letters = candidate_letters()
    classes = merge(letters, look_alikes(letters))
    header = HEADER.format(letters=len(letters), classes=len(classes))
    return header + "".join(f"{split} {members}\n" for split, members in split_classes(classes))


def main() -> int:
    """Writes the list, or compares it (``--check``); returns the exit status."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the list differs")
    check = parser.parse_args().check
    path = Path(__file__).with_name("glyph_classes.txt")
    text = class_list()
    if not check:
        path.write_text(text, encoding="utf-8", newline="\n")
        print(f"wrote {path}")
        return 0
    same = path.exists() and path.read_text(encoding="utf-8") == text
    print(f"{path} is {'as' if same else 'NOT as'} this program makes it")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
