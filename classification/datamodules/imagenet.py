"""ImageNet, and other class folders too large for memory: images are read when they are needed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from classification.datamodules.base import HeldOutDataModule, LabelledBatch
from swbn_lightning.data import ImageSet
from swbn_lightning.data.decode import open_image
from swbn_lightning.data.files import checked_root, shown_content
from swbn_lightning.data.folders import IMAGENET_MEAN, IMAGENET_STD, class_folders, class_images, require_classes
from swbn_lightning.data.order import EpochDataset, stream_seed
from swbn_lightning.data.split_folders import split_folders
from swbn_lightning.errors import InputError, require_positive

Transform = Callable[[Image.Image], Tensor]


class ImageFiles:
    """The images of class folders by name. (Arrays, which workers share; lists they would copy, one after another.)"""

    def __init__(self, root: Path) -> None:
        names = {folder: [path.name for path in found] for folder, found in class_images(root, "imagenet")}
        self.root, self.class_names = root, tuple(names)
        counts = torch.tensor([len(found) for found in names.values()])
        self.labels = torch.arange(len(names)).repeat_interleave(counts)
        self.names = np.concatenate(list(names.values()))

    def __len__(self) -> int:
        return len(self.labels)

    def open(self, number: int) -> Image.Image:
        """Image ``number``, RGB."""
        return open_image(self.path(number), channels=3)

    def path(self, number: int) -> Path:
        """Of image ``number``."""
        return self.root / self.class_names[int(self.labels[number])] / str(self.names[number])

    def identities(self) -> np.ndarray:
        """uint64 ``[N, 2]``, the same for the same file, by whatever link: its number and its device."""
        classes = [self.class_names[label] for label in self.labels.tolist()]
        found = (os.stat(f"{self.root}/{own}/{name}") for own, name in zip(classes, self.names, strict=True))  # noqa: PTH116 - a million
        return np.array([(file.st_ino, file.st_dev) for file in found], np.uint64).reshape(-1, 2)


class ImageFileDataset(EpochDataset[LabelledBatch]):
    """Some of the images, read and transformed one by one.

    With a ``seed`` the transform's random numbers are a function of (seed, epoch, image) alone, whatever worker or
    process reads the image.
    """

    def __init__(self, files: ImageFiles, numbers: Tensor, transform: Transform, seed: int | None = None) -> None:
        super().__init__()
        self.files, self.numbers, self.transform, self.seed = files, numbers, transform, seed

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, position: int) -> LabelledBatch:
        return self.__getitems__([position])

    def __getitems__(self, positions: list[int]) -> LabelledBatch:
        numbers = self.numbers[positions]
        images = torch.stack([self._transformed(number) for number in numbers.tolist()])
        return LabelledBatch(images, self.files.labels[numbers])

    def _transformed(self, number: int) -> Tensor:
        image = self.files.open(number)
        if self.seed is None:
            return self.transform(image)
        # The transforms draw from the process's own stream: lend them another. (torch.manual_seed would seed GPUs too.)
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(stream_seed(self.seed, self.epoch, number))
        try:
            return self.transform(image)
        finally:
            torch.set_rng_state(state)


class ImageNetDataModule(HeldOutDataModule):
    """ImageNet (ILSVRC-2012), or any class folders ``ROOT/train/<class>/`` and ``ROOT/val/<class>/``.

    In training a random part of 8% to 100% of the image with a ratio of 3/4 to 4/3, resized to ``image_size``, and a
    random flip; in evaluation the shorter side resized to ``eval_resize`` and the centre: the usual recipe, and the
    paper's single crop of 224x224 (section 4.2.2), by torchvision's transforms in worker processes.

    The test is on ``val/``, whose figures are what everyone reports, since the labels of ImageNet's own test images are
    not public. Validation during training is on images held out of ``train/``, so that what is reported has chosen
    nothing.

    Args:
        root: the folder that holds ``train/`` and ``val/``.
        image_size: side in pixels of what the network sees.
        eval_resize: of the shorter side, before the centre is cut out; at least ``image_size``.
        val_share: as :class:`~classification.datamodules.base.HeldOutDataModule`; 1% of ImageNet are 13 images
            a class.
        num_workers: processes that read and transform images.
        kwargs: split seed, batch sizes and seed, as :class:`~classification.datamodules.base.HeldOutDataModule`.

    Raises:
        InputError: as :class:`~classification.datamodules.base.HeldOutDataModule`; an ``eval_resize`` below
            ``image_size``; in :meth:`setup`, a root of another kind, a class without images, other classes in ``val/``;
            in training, an unreadable image.
    """

    def __init__(
        self,
        root: str | None = None,
        image_size: int = 224,
        eval_resize: int = 256,
        val_share: float = 0.01,
        num_workers: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            val_share=val_share,
            num_workers=num_workers,
            # Those are for images of one size in memory.
            crop_padding=0,
            crop_padding_mode="constant",
            flip=False,
            erasing=0.0,
            **kwargs,
        )
        require_positive("imagenet", image_size=image_size, eval_resize=eval_resize)
        if eval_resize < image_size:
            raise InputError(f"eval_resize={eval_resize} is less than image_size={image_size}.")
        self.root, self.image_size = root, image_size
        self._training: Transform = v2.Compose(
            [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
        )
        self._evaluation: Transform = v2.Compose([v2.Resize(eval_resize), v2.CenterCrop(image_size), v2.PILToTensor()])
        self._files: dict[str, ImageFiles] = {}

    @property
    def num_classes(self) -> int:
        return len(class_folders(self._folder("train")))

    def load(self, split: str) -> ImageSet:
        """A whole split in memory, as it is evaluated: 150 kB an image. Training and evaluation do not need it."""
        dataset = self.evaluation_dataset(split)
        batch = dataset.__getitems__(list(range(len(dataset))))
        return ImageSet(batch.images, batch.labels, dataset.files.class_names, f"imagenet/{split}")

    def training_dataset(self) -> ImageFileDataset:
        return ImageFileDataset(*self._split("train"), self._training, self.training_seed)

    def evaluation_dataset(self, split: str) -> ImageFileDataset:
        return ImageFileDataset(*self._split(split), self._evaluation)

    def _split(self, split: str) -> tuple[ImageFiles, Tensor]:
        files = self._listed("val" if split == "test" else "train")
        if split == "test":
            return files, torch.arange(len(files))
        numbers = self.divide(files.labels)
        if split not in numbers:
            raise InputError(f"imagenet: val_share is 0, so no image is held out for {split}.")
        return files, numbers[split]

    def _listed(self, name: str) -> ImageFiles:
        if name not in self._files:
            folder = self._folder(name)
            if name != "train":
                train = self._folder("train")
                require_classes("imagenet", folder, (p.name for p in class_folders(train)), str(train))
            found = ImageFiles(folder)
            others = [self._files["train"]] if name != "train" and "train" in self._files else []
            if name == "train" and self._has_val():  # so that training tells of images that are the test's, too
                others = [ImageFiles(self._folder("val"))]
            _require_apart([found, *others])
            self._files[name] = found
        return self._files[name]

    def _has_val(self) -> bool:
        return "val" not in self._files and (checked_root("imagenet", self.root, _expected) / "val").is_dir()

    def _folder(self, name: str) -> Path:
        root = checked_root("imagenet", self.root, _expected)
        # ILSVRC's archives leave other folders beside; both splits are required, so none can stand in for them.
        found = split_folders("imagenet", root, beside=None)
        if name not in found:
            raise InputError(f"imagenet: {root} has no {name}/ (it holds {shown_content(root)}). {_expected(root)}")
        return found[name]


def _require_apart(parts: list[ImageFiles]) -> None:
    """As :func:`~swbn_lightning.data.listing.check_apart`, in arrays: a million files are usual here."""
    keys = np.concatenate([part.identities() for part in parts])
    order = np.lexsort(keys.T)
    same = (keys[order[1:]] == keys[order[:-1]]).all(axis=1) & (keys[order[1:], 0] > 0)
    if same.any():
        place = int(same.argmax())
        both = sorted((int(order[place]), int(order[place + 1])))
        first, second = (_path_of(parts, number) for number in both)
        raise InputError(f"imagenet: {first} and {second} are one and the same file.")


def _path_of(parts: list[ImageFiles], number: int) -> Path:
    for part in parts:
        if number < len(part):
            return part.path(number)
        number -= len(part)
    raise IndexError(number)


def _expected(root: Path) -> str:
    return (
        f"Expected {root}/train/<class>/<image> and {root}/val/<class>/<image>; ImageNet's archives come from "
        "image-net.org, and its validation images must be sorted into class folders."
    )
