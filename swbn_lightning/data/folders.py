"""Class folders, ``<class>/<image>``: which images there are, and all of them into memory."""

import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from swbn_lightning.data.images import ImageSet
from swbn_lightning.data.listing import ImageListing, load_listing
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
"""Whose formats :data:`~swbn_lightning.data.decode.FORMATS` are."""

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""As torchvision and timm normalise for their networks (torchvision's page "Models and pre-trained weights")."""

_ARCHIVE_LITTER = "__MACOSX"  # what macOS adds to zip files


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
    """All class folders below ``root`` with their images; labels will follow the sorted class names.

    Raises:
        InputError: as :func:`class_images`.
    """
    return ImageListing(dict(class_images(root, name)), root)


def require_classes(name: str, folder: Path, wanted: Iterable[str], whose: str) -> None:
    """Raise :class:`InputError` unless the class folders below ``folder`` are those ``wanted``.

    Args:
        name: of the data set, for the message.
        folder: whose class folders are compared.
        wanted: their names.
        whose: whose classes they are, for the message: "the test split".
    """
    require_names(name, folder, (p.name for p in class_folders(folder)), wanted, whose)


def require_names(name: str, where: Path, found: Iterable[str], wanted: Iterable[str], whose: str) -> None:
    """As :func:`require_classes`, of classes ``found`` in whatever form in ``where``."""
    there, expected = set(found), set(wanted)
    if there != expected:
        missing, foreign = sorted(expected - there), sorted(there - expected)
        raise InputError(
            f"{name}: {where} does not hold the {len(expected)} classes of {whose}: "
            f"missing {', '.join(missing[:5]) or 'none'}{' ...' if len(missing) > 5 else ''} ({len(missing)}), "
            f"foreign {', '.join(foreign[:5]) or 'none'}{' ...' if len(foreign) > 5 else ''} ({len(foreign)})."
        )


def load_class_folders(root: Path, name: str, image_size: int, channels: int = 3) -> ImageSet:
    """Every image of every class folder below ``root``; labels follow the sorted class names.

    Raises:
        InputError: no class folder below ``root``; a class folder without an image; an unreadable image.
    """
    return load_listing(list_class_folders(root, name), name, image_size, channels)


def _may_be_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".") and path.name != _ARCHIVE_LITTER


def _may_be_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()
