"""Letters as classes: a data set that is drawn, not read."""

from dataclasses import replace
from typing import Any

from classification.datamodules.base import ClassificationDataModule
from swbn_lightning.data import ImageSet
from swbn_lightning.data.glyphs import GLYPH_MEAN, GLYPH_STD, glyphs
from swbn_lightning.errors import require_not_negative, require_positive


class GlyphDataModule(ClassificationDataModule):
    """Letters as classes, drawn separately for training, validation and test; nothing to download.

    The classes are those of the few-shot training split. A backbone trained here has therefore not seen the few-shot
    test letters.

    Args:
        num_classes: use the first ``num_classes`` letters, at most 506.
        image_size: side in pixels, at least 28.
        images_per_class: training drawings per class; validation and test have a quarter as many each.
        seed: seed of the drawings. The training order follows Lightning's global seed.
        kwargs: batch sizes, augmentation and workers, as in :class:`ClassificationDataModule`.

    Raises:
        InputError: as :class:`ClassificationDataModule`; a number below 1; a negative seed; in :meth:`setup`, more
            classes than there are letters.
    """

    def __init__(
        self, num_classes: int = 100, image_size: int = 28, images_per_class: int = 96, seed: int = 0, **kwargs: Any
    ) -> None:
        require_positive("glyphs", images_per_class=images_per_class)  # the others where they are drawn
        require_not_negative("glyphs", seed=seed)
        super().__init__(mean=(GLYPH_MEAN,), std=(GLYPH_STD,), seed=None, **kwargs)
        self._num_classes = num_classes
        self.image_size, self.images_per_class, self.seed = image_size, images_per_class, seed

    @property
    def num_classes(self) -> int:
        return self._num_classes

    def chosen_by(self, split: str) -> str:
        return f"seed={self.seed}"

    def load(self, split: str) -> ImageSet:
        number = ("train", "val", "test").index(split)
        count = self.images_per_class if split == "train" else max(1, self.images_per_class // 4)
        drawn = glyphs("train", self.image_size, count, seed=3 * self.seed + number, num_classes=self.num_classes)
        return replace(drawn, name=f"glyphs/{split}")
