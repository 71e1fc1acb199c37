"""Backbones by name."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from swbn_lightning.backbones.base import Backbone
from swbn_lightning.backbones.resnet12 import ResNet12
from swbn_lightning.backbones.resnet_cifar import ResNetCifar
from swbn_lightning.errors import require_positive, unknown_name
from swbn_lightning.norms import NormFactory

_BACKBONES: dict[str, Callable[..., Backbone]] = {
    "resnet12": ResNet12,
    "resnet20": functools.partial(ResNetCifar, depth=20),
}


def available_backbones() -> tuple[str, ...]:
    """All names that :func:`build_backbone` knows, sorted."""
    return tuple(sorted(_BACKBONES))


def build_backbone(name: str, norm: str = "bn", norm_args: Mapping[str, Any] | None = None, **options: Any) -> Backbone:
    """A backbone with the named normalisation layers.

    Args:
        name: one of :func:`available_backbones`.
        norm: a name that :class:`~swbn_lightning.NormFactory` knows.
        norm_args: options of that norm, as ``{"step_size": 1e-4}``.
        options: the backbone's own: ``in_channels`` for all, and what its class documents.

    Returns:
        A module with ``forward(x) -> [N, C]``, ``forward_features(x) -> [N, C, h, w]``, ``num_features`` (C).

    Raises:
        InputError: an unknown backbone, norm or option, with the nearest known one and all of them.
    """
    if name not in _BACKBONES:
        raise unknown_name("backbone", name, _BACKBONES)
    factory = NormFactory(norm, **(norm_args or {}))
    make = _BACKBONES[name]
    fixed = set(make.keywords) if isinstance(make, functools.partial) else set()
    known = set(inspect.signature(make).parameters) - {"norm"} - fixed
    for option in options:
        if option not in known:
            raise unknown_name(f"option of backbone {name!r}:", option, known)
    require_positive(f"backbone {name!r}", in_channels=options.get("in_channels", 3))
    return make(factory, **options)
