"""Few-shot data sets by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fewshot.datasets.cifar_fs import load_cifar_fs
from swbn_lightning.data import ImageSet
from swbn_lightning.data.cifar import CIFAR100_MEAN, CIFAR100_STD
from swbn_lightning.data.glyphs import GLYPH_MEAN, GLYPH_STD, glyphs
from swbn_lightning.errors import InputError, unknown_name


@dataclass(frozen=True)
class FewShotDataset:
    """How one data set is read and normalised.

    ``load(split, root, image_size)`` gives the split; ``mean`` and ``std`` are per channel, of pixels in [0, 1].
    """

    load: Callable[[str, str | None, int], ImageSet]
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        return len(self.mean)


def _load_glyphs(split: str, root: str | None, image_size: int) -> ImageSet:
    if root is not None:
        raise InputError(f"glyphs are drawn, not read: leave out root={root!r}.")
    return glyphs(split, image_size=image_size)


_DATASETS = {
    "glyphs": FewShotDataset(_load_glyphs, 28, (GLYPH_MEAN,), (GLYPH_STD,)),
    "cifar-fs": FewShotDataset(load_cifar_fs, 32, CIFAR100_MEAN, CIFAR100_STD),
}


def available_datasets() -> tuple[str, ...]:
    """All names that :func:`get_dataset` knows, sorted."""
    return tuple(sorted(_DATASETS))


def get_dataset(name: str) -> FewShotDataset:
    """The data set of that name.

    Raises:
        InputError: an unknown name, with the nearest known one and all of them.
    """
    if name not in _DATASETS:
        raise unknown_name("dataset", name, _DATASETS)
    return _DATASETS[name]


def register_dataset(name: str, dataset: Any) -> None:
    """Make a data set of one's own known to :class:`~fewshot.EpisodicDataModule`.

    Raises:
        InputError: the name is taken.
    """
    if name in _DATASETS:
        raise InputError(f"dataset {name!r} is registered already; choose another name.")
    _DATASETS[name] = dataset
