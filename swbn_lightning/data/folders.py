"""Class folders, ``<class>/<image>``, and folders of splits that hold some: which images there are."""

import os
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from swbn_lightning.data.listing import ImageListing
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
"""Whose formats :data:`~swbn_lightning.data.decode.FORMATS` are."""

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""As torchvision and timm normalise for their networks (torchvision's page "Models and pre-trained weights")."""

SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""What the folder, or the list, of a split may be called; upper and lower case count alike."""


def class_folders(root: Path) -> list[Path]:
    """The folders directly below ``root``, sorted by name; hidden ones and ``__MACOSX`` are passed over.

    Raises:
        InputError: the name of one is not UTF-8: it is the class's, which is printed and written to files.
    """
    found = sorted(p for p in root.iterdir() if _may_be_class(p))
    for folder in found:
        try:
            folder.name.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(folder).decode(errors="backslashreplace")
            raise InputError(f"the name of the class folder {shown} is not UTF-8; rename the folder.") from None
    return found


def image_files(folder: Path) -> list[Path]:
    """The image files directly in ``folder``, sorted by name; hidden and foreign files are passed over."""
    return sorted(p for p in folder.iterdir() if _may_be_image(p))


def class_images(root: Path, name: str) -> Iterator[tuple[str, list[Path]]]:
    """Every class folder below ``root`` with its images, class after class, sorted by name.

    Hidden and foreign files are passed over; a warning at the end counts them.

    Raises:
        InputError: no class folder below ``root``; a class folder without an image.
    """
    folders = class_folders(root)
    if not folders:
        raise InputError(f"{name}: {root} holds no class folders (expected {root}/<class>/<image>).")
    foreign = [p for p in sorted(root.iterdir()) if not _may_be_class(p)]
    for folder in folders:
        entries = sorted(folder.iterdir())
        files = [p for p in entries if _may_be_image(p)]
        if not files:
            kinds = " ".join(sorted(IMAGE_SUFFIXES))
            raise InputError(f"{name}: class folder {folder} holds no images (looked for {kinds}).")
        if len(files) < len(entries):
            taken = set(files)
            foreign += [p for p in entries if p not in taken]
        yield folder.name, files
    if foreign:
        shown = ", ".join(printable(p.relative_to(root)) for p in foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        warnings.warn(
            f"{name}: passed over {len(foreign)} that are neither class folder nor image in {printable(root)}: "
            f"{shown}.",
            stacklevel=2,
        )


def list_class_folders(root: Path, name: str) -> ImageListing:
    """All class folders below ``root`` with their images; labels will follow the sorted class names."""
    return ImageListing(dict(class_images(root, name)), root)


def require_classes(name: str, where: Path, found: Iterable[str], wanted: Iterable[str], whose: str) -> None:
    """Raise :class:`InputError` unless the classes ``found`` in ``where`` are those ``wanted``, which are ``whose``."""
    there, expected = set(found), set(wanted)
    if there != expected:
        missing, foreign = sorted(expected - there), sorted(there - expected)
        raise InputError(
            f"{name}: {where} does not hold the {len(expected)} classes of {whose}: "
            f"missing {', '.join(missing[:5]) or 'none'}{' ...' if len(missing) > 5 else ''} ({len(missing)}), "
            f"foreign {', '.join(foreign[:5]) or 'none'}{' ...' if len(foreign) > 5 else ''} ({len(foreign)})."
        )


def split_folders(name: str, root: Path, beside: Collection[str] | None = ()) -> dict[str, Path]:
    """The folders of splits directly below ``root``, by split; empty if there is none.

    What else lies there might be a split by another name: passed over, its images would be missing, and others held out
    in their place. So it is an error, but for hidden folders and those ``beside`` (None for any).

    Raises:
        InputError: two folders of one split; folders beside that are neither splits nor in ``beside``.
    """
    found: dict[str, Path] = {}
    others = []
    for folder in class_folders(root):
        split = split_of(folder.name)
        if split is None:
            others.append(folder.name)
        elif split in found:
            raise InputError(
                f"{name}: {root} holds {found[split].name}/ and {folder.name}/, both of {split}; keep one."
            )
        else:
            found[split] = folder
    others = [] if beside is None else [other for other in others if other not in beside]
    if found and others:
        folders = ", ".join(f"{folder.name}/" for folder in found.values())
        known = "; ".join(" or ".join(names) for names in SPLIT_NAMES.values())
        raise InputError(
            f"{name}: {root} holds {folders}, which are names of splits, and beside them {', '.join(others[:5])}, "
            f"which are not. Splits are called {known}. If {folders} is a class, put all class folders into "
            f"{root / 'train'}/, or give it another name. Move what is neither elsewhere."
        )
    return {split: found[split] for split in SPLIT_NAMES if split in found}


def split_of(folder: str) -> str | None:
    """Of which split this is the name of a folder, or of a list without its suffix; None for another name."""
    return next((split for split, names in SPLIT_NAMES.items() if folder.lower() in names), None)


def _may_be_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and path.name != "__MACOSX"


def _may_be_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()
