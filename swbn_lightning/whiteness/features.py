"""What a normalisation layer gives before gamma and beta."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from swbn_lightning.errors import InputError


@contextmanager
def record_features(name: str, layer: nn.Module, take: Callable[[Tensor], None]) -> Iterator[None]:
    """While it lasts, ``take`` gets the layer's features at each of its forwards: ``[N, C]`` or ``[N, C, ...]``.

    Args:
        name: of the layer, for errors.
        layer: a normalisation layer, in evaluation mode.
        take: called in the forward.
    """

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        take(features_before_affine(name, layer, x))

    handle = layer.register_forward_hook(record, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def features_before_affine(name: str, layer: nn.Module, x: Tensor) -> Tensor:
    """The layer's output for ``x`` with gamma 1 and beta 0, channels in dimension 1.

    Computed, not divided out: a gamma of 0 would hide a channel. Of PyTorch's layers it is the normalisation alone,
    without what a subclass does after it, as timm's layers with an activation. Of others it is their forward with the
    parameters ``weight`` and ``bias``, where they have them, at 1 and 0.

    Raises:
        InputError: a ``LayerNorm`` of which it cannot be told which dimension holds the channels.
    """
    if isinstance(layer, _BatchNorm):
        mean, variance = layer.running_mean, layer.running_var
        return F.batch_norm(x, mean, variance, training=mean is None, eps=layer.eps)
    if isinstance(layer, _InstanceNorm):
        mean, variance = layer.running_mean, layer.running_var
        return F.instance_norm(x, mean, variance, use_input_stats=mean is None, eps=layer.eps)
    if isinstance(layer, nn.GroupNorm):
        return F.group_norm(x, layer.num_groups, eps=layer.eps)
    if isinstance(layer, nn.LayerNorm):
        channels = _channel_dimension(name, layer, x)
        return F.layer_norm(x.movedim(channels, -1), layer.normalized_shape, eps=layer.eps).movedim(-1, 1)
    return _with_neutral_affine(layer, x)


def _channel_dimension(name: str, layer: nn.LayerNorm, x: Tensor) -> int:
    """Last, as LayerNorm has it, or 1 in a subclass for maps (``LayerNorm2d`` of torchvision and timm)."""
    if len(layer.normalized_shape) != 1:
        raise InputError(
            f"{name}: a LayerNorm over {len(layer.normalized_shape)} dimensions, {list(layer.normalized_shape)}, does "
            f"not say which of them holds the channels. Leave it out: exclude=[{name!r}]."
        )
    if type(layer).forward is nn.LayerNorm.forward or x.dim() == 2:
        return x.dim() - 1
    fitting = [dim for dim in (1, x.dim() - 1) if x.shape[dim] == layer.normalized_shape[0]]
    if len(fitting) != 1:
        raise InputError(
            f"{name}: whether the {layer.normalized_shape[0]} channels of a {type(layer).__name__} with input "
            f"{list(x.shape)} are in dimension 1 or the last cannot be told. Leave it out: exclude=[{name!r}]."
        )
    return fitting[0]


def _with_neutral_affine(layer: nn.Module, x: Tensor) -> Tensor:
    kept = {name: value for name, value in layer.named_parameters(recurse=False) if name in ("weight", "bias")}
    for name, value in kept.items():
        neutral = torch.ones_like(value) if name == "weight" else torch.zeros_like(value)
        setattr(layer, name, nn.Parameter(neutral, requires_grad=False))
    try:
        return layer.forward(x)  # not the call, which would run the hook again
    finally:
        for name, value in kept.items():
            setattr(layer, name, value)
