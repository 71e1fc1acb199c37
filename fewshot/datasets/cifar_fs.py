"""CIFAR-FS and FC100: two divisions of CIFAR-100's classes, all 600 images of each.

From torchvision's CIFAR-100 files (training and test set together), from MetaOptNet's pickles or from class folders.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from fewshot.datasets.forms import (
    SPLITS,
    check_split,
    classes_of,
    find_pickle,
    find_split_folders,
    nothing_usable,
    require_split_classes,
)
from swbn_lightning.data import ImageSet
from swbn_lightning.data.arrays import load_labelled_arrays
from swbn_lightning.data.cache import ImageCache
from swbn_lightning.data.cifar import CIFAR100_FILES, cifar100_class_names, is_cifar100, read_cifar100
from swbn_lightning.data.files import checked_root
from swbn_lightning.data.listing import load_listing
from swbn_lightning.errors import InputError


class Division(NamedTuple):
    """One way to divide CIFAR-100's classes into splits."""

    name: str
    classes: str  # the class list, a file beside this one
    folders: tuple[str, ...]  # below the root, what may hold the split folders
    pickles: str  # MetaOptNet's files, with {split}

    def expected(self, folder: Path) -> str:
        """What a root should hold, for messages."""
        return (
            f"Looked for CIFAR-100's files {folder}/cifar-100-python/{{{','.join(CIFAR100_FILES)}}}, for MetaOptNet's "
            f"{folder}/{self.pickles.format(split='{' + ','.join(SPLITS) + '}')} and for class folders "
            f"{folder}/{{{','.join(SPLITS)}}}/<class>/<image>."
        )


CIFAR_FS = Division("cifar-fs", "cifar_fs_classes.txt", ("", "cifar_fs", "cifar-fs"), "CIFAR_FS_{split}.pickle")
"""64, 16 and 20 classes drawn at random (Bertinetto et al., ICLR 2019)."""

FC100 = Division("fc100", "fc100_classes.txt", ("", "fc100", "FC100"), "FC100_{split}.pickle")
"""60, 20 and 20 classes; no superclass is in two splits (Oreshkin et al., NeurIPS 2018)."""


def cifar_fs_classes(split: str) -> tuple[str, ...]:
    """The class names of a split of CIFAR-FS, sorted."""
    return classes_of(CIFAR_FS.classes, split)


def load_cifar_fs(split: str, root: str | None, image_size: int = 32, cache: ImageCache | None = None) -> ImageSet:
    """One split of CIFAR-FS in memory, as :func:`load_division`."""
    return load_division(CIFAR_FS, split, root, image_size, cache)


def load_fc100(split: str, root: str | None, image_size: int = 32, cache: ImageCache | None = None) -> ImageSet:
    """One split of FC100 in memory, as :func:`load_division`."""
    return load_division(FC100, split, root, image_size, cache)


def load_division(
    division: Division, split: str, root: str | None, image_size: int = 32, cache: ImageCache | None = None
) -> ImageSet:
    """One split of CIFAR-FS or FC100 in memory.

    Args:
        division: which of the two.
        split: ``"train"``, ``"val"`` or ``"test"``.
        root: a folder that holds ``cifar-100-python/`` with CIFAR-100's files (or is that folder), or MetaOptNet's
            ``CIFAR_FS_{train,val,test}.pickle`` (``FC100_…``), or class folders ``train|val|test/<class>/<image>``.
            What stands first here is taken where there are several.
        image_size: side in pixels; 32 is the files' own and all that CIFAR-100's files and the pickles give.
        cache: of the decoded images of class folders.

    Returns:
        RGB images, uint8 ``[N, 3, image_size, image_size]``.

    Raises:
        InputError: a root that is missing, not a folder, empty or of another kind; classes missing or
            foreign; a class in two splits; unreadable files.
    """
    name = division.name
    check_split(name, split)
    folder = checked_root(name, root, division.expected)
    for candidate in (folder, folder / "cifar-100-python"):
        if is_cifar100(candidate):
            if image_size != 32:
                raise InputError(f"{name}: CIFAR-100's files are 32x32; got image_size={image_size}.")
            return _from_cifar100(division, candidate, split)
    if pickled := find_pickle(folder, [division.pickles.format(split=split)]):
        image_set = load_labelled_arrays(pickled, f"{name}/{split}", image_size)
        require_split_classes(name, image_set, pickled, split, division.classes)
        return image_set
    found = find_split_folders(name, [folder / inner for inner in division.folders], split)
    if found is None:
        raise nothing_usable(name, folder, division.expected)
    require_split_classes(name, found.listing, found.listing.root, split, division.classes)
    return load_listing(found.listing, f"{name}/{split}", image_size, cache=cache, source=found.source)


def _from_cifar100(division: Division, folder: Path, split: str) -> ImageSet:
    wanted = classes_of(division.classes, split)
    names = cifar100_class_names(folder)
    if missing := sorted(set(wanted) - set(names)):
        raise InputError(f"{division.name}: {folder / 'meta'} lacks the classes {', '.join(missing)}.")
    parts = [read_cifar100(folder, part) for part in ("train", "test")]
    images, fine = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    position = torch.full((len(names),), -1)
    position[[names.index(name) for name in wanted]] = torch.arange(len(wanted))
    labels = position[fine]
    kept = labels >= 0
    source = f"CIFAR-100's training and test images in {folder}"
    return ImageSet(images[kept], labels[kept], wanted, f"{division.name}/{split}", source)
