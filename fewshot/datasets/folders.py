"""Any images in class folders or lists as a few-shot data set; tiered-ImageNet and CUB by the same way."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from fewshot.datasets.forms import (
    SPLITS,
    check_split,
    find_class_lists,
    find_image_lists,
    find_split_folders,
    nothing_usable,
    require_count,
)
from swbn_lightning.data import ImageSet
from swbn_lightning.data.cache import ImageCache
from swbn_lightning.data.files import checked_root
from swbn_lightning.data.listing import load_listing


class ClassCounts(NamedTuple):
    """How many classes the splits of a published division have."""

    train: int
    val: int
    test: int


TIERED_IMAGENET = ClassCounts(351, 97, 160)
"""Ren et al., "Meta-learning for semi-supervised few-shot classification", ICLR 2018."""

CUB = ClassCounts(100, 50, 50)
"""CUB-200-2011 as Chen et al. divide it, "A closer look at few-shot classification", ICLR 2019."""


def load_folders(
    split: str,
    root: str | None,
    image_size: int = 84,
    cache: ImageCache | None = None,
    name: str = "folders",
    counts: ClassCounts | None = None,
) -> ImageSet:
    """One split of images in class folders, or in lists, in memory: ``3 * image_size**2`` bytes an image.

    Args:
        split: ``"train"``, ``"val"`` or ``"test"``.
        root: a folder that holds one of these; what stands first is taken where there are several:

            - ``{train,val,test}.csv`` (filename,label; in the root, ``splits/`` or ``csv/``) with the images in
              ``images/``, the root, ``images/<label>/``, ``<label>/`` or ``<split>/<label>/``;
            - ``{train,val,test}.txt`` (a class a line), with the class folders in ``images/``, or else in the root;
            - class folders ``train|val|test/<class>/<image>``, also below ``images/``.
        image_size: side in pixels to which all images are resized.
        cache: of the decoded images.
        name: of the data set, for messages.
        counts: how many classes each split must have, if that is known.

    Returns:
        RGB images (gray ones repeat their channel), uint8 ``[N, 3, image_size, image_size]``; labels follow the sorted
        class names.

    Raises:
        InputError: a root that is missing, not a folder, or holds nothing of this; another number of classes than
            ``counts``; a class or a file in two splits; names that lead out of the root; files that are listed but
            missing; a class without images; an unreadable image.
    """
    check_split(name, split)
    folder = checked_root(name, root, _expected)
    found = (
        find_image_lists(name, folder, split)
        or find_class_lists(name, folder, split)
        or find_split_folders(name, [folder, folder / "images"], split)
    )
    if found is None:
        raise nothing_usable(name, folder, _expected)
    if counts is not None:
        require_count(name, len(found.listing.classes), getattr(counts, split), folder, split)
    return load_listing(found.listing, f"{name}/{split}", image_size, cache=cache, source=found.source)


load_tiered_imagenet = partial(load_folders, name="tiered-imagenet", counts=TIERED_IMAGENET)
load_cub = partial(load_folders, name="cub", counts=CUB)


def _expected(folder: Path) -> str:
    splits = "{" + ",".join(SPLITS) + "}"
    return (
        f"Looked for lists {folder}/{splits}.csv (filename,label) or .txt (a class a line), also in splits/ or csv/, "
        f"and for class folders {folder}/{splits}/<class>/<image>."
    )
