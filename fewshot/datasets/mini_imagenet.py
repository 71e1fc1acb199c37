"""mini-ImageNet: 64, 16 and 20 of ImageNet's classes, 600 images of each, as Ravi and Larochelle divided them.

From lists and JPEG files, from the pickles of learn2learn or gidariss, or from class folders.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fewshot.datasets.forms import (
    SPLITS,
    check_split,
    find_image_lists,
    find_pickle,
    find_split_folders,
    nothing_usable,
    require_split_classes,
)
from swbn_lightning.data import ImageSet
from swbn_lightning.data.arrays import load_class_arrays, load_labelled_arrays
from swbn_lightning.data.cache import ImageCache
from swbn_lightning.data.files import checked_root
from swbn_lightning.data.listing import load_listing

CLASSES = "mini_imagenet_classes.txt"
NAME = "mini-imagenet"


class Pickles(NamedTuple):
    """A family of pickles: of each split the names its file may have, and what reads it."""

    files: dict[str, tuple[str, ...]]
    load: Callable[[Path, str, int], ImageSet]


LEARN2LEARN = Pickles(
    {
        "train": ("mini-imagenet-cache-train.pkl",),
        "val": ("mini-imagenet-cache-validation.pkl", "mini-imagenet-cache-val.pkl"),
        "test": ("mini-imagenet-cache-test.pkl",),
    },
    load_class_arrays,
)
"""Ren et al.'s files (ICLR 2018), which learn2learn downloads; it writes "validation"."""

GIDARISS = Pickles(
    {
        # "train_phase_train": the other files of that name are other images of the 64 training classes.
        "train": ("miniImageNet_category_split_train_phase_train.pickle",),
        "val": ("miniImageNet_category_split_val.pickle",),
        "test": ("miniImageNet_category_split_test.pickle",),
    },
    load_labelled_arrays,
)
"""Those of Gidaris and Komodakis (CVPR 2018), which MetaOptNet reads too."""


def load_mini_imagenet(split: str, root: str | None, image_size: int = 84, cache: ImageCache | None = None) -> ImageSet:
    """One split of mini-ImageNet in memory: 21 kB an image of 84x84, 0.8 GB for the 38,400 of training.

    Args:
        split: ``"train"``, ``"val"`` or ``"test"``.
        root: a folder that holds one of these; what stands first is taken where there are several:

            - ``{train,val,test}.csv`` (filename,label; in the root, ``splits/`` or ``csv/``) with the images in
              ``images/``, the root, ``images/<label>/``, ``<label>/`` or ``<split>/<label>/``;
            - ``mini-imagenet-cache-{train,validation,test}.pkl`` (or ``-val``);
            - ``miniImageNet_category_split_{train_phase_train,val,test}.pickle``;
            - class folders ``train|val|test/<class>/<image>``, also below ``images/``.
        image_size: side in pixels; files of another size are resized, pickles hold 84 and give nothing else.
        cache: of the decoded image files.

    Returns:
        RGB images, uint8 ``[N, 3, image_size, image_size]``; labels follow the sorted class names.

    Raises:
        InputError: a root that is missing, not a folder, or holds nothing of this; classes that are not the
            split's; a class or a file in two splits; files that are listed but missing; an unreadable file.
    """
    check_split(NAME, split)
    folder = checked_root(NAME, root, _expected)
    found = find_image_lists(NAME, folder, split)
    if found is None:
        for family in (LEARN2LEARN, GIDARISS):
            if path := find_pickle(folder, family.files[split]):
                image_set = family.load(path, f"{NAME}/{split}", image_size)
                require_split_classes(NAME, image_set, path, split, CLASSES)
                return image_set
        found = find_split_folders(NAME, [folder, folder / "images"], split)
    if found is None:
        raise nothing_usable(NAME, folder, _expected)
    require_split_classes(NAME, found.listing, folder, split, CLASSES)
    return load_listing(found.listing, f"{NAME}/{split}", image_size, cache=cache, source=found.source)


def _expected(folder: Path) -> str:
    splits = "{" + ",".join(SPLITS) + "}"
    return (
        f"Looked for lists {folder}/{splits}.csv (also in splits/ or csv/) with images/, for "
        f"{folder}/mini-imagenet-cache-{{train,validation|val,test}}.pkl, for "
        f"{folder}/miniImageNet_category_split_{{train_phase_train,val,test}}.pickle and for class folders "
        f"{folder}/{splits}/<class>/<image>."
    )
