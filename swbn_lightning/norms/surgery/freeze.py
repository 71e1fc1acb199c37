"""Normalisation layers that stay as they are while the rest of a network trains."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from swbn_lightning.errors import InputError
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.frozen import freeze, is_frozen, thaw


def freeze_norms(model: nn.Module) -> nn.Module:
    """Stop everything that normalisation layers learn from batches, in place: W and the running statistics.

    The layers (whitening layers, BatchNorm, InstanceNorm with running statistics) compute what they compute in
    evaluation, and go on doing so after ``model.train()``. Gamma and beta are parameters and still train; where they
    must not, ``requires_grad_(False)`` stops them as any other parameter.

    Frozen layers can be converted, reverted, fused, deep-copied and pickled, and stay frozen. It is no part of a state
    dict. What PyTorch and Lightning do to BatchNorm by its class they do to a frozen one, too (``update_bn``,
    ``convert_sync_batchnorm``); a mode that is assigned (``norm.training = True``), as Lightning does after validation,
    thaws a BatchNorm, though no whitening layer.

    Raises:
        InputError: no such layer in the model; one without running statistics, which has nothing to evaluate with but
            the batch. The model is then what it was.
    """
    found = _layers(model)
    for name, _, norm in found:
        check_freezable(norm, name or "the layer")
    for _, _, norm in found:
        freeze(norm)
    return model


def unfreeze_norms(model: nn.Module) -> nn.Module:
    """Let layers that :func:`freeze_norms` stopped learn again, in place; each takes the mode of what holds it.

    Raises:
        InputError: no layer in the model that could be frozen.
    """
    for _, parent, norm in _layers(model):
        if is_frozen(norm):
            # A compiled module has the mode of what it was made from.
            alone = parent is None or getattr(parent, "_orig_mod", None) is norm
            thaw(norm, alone or parent.training)  # type: ignore[union-attr]
    return model


def _layers(model: nn.Module) -> list[tuple[str, nn.Module | None, nn.Module]]:
    """Name, holder and layer, of every layer that learns from batches."""
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
    """Raise for a layer that has nothing to evaluate with but the batch."""
    if norm.running_mean is None:
        raise InputError(
            f"{name!r} ({type(norm).__name__}) keeps no running statistics: it uses the batch's in evaluation too, so "
            "it cannot be frozen. Make it with track_running_stats=True."
        )


def learns_from_batches(module: nn.Module) -> bool:
    """Whether a layer changes with the batches that it sees in training: what can be frozen."""
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.track_running_stats
    return isinstance(module, WhiteningNorm | _NormBase)
