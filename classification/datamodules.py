"""Data modules of many-shot classification."""

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from swbn_lightning.data import ImageSet
from swbn_lightning.data.augment import CropFlip
from swbn_lightning.data.glyphs import GLYPH_MEAN, GLYPH_STD, glyph_class_names, glyphs
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.training import ImageDataModule, as_is


class LabelledBatch(NamedTuple):
    """Images (uint8 until they reach the device, then float and normalised) with their classes."""

    images: Tensor  # [B, C, H, W]
    labels: Tensor  # [B] int64


class LabelledDataset(Dataset[LabelledBatch]):
    """A split image by image; a whole batch is one gather."""

    def __init__(self, image_set: ImageSet) -> None:
        self.image_set = image_set

    def __len__(self) -> int:
        return len(self.image_set)

    def __getitem__(self, number: int) -> LabelledBatch:
        return self.__getitems__([number])

    def __getitems__(self, numbers: list[int]) -> LabelledBatch:
        return LabelledBatch(self.image_set.images[numbers], self.image_set.labels[numbers])


class ClassificationDataModule(ImageDataModule):
    """Batches of labelled images out of sets that lie in memory. A data set is a subclass with :meth:`load`.

    Args:
        mean: of the training pixels, per channel, in [0, 1].
        std: their deviation.
        num_classes: classes of every split.
        batch_size: images in a batch of training, each process; 128 as in the paper (section 4.1).
        eval_batch_size: images in a batch of evaluation.
    """

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], num_classes: int, batch_size: int, eval_batch_size: int
    ) -> None:
        super().__init__(mean, std, CropFlip())
        require_positive("data", batch_size=batch_size, eval_batch_size=eval_batch_size)
        self.num_classes, self.batch_size, self.eval_batch_size = num_classes, batch_size, eval_batch_size

    def train_dataloader(self) -> DataLoader[LabelledBatch]:
        dataset = LabelledDataset(self.image_set("train"))
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=True, drop_last=True, collate_fn=as_is)

    def val_dataloader(self) -> DataLoader[LabelledBatch]:
        return self._loader("val")

    def test_dataloader(self) -> DataLoader[LabelledBatch]:
        return self._loader("test")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, LabelledBatch):
            return batch._replace(images=self.normalize(batch.images))
        return batch

    def _loader(self, split: str) -> DataLoader[LabelledBatch]:
        return DataLoader(LabelledDataset(self.image_set(split)), batch_size=self.eval_batch_size, collate_fn=as_is)


class GlyphDataModule(ClassificationDataModule):
    """Letters as classes, drawn anew for training, validation and test; nothing to download.

    The classes are those of the few-shot training split, so that a backbone trained here has not seen the few-shot
    test letters.

    Args:
        num_classes: the first so many letters, at most 506.
        image_size: side in pixels, at least 28.
        images_per_class: training drawings a class; validation and test have a quarter as many each.
        batch_size: images in a batch of training, each process.
        eval_batch_size: images in a batch of evaluation.
        seed: of the drawings.
    """

    def __init__(
        self,
        num_classes: int = 100,
        image_size: int = 28,
        images_per_class: int = 96,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        seed: int = 0,
    ) -> None:
        require_positive("glyphs", num_classes=num_classes, images_per_class=images_per_class, image_size=image_size)
        available = len(glyph_class_names("train"))
        if num_classes > available:
            raise InputError(f"glyphs have {available} classes, got num_classes={num_classes}.")
        super().__init__((GLYPH_MEAN,), (GLYPH_STD,), num_classes, batch_size, eval_batch_size)
        self.image_size, self.images_per_class, self.seed = image_size, images_per_class, seed

    def load(self, split: str) -> ImageSet:
        number = ("train", "val", "test").index(split)
        count = self.images_per_class if split == "train" else max(1, self.images_per_class // 4)
        drawn = glyphs("train", self.image_size, count, seed=3 * self.seed + number)
        kept = drawn.labels < self.num_classes
        names = drawn.class_names[: self.num_classes]
        return ImageSet(drawn.images[kept], drawn.labels[kept], names, f"glyphs/{split}")
