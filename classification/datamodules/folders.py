"""Use any class folders as a data set."""

from pathlib import Path
from typing import Any

from classification.datamodules.base import ClassificationDataModule, check_share
from swbn_lightning.data import ImageSet
from swbn_lightning.data.files import checked_root
from swbn_lightning.data.folders import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    class_folders,
    list_class_folders,
    require_classes,
    split_folders,
)
from swbn_lightning.data.images import hold_out
from swbn_lightning.data.listing import ImageListing, load_listing, require_distinct_files
from swbn_lightning.errors import InputError, require_not_negative, require_positive

VAL_SHARE, TEST_SHARE = 0.1, 0.2
"""What is held out where neither a folder nor the user says."""


class ImageFolderDataModule(ClassificationDataModule):
    """Images in class folders, ``<class>/<image>``, read into memory.

    There are two layouts: ``ROOT/train/<class>/``, optionally with ``ROOT/val/<class>/`` and ``ROOT/test/<class>/``, or
    class folders directly below the root. Other usual names work too: ``valid/``, ``validation/``, ``dev/``,
    ``training/``, ``testing/``. Any other folder beside them is an error.

    A split without a folder is held out of the training images, with the same share of every class (stratified). There
    is one exception: no test set is held out of ``train/``, because all of it is expected to train.

    Memory: ``channels * image_size**2`` bytes per image. For sets too large for memory use
    :class:`~classification.datamodules.imagenet.ImageNetDataModule`, which reads any ``train/`` and ``val/``.

    Args:
        root: the folder.
        image_size: side in pixels to which images are resized (bilinear; the aspect ratio is not kept).
        mean: per-channel mean for normalisation, of pixels in [0, 1]; ImageNet's by default. Three values read the
            images as RGB, one value as grey.
        std: per-channel deviation, likewise.
        val_share: without ``val/``, the share of the training images held out for validation. None for 0.1; 0 for no
            validation, see :class:`~classification.datamodules.base.HeldOutDataModule`.
        test_share: with class folders directly below the root, the share held out for the test, before validation. None
            for 0.2.
        split_seed: seed of the held-out images.
        kwargs: batch sizes, augmentation, seed and workers, as in
            :class:`~classification.datamodules.base.ClassificationDataModule`.

    Raises:
        InputError: as :class:`~classification.datamodules.base.ClassificationDataModule`; a share outside [0, 1); not
            one or three channels; in :meth:`setup`, an unknown layout, folders beside those of the splits, a share that
            does not apply, splits with different classes, a file that occurs twice, a class without images, or an
            unreadable image.
    """

    def __init__(
        self,
        root: str | None = None,
        image_size: int = 32,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
        val_share: float | None = None,
        test_share: float | None = None,
        split_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(mean=tuple(mean), std=tuple(std), **kwargs)
        require_positive("images", image_size=image_size)
        if len(mean) not in (1, 3) or len(std) != len(mean) or min(std) <= 0:
            raise InputError(f"mean and std must hold one value or three, std above 0, got {mean=}, {std=}.")
        for name, share in (("val_share", val_share), ("test_share", test_share)):
            check_share(name, share or 0)
        require_not_negative("data", split_seed=split_seed)
        self.root, self.image_size, self.split_seed = root, image_size, split_seed
        self.val_share, self.test_share = val_share, test_share
        self._parts: dict[str, ImageSet] = {}
        self._listings: dict[str, ImageListing] = {}

    @property
    def num_classes(self) -> int:
        return len(class_folders(_training_folder(self._folders())))

    @property
    def has_validation(self) -> bool:
        folders = self._folders()
        return "val" in folders or self._shares(folders)["val"] > 0

    def chosen_by(self, split: str) -> str:
        folders = self._folders()
        if split in folders:
            return self._listed(folders)[split].content_id
        content = self._listed(folders)["train"].content_id
        return f"{self._shares(folders)} split_seed={self.split_seed} {content}"

    def load(self, split: str) -> ImageSet:
        folders = self._folders()
        training = _training_folder(folders)
        if split != "train" and split in folders:
            found, wanted = ([own.name for own in class_folders(place)] for place in (folders[split], training))
            require_classes("images", folders[split], found, wanted, str(training))
            return self._read(folders, split)
        if split not in self._parts:
            self._parts = self._divide(self._read(folders, "train"), self._shares(folders))
        if split not in self._parts:
            raise InputError(f"images: {self.root} has no {split}/ folder, and no image is held out for {split}.")
        return self._parts.pop(split)

    def _read(self, folders: dict[str, Path], split: str) -> ImageSet:
        return load_listing(self._listed(folders)[split], f"images/{split}", self.image_size, self.channels)

    def _listed(self, folders: dict[str, Path]) -> dict[str, ImageListing]:
        if not self._listings:  # all, so that training tells of images that are the test's, too
            places = folders if "train" in folders else {"train": folders["all"]}
            listings = {own: list_class_folders(folder, f"images/{own}") for own, folder in places.items()}
            require_distinct_files("images", {own: listing.files for own, listing in listings.items()})
            self._listings = listings
        return self._listings

    def _divide(self, whole: ImageSet, shares: dict[str, float]) -> dict[str, ImageSet]:
        parts = {}
        for split, share in shares.items():
            if share:
                kept, held = hold_out(whole.labels, f"{split}_share", share, self.split_seed)
                parts[split] = whole.subset(held, f"images/{split}")
                whole = whole.subset(kept, whole.name)
        return {**parts, "train": whole}

    def _folders(self) -> dict[str, Path]:
        """Folders of the splits, or ``{"all": root}`` if the root holds the classes."""
        root = checked_root("images", self.root, _expected)
        found = split_folders("images", root)
        if found and "train" not in found:
            shown = ", ".join(folder.name for folder in found.values())
            raise InputError(f"images: {root} holds {shown}, but no train. {_expected(root)}")
        if not found and not class_folders(root):
            raise InputError(f"images: {root} holds no folders. {_expected(root)}")
        return found or {"all": root}

    def _shares(self, folders: dict[str, Path]) -> dict[str, float]:
        """Shares to hold out of the training images, in this order."""
        usual = {"test": TEST_SHARE if "all" in folders else 0.0, "val": 0.0 if "val" in folders else VAL_SHARE}
        shares = {}
        for split, given in (("test", self.test_share), ("val", self.val_share)):
            if given and not usual[split]:
                held = f"{self.root} has folders of its own for train and {split}"
                if split not in folders:
                    held = f"{self.root} has a train/ folder, of which no test images are taken"
                raise InputError(f"images: {split}_share={given} does not apply: {held}. Leave it out.")
            shares[split] = usual[split] if given is None else given
        return shares


def _training_folder(folders: dict[str, Path]) -> Path:
    return folders["train"] if "train" in folders else folders["all"]


def _expected(root: Path) -> str:
    return (
        f"Expected {root}/<class>/<image>, or {root}/train/<class>/<image> and, if you like, val/ and test/ beside it."
    )
