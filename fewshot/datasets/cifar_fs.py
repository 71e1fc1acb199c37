"""CIFAR-FS: 64, 16 and 20 of CIFAR-100's classes, all 600 images of each.

From torchvision's CIFAR-100 files (training and test set together) or from class folders.
"""

from importlib import resources
from pathlib import Path

import torch

from swbn_lightning.data import ImageSet
from swbn_lightning.data.cifar import CIFAR100_FILES, cifar100_class_names, is_cifar100, read_cifar100
from swbn_lightning.data.files import checked_root, shown_content
from swbn_lightning.data.folders import load_class_folders, require_classes
from swbn_lightning.errors import InputError

SPLITS = ("train", "val", "test")


def cifar_fs_classes(split: str) -> tuple[str, ...]:
    """The class names of a split, sorted."""
    text = resources.files("fewshot.datasets").joinpath("cifar_fs_classes.txt").read_text("utf-8")
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(sorted(name for part, name in rows if part == split))


def load_cifar_fs(split: str, root: str | None, image_size: int = 32) -> ImageSet:
    """One split of CIFAR-FS in memory.

    Args:
        split: ``"train"``, ``"val"`` or ``"test"``.
        root: a folder that holds ``cifar-100-python/`` with CIFAR-100's files (or is that folder), or
            class folders ``train|val|test/<class>/<image>``.
        image_size: side in pixels; 32 is the files' own and all that CIFAR-100's files give.

    Returns:
        RGB images, uint8 ``[N, 3, image_size, image_size]``.

    Raises:
        InputError: a root that is missing, not a folder, empty or of another kind; classes missing or
            foreign; unreadable files.
    """
    folder = checked_root("cifar-fs", root, _expected)
    for candidate in (folder, folder / "cifar-100-python"):
        if is_cifar100(candidate):
            if image_size != 32:
                raise InputError(f"cifar-fs: CIFAR-100's files are 32x32; got image_size={image_size}.")
            return _from_cifar100(candidate, split)
    for candidate in (folder, folder / "cifar_fs", folder / "cifar-fs"):
        if (candidate / split).is_dir():
            return _from_folders(candidate / split, split, image_size)
    raise InputError(f"cifar-fs: nothing usable in {folder} (it holds {shown_content(folder)}). {_expected(folder)}")


def _expected(folder: Path) -> str:
    files = ", ".join(CIFAR100_FILES)
    return (
        f"Looked for CIFAR-100's files {folder}/cifar-100-python/{{{files}}} and for class folders "
        f"{folder}/{{{','.join(SPLITS)}}}/<class>/<image>."
    )


def _from_cifar100(folder: Path, split: str) -> ImageSet:
    wanted = cifar_fs_classes(split)
    names = cifar100_class_names(folder)
    if missing := sorted(set(wanted) - set(names)):
        raise InputError(f"cifar-fs: {folder / 'meta'} lacks the classes {', '.join(missing)}.")
    parts = [read_cifar100(folder, part) for part in ("train", "test")]
    images, fine = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    position = torch.full((len(names),), -1)
    position[[names.index(name) for name in wanted]] = torch.arange(len(wanted))
    labels = position[fine]
    kept = labels >= 0
    return ImageSet(images[kept], labels[kept], wanted, f"cifar-fs/{split}")


def _from_folders(folder: Path, split: str, image_size: int) -> ImageSet:
    require_classes("cifar-fs", folder, cifar_fs_classes(split), f"the {split} split")
    return load_class_folders(folder, f"cifar-fs/{split}", image_size)
