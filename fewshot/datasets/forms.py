"""Layouts in which few-shot data sets are distributed, detected from the content of the root.

A loader tries the layouts of its data set one after another. Each returns None if the root does not have it, and raises
if the root has it with errors.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from swbn_lightning.data.files import shown_content
from swbn_lightning.data.folders import (
    class_folders,
    image_files,
    list_class_folders,
    split_folders,
    split_of,
)
from swbn_lightning.data.listing import ImageListing, check_apart
from swbn_lightning.data.lists import Contained, list_images, read_class_list
from swbn_lightning.errors import InputError

SPLITS = ("train", "val", "test")
LIST_FOLDERS = ("", "splits", "csv")
"""Where below a root the lists of the splits may lie."""

IMAGE_PLACES = (
    "images/{filename}",
    "{filename}",
    "images/{label}/{filename}",
    "{label}/{filename}",
)
"""Where below a root an image of a ``filename,label`` list may lie; ``<split>/<label>/<filename>`` besides."""

BESIDE = ("images", "splits", "csv", "cifar-100-python", "cifar-fs", "fc100")
"""Folders that may lie beside those of the splits: parts of the other forms, which a root may hold too."""


class Found(NamedTuple):
    """Image files of a split, and a description of where they were found."""

    listing: ImageListing
    source: str


@cache
def classes_of(file: str, split: str) -> tuple[str, ...]:
    """Classes of a split in one of this folder's class lists, sorted."""
    text = resources.files("fewshot.datasets").joinpath(file).read_text("utf-8")
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(sorted(name for part, name in rows if part == split))


def check_split(name: str, split: str) -> None:
    """Raise :class:`InputError` for an unknown split."""
    if split not in SPLITS:
        raise InputError(f"{name}: there is no split {split!r}; there are {', '.join(SPLITS)}.")


def find_lists(
    name: str, root: Path, split: str, suffix: str, folders: Sequence[str] = LIST_FOLDERS
) -> dict[str, Path] | None:
    """Find the lists of all splits, ``{train,val,test}<suffix>``, in the first of ``folders`` that has one.

    Raises:
        InputError: there are lists, but not for ``split``; two lists of one split.
    """
    for folder in folders:
        found: dict[str, Path] = {}
        for file in sorted((root / folder).glob(f"*{suffix}")):
            part = split_of(file.stem)
            if part is None or not file.is_file():
                continue
            if part in found:
                raise InputError(f"{name}: {found[part]} and {file.name} are both lists of {part}; keep one.")
            found[part] = file
        found = {part: found[part] for part in SPLITS if part in found}
        if found:
            if split not in found:
                here = ", ".join(str(file) for file in found.values())
                raise InputError(f"{name}: {here} found, but no {split}{suffix} beside.")
            return found
    return None


def find_image_lists(name: str, root: Path, split: str) -> Found | None:
    """Find ``{train,val,test}.csv`` with the columns filename and label, and the images that they name.

    All existing lists are read, to check that the splits share no class and no file.
    """
    lists = find_lists(name, root, split, ".csv")
    if lists is None:
        return None
    listings = {part: list_images(name, root, file, _image_places(root, part)) for part, file in lists.items()}
    check_apart(name, listings)
    return Found(listings[split], f"images listed in {lists[split]}")


def find_class_lists(name: str, root: Path, split: str) -> Found | None:
    """Find ``{train,val,test}.txt`` with one class name per line, and class folders in the root or ``images/``."""
    lists = find_lists(name, root, split, ".txt")
    if lists is None:
        return None
    base = root / "images" if (root / "images").is_dir() else root
    listings = {part: _listed_classes(name, base, file) for part, file in lists.items()}
    check_apart(name, listings)
    return Found(listings[split], f"class folders of {base} listed in {lists[split]}")


def find_split_folders(name: str, bases: Iterable[Path], split: str) -> Found | None:
    """Find ``train|val|test/<class>/<image>`` below the first of ``bases`` that has one of these folders."""
    for base in bases:
        folders = split_folders(name, base, BESIDE) if base.is_dir() else {}
        if folders:
            if split not in folders:
                raise InputError(f"{name}: {base} has no folder {split}/ (it holds {shown_content(base)}).")
            listings = {part: list_class_folders(folder, f"{name}/{part}") for part, folder in folders.items()}
            check_apart(name, listings)
            return Found(listings[split], f"class folders of {folders[split]}")
    return None


def nothing_usable(name: str, root: Path, expected: Callable[[Path], str]) -> InputError:
    """Error for a root that has none of a data set's layouts."""
    return InputError(f"{name}: nothing usable in {root} (it holds {shown_content(root)}). {expected(root)}")


def _image_places(root: Path, split: str) -> list[str]:
    own = [folder.name for folder in class_folders(root) if split_of(folder.name) == split] or [split]
    return [*IMAGE_PLACES, *(f"{folder}/{{label}}/{{filename}}" for folder in own)]


def _listed_classes(name: str, base: Path, list_file: Path) -> ImageListing:
    contained = Contained(base)
    classes = {}
    for class_name in sorted(read_class_list(list_file)):
        folder = contained(class_name, list_file)
        if not folder.is_dir():
            raise InputError(
                f"{name}: {list_file} names the class {class_name}, but there is no folder {folder} "
                f"({base} holds {shown_content(base)})."
            )
        classes[class_name] = image_files(folder)
        if not classes[class_name]:
            raise InputError(f"{name}: class folder {folder}, which {list_file} names, holds no images.")
    return ImageListing(classes, base)
