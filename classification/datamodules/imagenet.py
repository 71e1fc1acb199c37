"""ImageNet, and other class folders too large for memory: images are read when needed."""

import hashlib
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from classification.datamodules.base import HeldOutDataModule, LabelledBatch, NumberedBatch
from swbn_lightning.data.decode import open_image
from swbn_lightning.data.files import checked_root, shown_content
from swbn_lightning.data.folders import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    class_folders,
    class_images,
    require_classes,
    split_folders,
)
from swbn_lightning.data.listing import require_distinct_files
from swbn_lightning.data.order import EpochDataset, stream_seed
from swbn_lightning.errors import InputError, require_positive

Transform = Callable[[Image.Image], Tensor]


class ImageFiles:
    """Images of class folders, by name.

    Names are kept in arrays, which worker processes share; lists would be copied in each worker.
    """

    def __init__(self, root: Path) -> None:
        names = {folder: [path.name for path in found] for folder, found in class_images(root, "imagenet")}
        self.root, self.class_names = root, tuple(names)
        counts = torch.tensor([len(found) for found in names.values()])
        self.labels = torch.arange(len(names)).repeat_interleave(counts)
        self.names = np.concatenate(list(names.values()))

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[str]:
        for label, name in zip(self.labels.tolist(), self.names, strict=True):
            yield f"{self.root}/{self.class_names[label]}/{name}"

    @cached_property
    def content_id(self) -> str:
        """Equal for the same file names in the same order, wherever they are."""
        return hashlib.sha256(os.fsencode("/".join(self.names))).hexdigest()[:16]

    def open(self, number: int) -> Image.Image:
        """Open image ``number`` as RGB."""
        return open_image(self.root / self.class_names[int(self.labels[number])] / str(self.names[number]), channels=3)


class ImageFileDataset(EpochDataset[Any]):
    """Some of the images, read and transformed one by one.

    With a ``seed``, for training, the random numbers of the transform depend only on (seed, epoch, image), whichever
    worker or process reads the image. Without one, for evaluation, batches have the images' numbers.
    """

    def __init__(self, files: ImageFiles, numbers: Tensor, transform: Transform, seed: int | None = None) -> None:
        super().__init__()
        self.files, self.numbers, self.transform, self.seed = files, numbers, transform, seed

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitems__(self, positions: list[int]) -> LabelledBatch | NumberedBatch:
        numbers = self.numbers[positions]
        images = torch.stack([self._transformed(number) for number in numbers.tolist()])
        labels = self.files.labels[numbers]
        if self.seed is not None:
            return LabelledBatch(images, labels)
        return NumberedBatch(images, labels, torch.tensor(positions))

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

    Transforms are torchvision's, run in worker processes:

    - Training: a random part of 8% to 100% of the image, with an aspect ratio of 3/4 to 4/3, is resized to
      ``image_size`` and randomly flipped.
    - Evaluation: the shorter side is resized to ``eval_resize`` and the centre is cropped. This is the usual recipe,
      and the paper's single crop of 224x224 (section 4.2.2).

    The test uses ``val/``, as usual in publications, because the labels of ImageNet's own test images are not public.
    Validation during training uses images held out of ``train/``, so the test images never select a model.

    Args:
        root: the folder that holds ``train/`` and ``val/``.
        image_size: side in pixels of the network's input.
        eval_resize: length in pixels of the shorter side before the centre crop; at least ``image_size``.
        val_share: as in :class:`~classification.datamodules.base.HeldOutDataModule`; 1% of ImageNet is 13 images per
            class.
        num_workers: processes that read and transform images.
        kwargs: split seed, batch sizes and seed, as in :class:`~classification.datamodules.base.HeldOutDataModule`.

    Raises:
        InputError: as :class:`~classification.datamodules.base.HeldOutDataModule`; an ``eval_resize`` below
            ``image_size``; in :meth:`setup`, an unknown layout, a class without images, or different classes in
            ``val/``; in training, an unreadable image.
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

    def class_names(self, split: str) -> tuple[str, ...]:
        return self._listed("train").class_names

    def chosen_by(self, split: str) -> str:
        return f"{super().chosen_by(split)} {self._listed('val' if split == 'test' else 'train').content_id}"

    def facts(self) -> dict[str, Any]:
        if not self._files:  # predict needs none
            return super().facts()
        files, numbers = self._split("train")
        train = {"name": "imagenet/train", "images": len(numbers), "classes": list(files.class_names)}
        return {**super().facts(), "splits": {"train": train}}

    def training_dataset(self) -> ImageFileDataset:
        return ImageFileDataset(*self._split("train"), self._training, self.training_seed)

    def evaluation_dataset(self, split: str) -> ImageFileDataset:
        return ImageFileDataset(*self._split(split), self._evaluation)

    def read_file(self, path: Path) -> Tensor:
        return self._evaluation(open_image(path, channels=3))

    def _split(self, split: str) -> tuple[ImageFiles, Tensor]:
        files = self._listed("val" if split == "test" else "train")
        if split == "test":
            return files, torch.arange(len(files))
        numbers = self.divide(files.labels)
        if split not in numbers:
            raise InputError(f"imagenet: val_share is 0, so no image is held out for {split}.")
        return files, numbers[split]

    def _listed(self, name: str) -> ImageFiles:
        self._folder(name)  # is there
        if not self._files:  # both, so that training tells of images that are the test's, too
            self._files = {own: ImageFiles(found) for own, found in self._folders().items() if own in ("train", "val")}
            train = self._files.get("train")
            if train is not None and "val" in self._files:
                val = self._files["val"]
                require_classes("imagenet", val.root, val.class_names, train.class_names, str(train.root))
            require_distinct_files("imagenet", self._files)
        return self._files[name]

    def _folder(self, name: str) -> Path:
        found = self._folders()
        if name not in found:
            root = checked_root("imagenet", self.root, _expected)
            raise InputError(f"imagenet: {root} has no {name}/ (it holds {shown_content(root)}). {_expected(root)}")
        return found[name]

    def _folders(self) -> dict[str, Path]:
        # ILSVRC's archives leave other folders beside; both splits are required, so none can stand in for them.
        return split_folders("imagenet", checked_root("imagenet", self.root, _expected), beside=None)


def _expected(root: Path) -> str:
    return (
        f"Expected {root}/train/<class>/<image> and {root}/val/<class>/<image>; ImageNet's archives come from "
        "image-net.org, and its validation images must be sorted into class folders."
    )
