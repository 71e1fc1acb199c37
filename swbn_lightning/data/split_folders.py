"""The folders of splits, ``train/``, ``val/``, ``test/`` and their other names: none is passed over in silence."""

from collections.abc import Collection
from pathlib import Path

from swbn_lightning.data.folders import class_folders, image_files
from swbn_lightning.errors import InputError

SPLIT_NAMES = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""What the folder, or the list, of a split may be called; upper and lower case count alike."""


def split_folders(name: str, root: Path, beside: Collection[str] | None = ()) -> dict[str, Path]:
    """The folders of splits directly below ``root``, by split; empty if there is none.

    What else lies there might be a split by another name: passed over, its images would be missing, and others held out
    in their place.

    Args:
        name: of the data set, for messages.
        root: where to look.
        beside: names of other folders that may lie there; None for any. Hidden ones always may.

    Raises:
        InputError: two folders of one split; folders beside that are neither splits nor in ``beside``; a folder of the
            training split that holds images where it should hold classes, as a class that is called so does.
    """
    folders = class_folders(root)
    found: dict[str, Path] = {}
    for folder in folders:
        split = split_of(folder.name)
        if split is None:
            continue
        if split in found:
            raise InputError(
                f"{name}: {root} holds {found[split].name}/ and {folder.name}/, both of {split}; keep one."
            )
        found[split] = folder
    found = {split: found[split] for split in SPLIT_NAMES if split in found}
    others = [folder.name for folder in folders if split_of(folder.name) is None and folder.name not in (beside or ())]
    if found and others and beside is not None:
        shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        raise InputError(
            f"{name}: {root} holds {_shown(found)}, which are names of splits, and beside them {shown}, which are not. "
            f"Splits are called {known_names()}. {_if_classes(root, found)} Move what is neither elsewhere."
        )
    training = found.get("train")
    if training is not None and not class_folders(training) and image_files(training):
        raise InputError(
            f"{name}: {training} holds images, not class folders, though {training.name}/ is the name of a split. "
            f"{_if_classes(root, found)}"
        )
    return found


def split_of(folder: str) -> str | None:
    """Of which split this is the name of a folder, or of a list without its suffix; None for another name."""
    return next((split for split, names in SPLIT_NAMES.items() if folder.lower() in names), None)


def known_names() -> str:
    """All names, for messages."""
    return "; ".join(" or ".join(names) for names in SPLIT_NAMES.values())


def _if_classes(root: Path, found: dict[str, Path]) -> str:
    # Below a folder of its own a class may have any name: it is looked for one level deeper.
    return f"If {_shown(found)} is a class, put all class folders into {root / 'train'}/, or give it another name."


def _shown(found: dict[str, Path]) -> str:
    return ", ".join(f"{folder.name}/" for folder in found.values())
