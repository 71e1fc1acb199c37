"""Few-shot data sets by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fewshot.datasets.cifar_fs import load_cifar_fs, load_fc100
from fewshot.datasets.folders import load_cub, load_folders, load_mini_imagenet, load_tiered_imagenet
from fewshot.datasets.omniglot import OMNIGLOT_MEAN, OMNIGLOT_STD, inverted, load_omniglot, load_rotated_omniglot
from swbn_lightning.data import ImageSet
from swbn_lightning.data.cifar import CIFAR100_MEAN, CIFAR100_STD
from swbn_lightning.data.folders import IMAGENET_MEAN, IMAGENET_STD
from swbn_lightning.data.glyphs import GLYPH_MEAN, GLYPH_STD, glyphs
from swbn_lightning.errors import InputError, unknown_name


def _as_it_is(images: Tensor) -> Tensor:
    return images


@dataclass(frozen=True)
class FewShotDataset:
    """How to read and normalise a data set.

    Args:
        load: ``load(split, root, image_size)`` returns one split as an :class:`ImageSet`.
        image_size: default side of the images in pixels.
        mean: per-channel mean of pixels in [0, 1].
        std: per-channel deviation of pixels in [0, 1].
        cacheable: whether ``load`` also takes ``cache``, an :class:`~swbn_lightning.data.cache.ImageCache`.
        from_file: what ``load`` does to the pixels of its files, and ``predict`` to those of the user's images; uint8
            ``[N, C, H, W]`` in and out. By default nothing.
    """

    load: Callable[..., ImageSet]
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    cacheable: bool = False
    from_file: Callable[[Tensor], Tensor] = _as_it_is


def _load_glyphs(split: str, root: str | None, image_size: int) -> ImageSet:
    if root is not None:
        raise InputError(f"glyphs are drawn, not read: leave out root={root!r}, or give --data.root null.")
    return glyphs(split, image_size=image_size)


_CIFAR = (32, CIFAR100_MEAN, CIFAR100_STD)
# 84 pixels since Vinyals et al. (NeurIPS 2016) and Ravi and Larochelle (ICLR 2017).
_PHOTOGRAPHS = (84, IMAGENET_MEAN, IMAGENET_STD)
_CHARACTERS = (28, (OMNIGLOT_MEAN,), (OMNIGLOT_STD,))

_DATASETS = {
    "glyphs": FewShotDataset(_load_glyphs, 28, (GLYPH_MEAN,), (GLYPH_STD,)),
    "cifar-fs": FewShotDataset(load_cifar_fs, *_CIFAR, cacheable=True),
    "fc100": FewShotDataset(load_fc100, *_CIFAR, cacheable=True),
    "mini-imagenet": FewShotDataset(load_mini_imagenet, *_PHOTOGRAPHS, cacheable=True),
    "tiered-imagenet": FewShotDataset(load_tiered_imagenet, *_PHOTOGRAPHS, cacheable=True),
    "cub": FewShotDataset(load_cub, *_PHOTOGRAPHS, cacheable=True),
    "folders": FewShotDataset(load_folders, *_PHOTOGRAPHS, cacheable=True),
    "omniglot": FewShotDataset(load_omniglot, *_CHARACTERS, cacheable=True, from_file=inverted),
    "omniglot-rotations": FewShotDataset(load_rotated_omniglot, *_CHARACTERS, cacheable=True, from_file=inverted),
}


def get_dataset(name: str) -> FewShotDataset:
    """Look up a data set by name; an unknown name raises :class:`InputError` with the nearest known one."""
    if name not in _DATASETS:
        raise unknown_name("dataset", name, _DATASETS)
    return _DATASETS[name]


def register_dataset(name: str, dataset: Any) -> None:
    """Make your own data set available to :class:`~fewshot.EpisodicDataModule` by name.

    Args:
        name: a name that is not taken.
        dataset: a :class:`FewShotDataset`.

    Raises:
        InputError: a name that is already registered.
    """
    if name in _DATASETS:
        raise InputError(f"dataset {name!r} is registered already; choose another name.")
    _DATASETS[name] = dataset
