"""Measuring a network's normalisation layers without leaving a trace in it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning_fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import Tensor, nn

from swbn_lightning.errors import InputError
from swbn_lightning.norms import named_norms
from swbn_lightning.whiteness.metrics import FeatureMoments, correlation_distance


@dataclass(frozen=True)
class LayerWhiteness:
    """How white one layer's output is, before gamma and beta."""

    distance: float  # norm_F(Corr - I)
    rms: float  # the same over sqrt(d (d - 1)): RMS off-diagonal correlation, in [0, 1]
    num_features: int
    num_samples: int
    num_constant: int  # channels without variance, kept out of both

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@torch.no_grad()
def measure_whiteness(
    model: nn.Module,
    images: Tensor,
    forward: Callable[[Tensor], Any] | None = None,
    layers: Sequence[str] = ("*",),
    batch_size: int = 128,
) -> dict[str, LayerWhiteness]:
    """The correlation-to-identity distance of every normalisation layer, in evaluation mode.

    The model's modes, state and random streams are afterwards what they were.

    Args:
        model: holds the layers.
        images: ``[N, ...]``, the model's input.
        forward: what is run on a batch of them; the model itself by default.
        layers: patterns of module names, as ``("backbone.blocks.*",)``.
        batch_size: images in one forward.

    Returns:
        Layer name to :class:`LayerWhiteness`, in the order of the model's modules; layers that the forward
        does not reach are left out.

    Raises:
        InputError: no normalisation layer, or none that a pattern fits.
    """
    chosen = {n: m for n, m in named_norms(model) if any(fnmatchcase(n, pattern) for pattern in layers)}
    if not chosen:
        known = ", ".join(name for name, _ in named_norms(model)) or "none"
        raise InputError(f"no normalisation layer fits {list(layers)}; the model's layers: {known}.")
    moments: dict[str, FeatureMoments] = {}
    with _evaluation(model), ExitStack() as hooks:
        for name, layer in chosen.items():
            hooks.callback(layer.register_forward_hook(_recorder(name, moments)).remove)
        for batch in images.split(batch_size):
            (forward or model)(batch)
    return {name: _summary(moments[name]) for name in chosen if name in moments}


def _summary(moments: FeatureMoments) -> LayerWhiteness:
    correlation = moments.correlation()
    return LayerWhiteness(
        distance=float(correlation_distance(correlation)),
        rms=float(correlation_distance(correlation, normalized=True)),
        num_features=moments.num_features,
        num_samples=moments.num_samples(),
        num_constant=moments.num_constant(),
    )


def _recorder(name: str, moments: dict[str, FeatureMoments]) -> Callable[..., None]:
    def record(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        features = _without_affine(layer, inputs[0]) if layer._parameters.get("weight") is not None else output
        if name not in moments:
            moments[name] = FeatureMoments().to(features.device)
        moments[name].update(features)

    return record


def _without_affine(layer: nn.Module, x: Tensor) -> Tensor:
    """What the layer gives with gamma 1 and beta 0: gamma = 0 hides a channel, and cannot be divided out."""
    parameters = layer._parameters
    kept = {name: parameters[name] for name in ("weight", "bias") if parameters.get(name) is not None}
    for name, value in kept.items():
        assert value is not None
        neutral = torch.ones_like(value) if name == "weight" else torch.zeros_like(value)
        parameters[name] = nn.Parameter(neutral, requires_grad=False)
    try:
        return layer.forward(x)  # not the call, which would run the hook again
    finally:
        parameters.update(kept)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    random_states = _collect_rng_states()
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        _set_rng_states(random_states)
