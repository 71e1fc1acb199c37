"""Normalisation layers by name: what lets one network be built with any of them."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from swbn_lightning.errors import InputError, unknown_name
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.swbn import SWBN1d, SWBN2d, SWBN3d

LayerMaker = Callable[..., nn.Module]


@dataclass(frozen=True)
class _Entry:
    layers: Mapping[int, LayerMaker]  # by number of spatial dimensions
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
    """Makes normalisation layers of one kind: ``factory(num_features, ndim=2) -> Module``.

    Fits torchvision's ``norm_layer=`` argument::

        resnet18(norm_layer=NormFactory("swbn-fro", step_size=1e-4))

    Args:
        name: ``"swbn-kl"``, ``"swbn-fro"``, ``"swbn"`` (criterion as an option), ``"bn"``, ``"none"`` (no
            normalisation at all), or any name registered with :meth:`register`.
        options: keyword arguments of the layer, such as ``step_size`` or ``num_groups``.

    Raises:
        InputError: an unknown name or option (with the nearest known one and all of them); an option that
            the name itself decides, as the criterion of ``"swbn-kl"``.
    """

    def __init__(self, name: str, **options: Any) -> None:
        if name not in _REGISTRY:
            raise unknown_name("norm", name, _REGISTRY)
        entry = _REGISTRY[name]
        for option in options:
            if option in entry.preset:
                raise InputError(f"norm {name!r} decides {option}={entry.preset[option]!r} itself; do not give it.")
        known = _options_of(next(iter(entry.layers.values()))) - set(entry.preset)
        for option in options:
            if option not in known:
                raise unknown_name(f"option of norm {name!r}:", option, known)
        self.name = name
        self.options = options
        self._entry = entry

    def __call__(self, num_features: int, ndim: int = 2) -> nn.Module:
        """A layer for ``num_features`` channels with ``ndim`` spatial dimensions (1, 2 or 3)."""
        if ndim not in self._entry.layers:
            dims = ", ".join(str(d) for d in sorted(self._entry.layers))
            raise InputError(f"norm {self.name!r} has no layer for {ndim} spatial dimensions; it has: {dims}.")
        return self._entry.layers[ndim](num_features, **self._entry.preset, **self.options)

    def __repr__(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return f"NormFactory({self.name!r}{options})"

    @staticmethod
    def register(name: str, layers: Mapping[int, LayerMaker], **preset: Any) -> None:
        """Make ``name`` known.

        Args:
            name: any new name.
            layers: spatial dimensions to a class (or function) that is called with ``num_features`` and
                the options, as ``{1: MyNorm1d, 2: MyNorm2d}``.
            preset: options that this name decides.

        Raises:
            InputError: the name is taken, or ``layers`` is empty or has keys other than 1, 2, 3.
        """
        if name in _REGISTRY:
            raise InputError(f"norm {name!r} is registered already; choose another name.")
        if not layers or not set(layers) <= {1, 2, 3}:
            raise InputError(f"norm {name!r}: layers must map 1, 2 or 3 to a layer, got keys {sorted(layers)}.")
        _REGISTRY[name] = _Entry(dict(layers), preset)
        for maker in layers.values():
            made = maker.func if isinstance(maker, functools.partial) else maker
            if isinstance(made, type) and issubclass(made, nn.Module):
                _LAYER_TYPES.add(made)

    @staticmethod
    def names() -> tuple[str, ...]:
        """All known names, sorted."""
        return tuple(sorted(_REGISTRY))


def named_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every normalisation layer of a model with its name: ours, PyTorch's and registered ones."""
    types = norm_layer_types()
    for name, module in model.named_modules():
        if isinstance(module, types):
            yield name, module


def norm_layer_types() -> tuple[type[nn.Module], ...]:
    """The classes that count as normalisation layers."""
    return tuple(_LAYER_TYPES)


def _options_of(maker: LayerMaker) -> set[str]:
    parameters = list(inspect.signature(maker).parameters.values())[1:]  # without num_features
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _no_norm(num_features: int) -> nn.Module:
    return nn.Identity()


_SWBN: dict[int, LayerMaker] = {1: SWBN1d, 2: SWBN2d, 3: SWBN3d}
NormFactory.register("swbn", _SWBN)
NormFactory.register("swbn-fro", _SWBN, criterion="fro")
NormFactory.register("swbn-kl", _SWBN, criterion="kl")
NormFactory.register("bn", {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d})
NormFactory.register("none", {1: _no_norm, 2: _no_norm, 3: _no_norm})
