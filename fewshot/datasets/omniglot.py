"""Omniglot: 1,623 hand-drawn characters of 50 alphabets, 20 drawings of each (Lake et al., Science 2015)."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fewshot.datasets.forms import LIST_FOLDERS, SPLITS, Found, check_split, find_lists, nothing_usable
from swbn_lightning.data import ImageSet
from swbn_lightning.data.cache import ImageCache
from swbn_lightning.data.files import checked_root
from swbn_lightning.data.folders import class_folders, class_images
from swbn_lightning.data.listing import ImageListing, check_apart, load_listing
from swbn_lightning.data.lists import read_class_list
from swbn_lightning.errors import InputError

OMNIGLOT_MEAN, OMNIGLOT_STD = 0.0805, 0.218
"""Of the pixels in [0, 1] at 28x28, strokes being 1: of the 4,840 drawings of the two "small" background sets."""

BACKGROUND = ("images_background", "images_background_small1", "images_background_small2")
EVALUATION = ("images_evaluation",)
POOL = "data"  # where Snell et al.'s code keeps all alphabets together
BASES = ("", "omniglot-py")  # the second is torchvision's
LISTS = (*LIST_FOLDERS, "splits/vinyals")

HELD_OUT = 0.2
"""Share of the alphabets that are held out for validation, and for test where there is no evaluation set."""

SPLIT_SEED = 0

_ROTATIONS = ("rot000", "rot090", "rot180", "rot270")  # as Snell et al.'s lists write them

Characters = dict[str, list[Path]]


def load_omniglot(
    split: str, root: str | None, image_size: int = 28, cache: ImageCache | None = None, rotations: bool = False
) -> ImageSet:
    """Load one split of Omniglot into memory; a class is a character of an alphabet, ``"Greek/character01"``.

    The division of Vinyals et al. is used if its lists are in the root. If there are only Lake et al.'s background and
    evaluation sets, these are training and test, and a fifth of the background's **alphabets**, drawn by a fixed seed,
    is validation. Without an evaluation set, another fifth is the test. No alphabet is then in two splits, whereas
    Vinyals et al. divide by characters: results of the two divisions cannot be compared. Each run reports which one it
    used.

    Args:
        split: ``"train"``, ``"val"`` or ``"test"``.
        root: a folder with one of the following layouts. If there are several, the first in this list is used:

            - ``{train,val,test}.txt`` (in the root, ``splits/`` or ``splits/vinyals/``) with one ``alphabet/character``
              per line, and the alphabets in the sets below or in ``data/``. The lists of Vinyals et al. as published by
              Snell et al., whose lines end in rotations such as ``/rot090``, also work;
            - Lake et al.'s zips, unpacked: ``images_background/`` (or one or more of its small sets) and
              ``images_evaluation/``, each with ``<alphabet>/<character>/<image>``. A character in several background
              sets is one class, and a drawing in several of them is used once.
        image_size: side in pixels; 28 is usual since Vinyals et al.
        cache: cache of the decoded images.
        rotations: make four classes of each character, rotated by 0, 90, 180 and 270 degrees (counter-clockwise), as in
            Santoro et al., Vinyals et al. and Snell et al.

    Returns:
        Grey images, strokes 255 on 0, uint8 ``[N, 1, image_size, image_size]``.

    Raises:
        InputError: a root that is missing, not a folder, or has none of these layouts; lists that name missing
            characters; a character in two splits; too few alphabets to divide; an unreadable image.
    """
    check_split("omniglot", split)
    folder = checked_root("omniglot", root, _expected)
    found = None
    for base in (folder / inner for inner in BASES):
        found = found or _listed(folder, base, split) or _sets(base, split)
    if found is None:
        raise nothing_usable("omniglot", folder, _expected)
    name = f"omniglot/{split}"
    image_set = load_listing(found.listing, name, image_size, channels=1, cache=cache, source=found.source)
    strokes = ImageSet(inverted(image_set.images), image_set.labels, image_set.class_names, name, found.source)
    return _rotated(strokes) if rotations else strokes


load_rotated_omniglot = partial(load_omniglot, rotations=True)


def inverted(images: Tensor) -> Tensor:
    """Turn black ink on white paper, uint8 as in the files, into strokes of 255 on 0."""
    return 255 - images


def _rotated(image_set: ImageSet) -> ImageSet:
    turns = range(len(_ROTATIONS))
    images = torch.cat([torch.rot90(image_set.images, turn, (2, 3)) for turn in turns])
    labels = torch.cat([len(turns) * image_set.labels + turn for turn in turns])
    names = tuple(f"{name}/{turn}" for name in image_set.class_names for turn in _ROTATIONS)
    source = f"{image_set.source}; each in four rotations"
    return ImageSet(images, labels, names, image_set.name, source)


def _listed(root: Path, base: Path, split: str) -> Found | None:
    lists = find_lists("omniglot", root, split, ".txt", LISTS)
    pooled = [base / name for name in (*BACKGROUND, *EVALUATION, POOL) if (base / name).is_dir()]
    if lists is None or not pooled:
        return None
    characters = _merged(pooled)
    listings = {part: _chosen(characters, file, base) for part, file in lists.items()}
    check_apart("omniglot", listings)
    return Found(listings[split], f"characters listed in {lists[split]}")


def _chosen(characters: Characters, list_file: Path, base: Path) -> ImageListing:
    lines = set(read_class_list(list_file))
    chosen = sorted({line[:-7] if all(line[:-6] + turn in lines for turn in _ROTATIONS) else line for line in lines})
    if unknown := [character for character in chosen if character not in characters]:
        raise InputError(f"omniglot: {list_file} names {unknown[0]}, which is not in {base} (<alphabet>/<character>).")
    return ImageListing({character: characters[character] for character in chosen}, base)


def _sets(base: Path, split: str) -> Found | None:
    background = [base / name for name in BACKGROUND if (base / name).is_dir()]
    evaluation = [base / name for name in EVALUATION if (base / name).is_dir()]
    if not background:
        return None
    characters = _merged(background)
    alphabets = sorted({character.partition("/")[0] for character in characters})
    shuffled = [
        alphabets[i] for i in torch.randperm(len(alphabets), generator=torch.Generator().manual_seed(SPLIT_SEED))
    ]
    count = max(1, round(HELD_OUT * len(alphabets)))
    parts = {"val": shuffled[:count], "test": [] if evaluation else shuffled[count : 2 * count]}
    parts["train"] = [a for a in shuffled if a not in parts["val"] and a not in parts["test"]]
    if not parts["train"]:
        raise InputError(f"omniglot: {len(alphabets)} alphabets in {base} are too few to divide; give at least 3.")
    listings = {
        part: ImageListing({c: files for c, files in characters.items() if c.partition("/")[0] in chosen}, base)
        for part, chosen in ((part, parts[part]) for part in SPLITS)
    }
    if evaluation:
        listings["test"] = ImageListing(_merged(evaluation), base)
    check_apart("omniglot", listings)
    names = evaluation if split == "test" and evaluation else background
    which = f"the evaluation set, {len(listings['test'].classes)} characters"
    if split != "test" or not evaluation:
        which = f"{len(parts[split])} of {len(alphabets)} alphabets, drawn by seed {SPLIT_SEED}"
        which += f" ({', '.join(sorted(parts[split]))})" if split != "train" else ""
    where = ", ".join(str(name) for name in names)
    return Found(listings[split], f"{where}: {which}; not Vinyals et al.'s division")


def _merged(folders: Iterable[Path]) -> Characters:
    """Characters of all folders ``<alphabet>/<character>/``; a drawing that is in two of them is used once."""
    drawings: dict[str, dict[str, Path]] = {}
    for folder in folders:
        inner = folder / folder.name  # some unpack a zip into a folder of its name
        for alphabet in class_folders(inner if inner.is_dir() else folder):
            for character, files in class_images(alphabet, f"omniglot, {alphabet.name}"):
                known = drawings.setdefault(f"{alphabet.name}/{character}", {})
                for file in files:
                    known.setdefault(file.name, file)
    return {name: [files[key] for key in sorted(files)] for name, files in sorted(drawings.items())}


def _expected(folder: Path) -> str:
    return (
        f"Looked for Lake et al.'s zips, unpacked: {folder}/images_background/<alphabet>/<character>/<image> (or "
        f"images_background_small1/ and …small2/) and images_evaluation/; and for lists "
        f"{folder}/{{{','.join(SPLITS)}}}.txt of alphabet/character beside them."
    )
