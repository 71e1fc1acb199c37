"""Normalisation layers by name, so that one network can be built with any of them."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swbn_lightning.errors import InputError, require_positive, unknown_name
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.dbn import DBN, DBN1d, DBN2d, DBN3d
from swbn_lightning.norms.iternorm import IterNorm, IterNorm1d, IterNorm2d, IterNorm3d
from swbn_lightning.norms.online import OnlineWhitening, OnlineWhitening1d, OnlineWhitening2d, OnlineWhitening3d
from swbn_lightning.norms.swbn import SWBN, SWBN1d, SWBN2d, SWBN3d

LayerMaker = Callable[..., nn.Module]


@dataclass(frozen=True)
class _Entry:
    layers: Mapping[int | None, LayerMaker]  # by number of spatial dimensions; None: whatever comes
    preset: Mapping[str, Any]  # options that the name itself decides


_REGISTRY: dict[str, _Entry] = {}
# What counts as a normalisation layer when a network is walked; torch's own besides what is registered.
_LAYER_TYPES: set[type[nn.Module]] = {
    WhiteningNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
}


class NormFactory:
    """Make normalisation layers of one kind: ``factory(num_features, ndim=2) -> Module``.

    A factory fits torchvision's ``norm_layer=`` argument::

        resnet18(norm_layer=NormFactory("swbn-fro", step_size=1e-4))

    Args:
        name: ``"swbn-kl"``, ``"swbn-fro"``, ``"swbn"`` (criterion as an option), ``"online"``, ``"iternorm"``,
            ``"dbn"``, ``"bn"``, ``"gn"`` (group), ``"in"`` (instance), ``"ln"`` (layer: group normalisation with one
            group), ``"none"`` (no normalisation), or any name registered with :meth:`register`.
        options: keyword arguments of the layer, such as ``step_size`` or ``num_groups``.

    Raises:
        InputError: an unknown name or option (the message has the nearest known name and all of them), or an option
            that the name fixes, such as the criterion of ``"swbn-kl"``.
    """

    def __init__(self, name: str, **options: Any) -> None:
        if name not in _REGISTRY:
            raise unknown_name("norm", name, _REGISTRY)
        entry = _REGISTRY[name]
        for option in options:
            if option in entry.preset:
                raise InputError(f"norm {name!r} decides {option}={entry.preset[option]!r} itself; do not give it.")
        self.name = name
        self.options = options
        self._entry = entry
        known = self.parameters()
        for option in options:
            if option not in known:
                raise unknown_name(f"option of norm {name!r}:", option, known)

    def __call__(self, num_features: int, ndim: int | None = 2, **defaults: Any) -> nn.Module:
        """Make a layer for ``num_features`` channels.

        Args:
            num_features: number of channels.
            ndim: number of spatial dimensions (1, 2 or 3); None for a layer that accepts any number.
            defaults: arguments of the layer, used unless the factory's own options set them.

        Raises:
            InputError: this norm has no layer for ``ndim``.
        """
        layers = self._entry.layers
        if ndim not in layers:
            dims = ", ".join(sorted(str(d) for d in layers))
            raise InputError(f"norm {self.name!r} has no layer for {ndim} spatial dimensions; it has: {dims}.")
        return layers[ndim](num_features, **self._entry.preset, **{**defaults, **self.options})

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Return the parameters of the layer's constructor, without ``num_features`` and those that the name fixes."""
        found = _parameters_of(next(iter(self._entry.layers.values())))
        return {name: parameter for name, parameter in found.items() if name not in self._entry.preset}

    def __repr__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f"NormFactory({self.name!r}{options})"

    @staticmethod
    def register(name: str, layers: Mapping[Any, LayerMaker], **preset: Any) -> None:
        """Register a new norm under ``name``.

        Args:
            name: any name that is not taken.
            layers: maps a number of spatial dimensions to a class (or function) that is called with ``num_features``
                and the options, such as ``{1: MyNorm1d, 2: MyNorm2d}``. The key None stands for any number of
                dimensions, as needed to convert SyncBatchNorm.
            preset: options that this name fixes.

        Raises:
            InputError: the name is taken, or ``layers`` is empty or has keys other than 1, 2, 3 and None.
        """
        if name in _REGISTRY:
            raise InputError(f"norm {name!r} is registered already; choose another name.")
        if not layers or not set(layers) <= {1, 2, 3, None}:
            raise InputError(f"norm {name!r}: layers must map 1, 2, 3 or None to a layer, got keys {list(layers)}.")
        _REGISTRY[name] = _Entry(dict(layers), preset)
        for maker in layers.values():
            made = maker.func if isinstance(maker, functools.partial) else maker
            if isinstance(made, type) and issubclass(made, nn.Module):
                _LAYER_TYPES.add(made)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return all known names, sorted."""
        return tuple(sorted(_REGISTRY))


def named_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of every normalisation layer in a model.

    These are the layers of :func:`norm_layer_types`: this package's, PyTorch's and registered ones.
    """
    types = norm_layer_types()
    for name, module in model.named_modules():
        if isinstance(module, types):
            yield name, module


def norm_layer_types() -> tuple[type[nn.Module], ...]:
    """Return the classes that count as normalisation layers."""
    return tuple(_LAYER_TYPES)


def _parameters_of(maker: LayerMaker) -> Mapping[str, inspect.Parameter]:
    parameters = list(inspect.signature(maker).parameters.values())[1:]  # without num_features
    return {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def group_norm(
    num_features: int,
    num_groups: int | None = None,
    eps: float = 1e-5,
    affine: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.GroupNorm:
    """Make a group normalisation; None: the largest number of groups up to 32 (Wu and He, ECCV 2018) that fits."""
    require_positive("gn", num_features=num_features)
    if num_groups is None:
        num_groups = max(groups for groups in range(1, 33) if num_features % groups == 0)
    require_positive("gn", num_groups=num_groups)
    if num_features % num_groups:
        raise InputError(f"gn: num_groups={num_groups} does not divide num_features={num_features}; choose a divisor.")
    return nn.GroupNorm(num_groups, num_features, eps, affine, device, dtype)


class _InstanceNorm1d(nn.InstanceNorm1d):
    # PyTorch reads [N, C] as one sample [C, L] without batch: silently wrong where N = C.
    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() != 3:
            raise ValueError(f"expected 3D input (got {input.dim()}D input): one position has no instance statistics")


class _NoNorm(nn.Identity):
    # A tensor of its own, as a norm gives: an in-place activation behind it must not reach the norm's input.
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.clone()


def _no_norm(num_features: int) -> nn.Module:
    return _NoNorm()


_SWBN = {1: SWBN1d, 2: SWBN2d, 3: SWBN3d, None: SWBN}
NormFactory.register("swbn", _SWBN)
NormFactory.register("swbn-fro", _SWBN, criterion="fro")
NormFactory.register("swbn-kl", _SWBN, criterion="kl")
NormFactory.register("iternorm", {1: IterNorm1d, 2: IterNorm2d, 3: IterNorm3d, None: IterNorm})
NormFactory.register("dbn", {1: DBN1d, 2: DBN2d, 3: DBN3d, None: DBN})
NormFactory.register(
    "online", {1: OnlineWhitening1d, 2: OnlineWhitening2d, 3: OnlineWhitening3d, None: OnlineWhitening}
)
NormFactory.register("bn", {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d, None: nn.SyncBatchNorm})
NormFactory.register("gn", dict.fromkeys((1, 2, 3, None), group_norm))
NormFactory.register("ln", dict.fromkeys((1, 2, 3, None), group_norm), num_groups=1)
# With gamma and beta, as every other norm here; torch's own default is without.
NormFactory.register(
    "in",
    {
        1: functools.partial(_InstanceNorm1d, affine=True),
        2: functools.partial(nn.InstanceNorm2d, affine=True),
        3: functools.partial(nn.InstanceNorm3d, affine=True),
    },
)
NormFactory.register("none", dict.fromkeys((1, 2, 3, None), _no_norm))
