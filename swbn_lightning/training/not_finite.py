"""Finding numbers that are NaN or infinite, and where in a network they begin."""

from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn


def not_finite(values: Mapping[str, Tensor]) -> list[str]:
    """Names of those that hold a NaN or an infinity, looked at all at once: one wait for the device."""
    floating = {name: value for name, value in values.items() if value.is_floating_point() and value.numel()}
    if not floating:
        return []
    finite = torch.stack([torch.isfinite(value).all() for value in floating.values()]).tolist()
    return [name for name, good in zip(floating, finite, strict=True) if not good]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and what a checkpoint holds beside them."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def first_not_finite(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """The first module whose output is not finite in a forward, as ``name (class)``; None where all are."""
    found: list[str] = []

    def watch(name: str, module: nn.Module) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            # Inner modules end before the outer ones that hold them: the first to be met is the innermost.
            if not found and not all(torch.isfinite(value).all() for value in tensors_in(output)):
                found.append(f"{name} ({type(module).__name__})")

        return module.register_forward_hook(hook)

    handles = [watch(name, module) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def tensors_in(nest: Any) -> list[Tensor]:
    """The tensors in a nest of containers."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    apply_to_collection(nest, Tensor, keep, allow_frozen=True)
    return found


def any_process(trainer: pl.Trainer, found: bool) -> bool:
    """Whether any process has found something; every one must ask.

    Lightning reduces a metric of all processes when it is first read, wherever that is: at an epoch's end process 0 may
    have read it for its progress bar, which the others do not have. So here all read it first; otherwise process 0
    would be in another collective than they are.
    """
    if trainer.world_size == 1:
        return found
    _ = trainer.callback_metrics
    return bool(trainer.strategy.reduce_boolean_decision(found, all=False))
