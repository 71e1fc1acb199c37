"""CIFAR-FS and FC100: two divisions of CIFAR-100's classes, each class with all its 600 images.

They are read from torchvision's CIFAR-100 files (training and test set together), MetaOptNet's pickles or class
folders.
"""

from functools import partial
from pathlib import Path

import torch

from fewshot.datasets.folders import load_folders
from fewshot.datasets.forms import SPLITS, check_split, classes_of
from swbn_lightning.data import ImageSet
from swbn_lightning.data.cache import ImageCache
from swbn_lightning.data.cifar import CIFAR100_FILES, cifar100_class_names, read_cifar100
from swbn_lightning.errors import InputError

CIFAR_FS_CLASSES, FC100_CLASSES = "cifar_fs_classes.txt", "fc100_classes.txt"
PICKLES = {"cifar-fs": "CIFAR_FS_{}.pickle", "fc100": "FC100_{}.pickle"}
"""MetaOptNet's files, with the split."""


def load_division(
    split: str, root: str | None, image_size: int = 32, cache: ImageCache | None = None, *, name: str, classes: str
) -> ImageSet:
    """Load one split of CIFAR-FS or FC100 into memory, RGB.

    The root holds ``cifar-100-python/`` with CIFAR-100's files (or is that folder), which have only 32x32 images; or
    MetaOptNet's :data:`PICKLES`; or anything else that :func:`~fewshot.datasets.folders.load_folders` reads.
    ``classes`` is a class list in the folder of this file.
    """
    check_split(name, split)
    folder = Path(root or "").expanduser()
    for candidate in (folder, folder / "cifar-100-python") if root else ():
        if all((candidate / file).is_file() for file in CIFAR100_FILES):
            if image_size != 32:
                raise InputError(f"{name}: CIFAR-100's files are 32x32; got image_size={image_size}.")
            return _from_cifar100(candidate, name, split, classes_of(classes, split))
    also = f"for CIFAR-100's files cifar-100-python/{{{','.join(CIFAR100_FILES)}}}, "
    also += f"for {PICKLES[name].format('{' + ','.join(SPLITS) + '}')}, "
    pickles = {split: (PICKLES[name].format(split),)}
    return load_folders(split, root, image_size, cache, name=name, classes=classes, pickles=pickles, also=also)


load_cifar_fs = partial(load_division, name="cifar-fs", classes=CIFAR_FS_CLASSES)
"""64, 16 and 20 classes drawn at random (Bertinetto et al., ICLR 2019)."""

load_fc100 = partial(load_division, name="fc100", classes=FC100_CLASSES)
"""60, 20 and 20 classes; no superclass is in two splits (Oreshkin et al., NeurIPS 2018)."""


def _from_cifar100(folder: Path, name: str, split: str, wanted: tuple[str, ...]) -> ImageSet:
    names = cifar100_class_names(folder)
    if missing := sorted(set(wanted) - set(names)):
        raise InputError(f"{name}: {folder / 'meta'} lacks the classes {', '.join(missing)}.")
    parts = [read_cifar100(folder, part) for part in ("train", "test")]
    images, fine = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    position = torch.full((len(names),), -1)
    position[[names.index(class_name) for class_name in wanted]] = torch.arange(len(wanted))
    labels = position[fine]
    kept = labels >= 0
    source = f"CIFAR-100's training and test images in {folder}"
    return ImageSet(images[kept], labels[kept], wanted, f"{name}/{split}", source)
