"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100, from the files that torchvision unpacks."""

from abc import abstractmethod
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from torchvision import datasets

from classification.datamodules.base import HeldOutDataModule
from swbn_lightning.data import ImageSet
from swbn_lightning.data.cifar import (
    CIFAR10_FILES,
    CIFAR10_MEAN,
    CIFAR10_STD,
    CIFAR100_FILES,
    CIFAR100_MEAN,
    CIFAR100_STD,
    cifar10_class_names,
    cifar100_class_names,
    read_cifar10,
    read_cifar100,
)
from swbn_lightning.data.files import checked_root, shown_content
from swbn_lightning.data.idx import (
    FASHION_MNIST_MEAN,
    FASHION_MNIST_STD,
    IDX_FILES,
    MNIST_MEAN,
    MNIST_STD,
    read_idx_images,
)
from swbn_lightning.errors import InputError


class FileDataModule(HeldOutDataModule):
    """Base of data sets in torchvision's files. A subclass says which files, and reads them.

    The structure of the files is checked, but not their MD5 sums: re-encoded or shortened copies load too.

    Args:
        root: folder that holds torchvision's folder with the files, or that folder itself.
        download: download the files through torchvision if they are missing.
        kwargs: validation share, batch sizes, augmentation, seeds and workers, as in
            :class:`~classification.datamodules.base.HeldOutDataModule`.

    Raises:
        InputError: as :class:`~classification.datamodules.base.HeldOutDataModule`; in :meth:`prepare_data`, a failed
            download; in :meth:`setup`, missing or broken files (named in the message).
    """

    dataset_name: ClassVar[str]
    folder: ClassVar[str]  # below the root
    files: ClassVar[tuple[str, ...]]
    packed: ClassVar[str] = ""  # a suffix that a file may have
    torchvision_class: ClassVar[Callable[..., Any]]
    mean: ClassVar[tuple[float, ...]]  # of the training pixels, per channel, in [0, 1]
    std: ClassVar[tuple[float, ...]]

    def __init__(self, root: str | None = None, download: bool = False, **kwargs: Any) -> None:
        super().__init__(mean=self.mean, std=self.std, **kwargs)
        self.root, self.download = root, download
        self._parts: dict[str, ImageSet] = {}

    @abstractmethod
    def read(self, paths: dict[str, Path], part: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """Read images uint8 ``[N, C, H, W]``, labels int64 ``[N]`` and class names.

        Args:
            paths: paths of all :attr:`files`, by name.
            part: ``"train"`` or ``"test"``, as the data set itself is divided.
        """

    def prepare_data(self) -> None:
        """Download the files if requested; Lightning calls this in one process per machine."""
        if not self.download or (self.trainer is not None and self.trainer.predicting):
            return
        try:
            self._find()
        except InputError as missing:
            if self.root is None:
                raise
            try:
                # Fetches, compares MD5 sums, unpacks; only then are files with the right sums read.
                type(self).torchvision_class(str(Path(self.root).expanduser()), download=True)
            except (OSError, RuntimeError, EOFError, HTTPException) as error:
                raise InputError(f"{missing} The download failed: {error}") from error

    def load(self, split: str) -> ImageSet:
        if split == "test":
            return self._read("test")
        if split not in self._parts:  # both at once, and none is kept here that was asked for
            whole = self._read("train")
            numbers = self.divide(whole.labels)
            if split not in numbers:
                raise InputError(f"{self.dataset_name}: val_share is 0, so no image is held out for {split}.")
            name = self.dataset_name
            self._parts = {part: whole.subset(chosen, f"{name}/{part}") for part, chosen in numbers.items()}
        return self._parts.pop(split)

    def _read(self, part: str) -> ImageSet:
        images, labels, names = self.read(self._find(), part)
        return ImageSet(images, labels, names, f"{self.dataset_name}/{part}")

    def _find(self) -> dict[str, Path]:
        """Find the paths of all files, in ``root/folder`` or in ``root`` itself."""
        base = checked_root(self.dataset_name, self.root, self._expected)
        for place in (base / self.folder, base):
            here = {}
            for file in self.files:
                paths = (place / file, place / f"{file}{self.packed}")
                if found := [path for path in paths if path.is_file()]:
                    here[file] = found[0]
            if len(here) == len(self.files):
                return here
            if here:
                missing = ", ".join(file for file in self.files if file not in here)
                raise InputError(f"{self.dataset_name}: {place} lacks {missing}. {self._expected(base)}")
        content = f"nothing usable in {base} (it holds {shown_content(base)})"
        raise InputError(f"{self.dataset_name}: {content}. {self._expected(base)}")

    def _expected(self, base: Path) -> str:
        either = f" (each plain or {self.packed})" if self.packed else ""
        hint = "" if self.download else " Where there is a network, `--data.download true` fetches them."
        return f"Expected {base / self.folder}/ with {', '.join(self.files)}{either}.{hint}"


class MNISTDataModule(FileDataModule):
    """MNIST: 60,000 + 10,000 grey images of digits, 28x28 pixels.

    Reads four IDX files in ``ROOT/MNIST/raw/``, plain or with the suffix ``.gz``.

    Arguments and errors are those of :class:`FileDataModule`.
    """

    dataset_name, folder, files, packed = "mnist", "MNIST/raw", IDX_FILES, ".gz"
    torchvision_class = datasets.MNIST
    mean, std = (MNIST_MEAN,), (MNIST_STD,)
    num_classes = 10
    image_size = 28
    names: ClassVar[tuple[str, ...]] = tuple("0123456789")

    def read(self, paths: dict[str, Path], part: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        prefix = {"train": "train", "test": "t10k"}[part]
        images, labels = (paths[f"{prefix}-{kind}-ubyte"] for kind in ("images-idx3", "labels-idx1"))
        return *read_idx_images(images, labels), self.names


class FashionMNISTDataModule(MNISTDataModule):
    """Fashion-MNIST: 60,000 + 10,000 grey images of clothing, 28x28 pixels.

    Reads four IDX files in ``ROOT/FashionMNIST/raw/``, plain or with the suffix ``.gz``. They have the same names as
    those of MNIST.

    Arguments and errors are those of :class:`FileDataModule`.
    """

    dataset_name, folder = "fashion-mnist", "FashionMNIST/raw"
    torchvision_class = datasets.FashionMNIST
    mean, std = (FASHION_MNIST_MEAN,), (FASHION_MNIST_STD,)
    names: ClassVar[tuple[str, ...]] = tuple(datasets.FashionMNIST.classes)


class CIFAR10DataModule(FileDataModule):
    """CIFAR-10: 50,000 + 10,000 photographs of 32x32 pixels in 10 classes.

    Reads five training batches, a test batch and the class names in ``ROOT/cifar-10-batches-py/``. These are pickles;
    the unpickler admits only arrays, lists and strings.

    Arguments and errors are those of :class:`FileDataModule`.
    """

    dataset_name, folder, files = "cifar10", "cifar-10-batches-py", CIFAR10_FILES
    torchvision_class = datasets.CIFAR10
    mean, std = CIFAR10_MEAN, CIFAR10_STD
    image_size = 32
    num_classes = 10

    def read(self, paths: dict[str, Path], part: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        folder = paths["batches.meta"].parent
        return *read_cifar10(folder, part), cifar10_class_names(folder)


class CIFAR100DataModule(FileDataModule):
    """CIFAR-100: 50,000 + 10,000 photographs of 32x32 pixels in 100 (fine) classes.

    Reads ``train``, ``test`` and ``meta`` in ``ROOT/cifar-100-python/``. These are pickles; the unpickler admits only
    arrays, lists and strings.

    Arguments and errors are those of :class:`FileDataModule`.
    """

    dataset_name, folder, files = "cifar100", "cifar-100-python", CIFAR100_FILES
    torchvision_class = datasets.CIFAR100
    mean, std = CIFAR100_MEAN, CIFAR100_STD
    image_size = 32
    num_classes = 100

    def read(self, paths: dict[str, Path], part: str) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        folder = paths["meta"].parent
        return *read_cifar100(folder, part), cifar100_class_names(folder)
