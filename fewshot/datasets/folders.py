"""Few-shot data sets from class folders or lists of images, including mini-ImageNet, tiered-ImageNet and CUB."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fewshot.datasets.forms import (
    SPLITS,
    check_split,
    classes_of,
    find_class_lists,
    find_image_lists,
    find_split_folders,
    nothing_usable,
)
from swbn_lightning.data import ImageSet
from swbn_lightning.data.arrays import load_class_arrays
from swbn_lightning.data.cache import ImageCache
from swbn_lightning.data.files import checked_root
from swbn_lightning.data.folders import require_classes
from swbn_lightning.data.listing import load_listing
from swbn_lightning.errors import InputError

TIERED_IMAGENET = {"train": 351, "val": 97, "test": 160}
"""Ren et al., "Meta-learning for semi-supervised few-shot classification", ICLR 2018."""

CUB = {"train": 100, "val": 50, "test": 50}
"""CUB-200-2011 as Chen et al. divide it, "A closer look at few-shot classification", ICLR 2019."""

MINI_IMAGENET_CLASSES = "mini_imagenet_classes.txt"
"""64, 16 and 20 of ImageNet's classes, 600 images of each, as Ravi and Larochelle divided them."""

MINI_IMAGENET_PICKLES = {
    "train": ("mini-imagenet-cache-train.pkl", "miniImageNet_category_split_train_phase_train.pickle"),
    "val": (
        "mini-imagenet-cache-validation.pkl",
        "mini-imagenet-cache-val.pkl",
        "miniImageNet_category_split_val.pickle",
    ),
    "test": ("mini-imagenet-cache-test.pkl", "miniImageNet_category_split_test.pickle"),
}
"""Ren et al.'s files (ICLR 2018), which learn2learn downloads (it writes "validation"), and gidariss's (CVPR 2018).

Their images have 84 pixels. Gidariss's other files of training hold other images of the 64 training classes.
"""


def load_folders(
    split: str,
    root: str | None,
    image_size: int = 84,
    cache: ImageCache | None = None,
    *,
    name: str = "folders",
    counts: Mapping[str, int] | None = None,
    classes: str | None = None,
    pickles: Mapping[str, Sequence[str]] | None = None,
    also: str = "",
) -> ImageSet:
    """Load one split of images in class folders or lists into memory: ``3 * image_size**2`` bytes per image.

    Args:
        split: ``"train"``, ``"val"`` or ``"test"``.
        root: a folder with one of the following layouts. If there are several, the first in this list is used:

            - ``{train,val,test}.csv`` (filename,label; in the root, ``splits/`` or ``csv/``) with the images in
              ``images/``, the root, ``images/<label>/``, ``<label>/`` or ``<split>/<label>/``;
            - the ``pickles``;
            - ``{train,val,test}.txt`` (one class per line), with the class folders in ``images/``, or else in the root;
            - class folders ``train|val|test/<class>/<image>``, also below ``images/``.
        image_size: side in pixels to which all images are resized; pickles hold one size and give only that.
        cache: cache of the decoded images.
        name: name of the data set, for messages.
        counts: number of classes that each split must have, if known.
        classes: file with the classes that each split must have, in the folder of this file.
        pickles: for each split, the names that its file may have.
        also: description of other layouts of a root, for messages.

    Returns:
        RGB images (grey ones repeat their channel), uint8 ``[N, 3, image_size, image_size]``; labels follow the sorted
        class names.

    Raises:
        InputError: a root that is missing, not a folder, or has none of these layouts; unexpected classes; a class or a
            file in two splits; names that lead out of the root; files that are listed but missing; a class without
            images; an unreadable image.
    """
    check_split(name, split)
    expected = partial(_expected, also)
    folder = checked_root(name, root, expected)
    found = find_image_lists(name, folder, split)
    if found is None:
        for path in (folder / file for file in (pickles or {}).get(split, ()) if (folder / file).is_file()):
            image_set = load_class_arrays(path, f"{name}/{split}", image_size)
            _check_classes(name, image_set.class_names, path, split, counts, classes)
            return image_set
        found = find_class_lists(name, folder, split)
    found = found or find_split_folders(name, [folder, folder / "images"], split)
    if found is None:
        raise nothing_usable(name, folder, expected)
    _check_classes(name, tuple(found.listing.classes), folder, split, counts, classes)
    image_set = load_listing(found.listing, f"{name}/{split}", image_size, cache=cache, source=found.source)
    known = counts is not None or classes is not None  # then the name says which images they are
    return image_set if known else replace(image_set, content_id=found.listing.content_id)


load_tiered_imagenet = partial(load_folders, name="tiered-imagenet", counts=TIERED_IMAGENET)
load_cub = partial(load_folders, name="cub", counts=CUB)
load_mini_imagenet = partial(
    load_folders,
    name="mini-imagenet",
    classes=MINI_IMAGENET_CLASSES,
    pickles=MINI_IMAGENET_PICKLES,
    also="for mini-imagenet-cache-{train,validation|val,test}.pkl, "
    "for miniImageNet_category_split_{train_phase_train,val,test}.pickle, ",
)


def _check_classes(
    name: str,
    found: tuple[str, ...],
    where: Path,
    split: str,
    counts: Mapping[str, int] | None,
    classes: str | None,
) -> None:
    wanted = classes_of(classes, split) if classes is not None else ()
    if wanted and all(label.startswith("label ") for label in found):  # numbers out of a pickle, which can be counted
        counts = {split: len(wanted)}
    elif wanted:
        require_classes(name, where, found, wanted, f"the {split} split")
    if counts is not None and len(found) != counts[split]:
        raise InputError(
            f"{name}: {where} holds {len(found)} classes, but the {split} split of {name} has {counts[split]}. For a "
            "division of one's own there is the data set 'folders'."
        )


def _expected(also: str, folder: Path) -> str:
    splits = "{" + ",".join(SPLITS) + "}"
    return (
        f"Looked for lists {folder}/{splits}.csv (filename,label) or .txt (a class a line), also in splits/ or csv/, "
        f"{also}and for class folders {folder}/{splits}/<class>/<image>."
    )
