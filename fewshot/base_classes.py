"""Labelled images of the training classes, to train a classifier before any episodes: the first of two stages."""

from dataclasses import replace
from typing import Any

import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from torch.utils.data import DataLoader

from classification.datamodules.base import (
    LabelledDataset,
    TrainingDataset,
    check_batch_size,
    check_share,
    each_once_loader,
    prepared,
    shuffled_loader,
)
from fewshot.datamodule import EpisodicDataModule
from fewshot.episodes import TRAIN
from swbn_lightning.data import ImageSet
from swbn_lightning.data.augment import CropFlip
from swbn_lightning.data.image_data import ImageBatch
from swbn_lightning.data.images import hold_out
from swbn_lightning.data.order import training_seed
from swbn_lightning.errors import InputError, require_not_negative, require_positive

HELD_OUT = "held_out"
"""The split of the training classes' images that do not train."""


class BaseClassesDataModule(EpisodicDataModule):
    """The base (training) classes of a few-shot data set as a classification task, for :class:`fewshot.BaseClassifier`.

    Reads every data set of :class:`~fewshot.EpisodicDataModule`, in all its forms. A training batch is a
    :class:`~classification.datamodules.base.LabelledBatch`. Validation has two parts: episodes of the validation
    classes, and images of the training classes that were held out. A test batch holds images of the test classes, of
    which the module draws episodes.

    Args:
        dataset: as :class:`~fewshot.EpisodicDataModule`, like all that is not named here.
        root: folder of the data set's files.
        batch_size: training images per batch, in each process; 128 as in Meta-Baseline.
        held_out_share: share of the images of each training class that does not train and measures the classifier
            (stratified). With 0 all images train, as in publications, and only episodes validate.
        split_seed: seed of the held-out images. It is separate, so that runs with different training seeds hold out the
            same images.
        crop_padding: training augmentation: random crop of the image padded by this many pixels; 0 for none.
        crop_padding_mode: ``"constant"`` (zeros) or ``"reflect"``, see :class:`~swbn_lightning.data.augment.CropFlip`.
        flip: training augmentation: random horizontal flip; not for letters.
        kwargs: image size, validation and test episodes, erasing, seeds, workers and cache, as in
            :class:`~fewshot.EpisodicDataModule`.

    Raises:
        InputError: as :class:`~fewshot.EpisodicDataModule`; a share outside [0, 1), or one that holds out no image; a
            batch larger than the training images of a process.
    """

    trains_on_images = True

    def __init__(
        self,
        dataset: str = "glyphs",
        root: str | None = None,
        *,
        batch_size: int = 128,
        held_out_share: float = 0.1,
        split_seed: int = 0,
        crop_padding: int = 0,
        crop_padding_mode: str = "constant",
        flip: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, root, train=TRAIN, episodes_per_step=1, crop_padding=0, flip=False, **kwargs)
        del self.settings["train"]
        self.augment = CropFlip(crop_padding, flip, crop_padding_mode)
        require_positive("data", batch_size=batch_size)
        require_not_negative("data", split_seed=split_seed)
        check_share("held_out_share", held_out_share)
        self.batch_size, self.held_out_share, self.split_seed = batch_size, held_out_share, split_seed
        self._parts: dict[str, ImageSet] = {}

    def load(self, split: str) -> ImageSet:
        if split not in ("train", HELD_OUT):
            return super().load(split)
        if split not in self._parts:  # both at once, and none is kept here that was asked for
            self._parts = self._divide(super().load("train"))
        if split not in self._parts:
            raise InputError(f"{self.dataset}: held_out_share is 0, so no image of the training classes is held out.")
        return self._parts.pop(split)

    def train_dataloader(self) -> DataLoader[Any]:
        seed = training_seed(self.seed)
        dataset = TrainingDataset(self.image_set("train"), self.augment, self.erasing, seed)
        return shuffled_loader(self, dataset, self.batch_size, seed)

    def val_dataloader(self) -> DataLoader[ImageBatch] | list[DataLoader[Any]]:  # type: ignore[override]
        episodes = super().val_dataloader()
        if not self.held_out_share:
            return episodes
        return [episodes, each_once_loader(self, LabelledDataset(self.image_set(HELD_OUT)), self.eval_batch_size)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return prepared(self, batch)

    def _check_split(self, split: str) -> None:
        world = self.processes[0]
        if split == "train":
            check_batch_size(self.batch_size, len(self.image_set("train")), world)
            return
        super()._check_split(split)
        if split == "val" and self.held_out_share and (count := len(self.image_set(HELD_OUT))) < world:
            raise InputError(f"{count} images are held out, too few for {world} processes; raise held_out_share.")

    def _divide(self, whole: ImageSet) -> dict[str, ImageSet]:
        # In the layout that networks prefer; batches are gathered in it.
        whole = replace(whole, images=whole.images.contiguous(memory_format=torch.channels_last))
        if not self.held_out_share:
            return {"train": whole}
        kept, held = hold_out(whole.labels, "held_out_share", self.held_out_share, self.split_seed)
        rank_zero_info(f"{whole.name}: {len(kept)} images train, {len(held)} are held out")
        name = whole.name.removesuffix("/train")
        return {"train": whole.subset(kept, whole.name), HELD_OUT: whole.subset(held, f"{name}/{HELD_OUT}")}
