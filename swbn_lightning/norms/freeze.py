"""Normalisation layers that stay as they are while the rest of a network trains."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from swbn_lightning.errors import InputError
from swbn_lightning.norms.base import WhiteningNorm

_TRAIN = "train"


class _StaysFrozen:
    """In place of a layer's ``train``: the layer evaluates whatever mode is asked for; what it holds follows."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def __call__(self, mode: bool = True) -> nn.Module:
        self.norm.training = False
        for child in self.norm.children():
            child.train(mode)
        return self.norm


def freeze_norms(model: nn.Module) -> nn.Module:
    """Stop everything that normalisation layers learn from batches, in place: W and the running statistics.

    The layers (whitening layers, BatchNorm, InstanceNorm with running statistics) compute what they compute in
    evaluation, and go on doing so after ``model.train()``, which a trainer calls at every epoch. Gamma and beta are
    parameters and still train; where they must not, ``requires_grad_(False)`` stops them as any other parameter.

    Frozen layers can be converted, reverted, fused, copied and pickled, and stay frozen in a copy. It is no part of a
    state dict. :func:`swbn_lightning.update_norms` passes them by.

    Args:
        model: any network.

    Returns:
        ``model``.

    Raises:
        InputError: no such layer in the model; one without running statistics, which has nothing to evaluate with but
            the batch. The model is then what it was.
    """
    found = _layers(model)
    for name, _, norm in found:
        if norm.running_mean is None:
            raise InputError(
                f"{name or 'the layer'!r} ({type(norm).__name__}) keeps no running statistics: it uses the batch's in "
                "evaluation too, so it cannot be frozen. Make it with track_running_stats=True."
            )
    for _, _, norm in found:
        freeze(norm)
    return model


def unfreeze_norms(model: nn.Module) -> nn.Module:
    """Let layers that :func:`freeze_norms` stopped learn again, in place; each takes the mode of what holds it.

    Args:
        model: any network; layers that are not frozen stay as they are.

    Returns:
        ``model``.

    Raises:
        InputError: no layer in the model that could be frozen.
    """
    for _, parent, norm in _layers(model):
        if is_frozen(norm):
            thaw(norm, True if parent is None else parent.training)
    return model


def freeze(norm: nn.Module) -> None:
    """Freeze one layer."""
    norm.__dict__[_TRAIN] = _StaysFrozen(norm)
    norm.training = False


def thaw(norm: nn.Module, training: bool) -> None:
    """Give one layer its own ``train`` back, and a mode."""
    if is_frozen(norm):
        del norm.__dict__[_TRAIN]
    norm.training = training


def is_frozen(norm: nn.Module) -> bool:
    """Whether :func:`freeze_norms` has stopped this layer."""
    return isinstance(norm.__dict__.get(_TRAIN), _StaysFrozen)


def _layers(model: nn.Module) -> list[tuple[str, nn.Module | None, nn.Module]]:
    """Name, holder and layer, of every layer that learns from batches."""
    found = list(_walk(model))
    if not found:
        raise InputError(f"{type(model).__name__} has no normalisation layer that learns from batches.")
    return found


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module | None, nn.Module]]:
    if _learns_from_batches(model):
        yield "", None, model
    for prefix, parent in model.named_modules():
        for name, child in parent.named_children():
            if _learns_from_batches(child):
                yield f"{prefix}.{name}" if prefix else name, parent, child


def _learns_from_batches(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.track_running_stats
    return isinstance(module, WhiteningNorm | _NormBase)
