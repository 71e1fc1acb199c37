"""Freeze normalisation layers while the rest of a network trains."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from swbn_lightning.errors import InputError
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.frozen import freeze, is_frozen, thaw


def freeze_norms(model: nn.Module) -> nn.Module:
    """Stop all that normalisation layers learn from batches, W and running statistics, in place.

    This covers whitening layers, BatchNorm, and InstanceNorm with running statistics. They compute as in evaluation,
    even after ``model.train()``. Gamma and beta are parameters and still train; ``requires_grad_(False)`` stops them.

    Frozen layers can be converted, reverted, fused, deep-copied and pickled, and stay frozen. A state dict does not
    record it. Other tools that look for BatchNorm (``update_bn``, ``convert_sync_batchnorm``) treat a frozen one as any
    other. An assigned mode (``norm.training = True``, as Lightning does after validation) thaws a BatchNorm, but not a
    whitening layer.

    Returns:
        ``model``.

    Raises:
        InputError: the model has no such layer, or one has no running statistics to evaluate with. The model stays
            unchanged.
    """
    found = _layers(model)
    for name, _, norm in found:
        check_freezable(norm, name or "the layer")
    for _, _, norm in found:
        freeze(norm)
    return model


def unfreeze_norms(model: nn.Module) -> nn.Module:
    """Let the layers that :func:`freeze_norms` stopped learn again, in place.

    Each layer takes the training mode of the module that contains it.

    Returns:
        ``model``.

    Raises:
        InputError: the model has no layer that could be frozen.
    """
    for _, parent, norm in _layers(model):
        if is_frozen(norm):
            # A compiled module has the mode of what it was made from.
            alone = parent is None or getattr(parent, "_orig_mod", None) is norm
            thaw(norm, alone or parent.training)  # type: ignore[union-attr]
    return model


def _layers(model: nn.Module) -> list[tuple[str, nn.Module | None, nn.Module]]:
    """Return name, parent and module of every layer that learns from batches."""
    found = list(_walk(model))
    if not found:
        raise InputError(f"{type(model).__name__} has no normalisation layer that learns from batches.")
    return found


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module | None, nn.Module]]:
    if learns_from_batches(model):
        yield "", None, model
    for prefix, parent in model.named_modules():
        for name, child in parent.named_children():
            if learns_from_batches(child):
                yield f"{prefix}.{name}" if prefix else name, parent, child


def check_freezable(norm: nn.Module, name: str) -> None:
    """Raise :class:`InputError` for a layer that has only the batch to evaluate with."""
    if norm.running_mean is None:
        raise InputError(
            f"{name!r} ({type(norm).__name__}) keeps no running statistics: it uses the batch's in evaluation too, so "
            "it cannot be frozen. Make it with track_running_stats=True."
        )


def learns_from_batches(module: nn.Module) -> bool:
    """Return whether a layer changes with the batches it sees in training, so that it can be frozen."""
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.track_running_stats
    return isinstance(module, WhiteningNorm | _NormBase)
