"""Backbones by name."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from swbn_lightning.backbones.base import Backbone
from swbn_lightning.backbones.conv4 import Conv4
from swbn_lightning.backbones.library import LibraryBackbone, TimmBackbone, TorchvisionBackbone
from swbn_lightning.backbones.mlp import MLP
from swbn_lightning.backbones.resnet import ResNet
from swbn_lightning.backbones.resnet12 import ResNet12
from swbn_lightning.backbones.resnet_cifar import ResNetCifar, resnet32
from swbn_lightning.backbones.resnetv2 import ResNetV2, ResNetV2Cifar
from swbn_lightning.backbones.vgg import VGG
from swbn_lightning.backbones.wide_resnet import WideResNet
from swbn_lightning.errors import require_positive, unknown_name
from swbn_lightning.norms import NormFactory

_50, _101 = (3, 4, 6, 3), (3, 4, 23, 3)  # units of the four stages

# What a name fixes is no option of it; everything else that its class takes is.
_BACKBONES: dict[str, Callable[..., Backbone]] = {
    # for 28x28 and 32x32 images
    "mlp": MLP,
    "vgg": VGG,
    "resnet20": functools.partial(ResNetCifar, depth=20),
    "resnet32": resnet32,
    "resnetv2_56": functools.partial(ResNetV2Cifar, depth=56),
    "resnetv2_164": functools.partial(ResNetV2Cifar, depth=164, block="bottleneck"),
    "wrn": WideResNet,
    "wrn_28_10": functools.partial(WideResNet, depth=28, width=10),
    "wrn_40_10": functools.partial(WideResNet, depth=40, width=10),
    # for 84x84 images
    "conv4": Conv4,
    "resnet12": ResNet12,
    # for 224x224 images
    "resnet50": functools.partial(ResNet, layers=_50, groups=1, group_width=64),
    "resnext50_32x4d": functools.partial(ResNet, layers=_50, groups=32, group_width=4),
    "resnext101_32x4d": functools.partial(ResNet, layers=_101, groups=32, group_width=4),
    "resnetv2_50": functools.partial(ResNetV2, layers=_50),
    "resnetv2_101": functools.partial(ResNetV2, layers=_101),
}
_LIBRARIES: dict[str, type[LibraryBackbone]] = {cls.package: cls for cls in (TorchvisionBackbone, TimmBackbone)}


def available_backbones() -> tuple[str, ...]:
    """Return the names of this package's own backbones, sorted.

    :func:`build_backbone` also takes the names of torchvision and timm.
    """
    return tuple(sorted(_BACKBONES))


def build_backbone(name: str, norm: str = "bn", norm_args: Mapping[str, Any] | None = None, **options: Any) -> Backbone:
    """Build a backbone with the named normalisation layers.

    Args:
        name: one of :func:`available_backbones`, or ``"torchvision/<model>"`` or ``"timm/<model>"`` for any of their
            classification networks, whose norms are converted
            (:class:`~swbn_lightning.backbones.library.LibraryBackbone`).
        norm: a name that :class:`~swbn_lightning.NormFactory` knows.
        norm_args: options of the norm, such as ``{"step_size": 1e-4}``.
        options: options of the backbone: ``in_channels`` for all, and those that its class documents.

    Returns:
        A module with ``forward(x) -> [N, C]``, ``forward_features(x) -> [N, C, h, w]``, ``num_features`` (C) and
        ``in_channels``. ``forward_features`` raises an error if the network has no feature map.

    Raises:
        InputError: an unknown backbone, norm or option; the message has the nearest known name and all of them.
    """
    make = _maker(name)
    factory = NormFactory(norm, **(norm_args or {}))
    fixed = set(make.keywords) if isinstance(make, functools.partial) else set()
    known = set(inspect.signature(make).parameters) - {"norm"} - fixed
    for option in options:
        if option not in known:
            raise unknown_name(f"option of backbone {name!r}:", option, known)
    require_positive(f"backbone {name!r}", in_channels=options.get("in_channels", 3))
    return make(factory, **options)


def _maker(name: str) -> Callable[..., Backbone]:
    if name in _BACKBONES:
        return _BACKBONES[name]
    package, _, model = name.partition("/")
    if package in _LIBRARIES and model:
        return functools.partial(_LIBRARIES[package], model=model)
    raise unknown_name("backbone", name, [*_BACKBONES, *(f"{package}/<model>" for package in _LIBRARIES)])
