"""Replace a network's BatchNorm layers by another normalisation, and revert that."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.utils import parametrize

from swbn_lightning.errors import InputError, unknown_name
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.factory import NormFactory
from swbn_lightning.norms.frozen import freeze, is_frozen, thaw
from swbn_lightning.norms.surgery.freeze import check_freezable, learns_from_batches
from swbn_lightning.norms.surgery.patterns import chosen
from swbn_lightning.norms.surgery.replace import move_hooks, replace_modules
from swbn_lightning.norms.surgery.wrappers import AppendedNorm, NormAct

# SyncBatchNorm does not say how many dimensions its input has; None asks for a layer that does not either.
_NDIM: dict[type[nn.Module], int | None] = {
    nn.BatchNorm1d: 1,
    nn.BatchNorm2d: 2,
    nn.BatchNorm3d: 3,
    nn.SyncBatchNorm: None,
}
_ORIGINAL = "_converted_from"  # the BatchNorm that stood here, in a tuple, so that it is no submodule


def convert_norms(
    model: nn.Module,
    factory: NormFactory,
    include: str | Sequence[str] = ("*",),
    exclude: str | Sequence[str] = (),
) -> nn.Module:
    """Replace BatchNorm layers in place by layers from ``factory``.

    This converts BatchNorm1d/2d/3d and SyncBatchNorm and leaves other normalisations alone. A new layer keeps:

    - the parameters, as the same objects, so an existing optimiser remains valid;
    - running statistics, eps and momentum (eps and momentum only if the factory does not set them);
    - device, training mode and hooks; a frozen layer stays frozen.

    A whitening layer starts with the W that leaves the network's output in evaluation unchanged. timm's layers with a
    built-in activation become a ``NormAct``. Earlier checkpoints still load.

    The paper's placements (Zhang et al., CVPR 2021)::

        convert_norms(model, factory)                            # section 4.1, ResNeXt, few-shot: every layer
        convert_norms(model, factory, exclude=["*downsample*"])  # ResNetV1-32, appendix E: no projection shortcuts
        convert_norms(model, factory, include=["bn1"])           # ResNet-50 on ImageNet, section 4.2.2: first layer
        append_norm(model, "fc", factory)                        # and an extra layer before the last linear one

    Args:
        model: any network.
        factory: makes the new layers.
        include: shell pattern of module names, such as ``"layer1.*"``, or several; a layer must match one.
        exclude: pattern of layers to leave alone, or several.

    Returns:
        ``model``; the new layer if the model itself is a BatchNorm.

    Raises:
        InputError: the model has no BatchNorm, or the patterns leave none; a pattern matches none (the message has the
            names); a lazy layer has seen no input yet; a BatchNorm does something extra, which would be lost; or the
            factory's layer rejects its arguments (the message has the layer's name). The model stays unchanged.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _BatchNorm):
            names.setdefault(module, []).append(name)
    if not names:
        raise InputError(
            f"{type(model).__name__} has no BatchNorm layer to convert (one that is converted already needs "
            "revert_norms first)."
        )
    wanted = chosen("BatchNorm layer", names, include, exclude)
    # All are made before anything in the model is changed.
    return replace_modules(model, {m: _converted(m, name, factory) for m, name in wanted.items()})


def revert_norms(model: nn.Module) -> nn.Module:
    """Undo :func:`convert_norms` and :func:`append_norm`, in place.

    The original BatchNorm layers return with the network's current gamma, beta, running statistics, device and mode. W
    is dropped, so the output of a trained network changes. To remove the layers *without* changing the output, use
    :func:`swbn_lightning.fuse_norms`.

    IterNorm and DBN keep no running variance. If untrained, they give back the old variance bit for bit. After
    training, the variance is a rough estimate from the diagonal of ``W^-2``. Run some batches in training mode before
    you rely on it.

    Returns:
        ``model``; the old layer if the model itself is a converted one.

    Raises:
        InputError: nothing in the model was converted or appended; the model comes from ``fuse_norms``; or a layer is
            parametrised.
    """
    if any("fusion_report" in module.__dict__ for module in model.modules()):
        raise InputError("this network was fused; revert the one that fuse_norms was given.")
    chosen: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, AppendedNorm):
            chosen[module] = module.layer
        elif _ORIGINAL in module.__dict__:
            old = module
            while _ORIGINAL in old.__dict__:  # converted more than once
                old = _reverted(old, next(model.parameters(), None))
            chosen[module] = old
    if not chosen:
        raise InputError(f"{type(model).__name__} holds no layer that convert_norms or append_norm put there.")
    return replace_modules(model, chosen)


def append_norm(model: nn.Module, before: str, factory: NormFactory) -> nn.Module:
    """Insert one more normalisation before the named layer, in place.

    The two become one :class:`AppendedNorm`. The paper's ResNet-50 on ImageNet has such a layer before its last linear
    layer (section 4.2.2): ``before="fc"``.

    Args:
        model: contains the layer.
        before: name of a linear or convolution layer, as in ``model.named_modules()``.
        factory: makes the new layer, for the channels that the named layer takes. Before a linear layer, a whitening
            layer accepts only ``[N, C]``, because in ``[N, T, C]`` the channels are not dimension 1.

    Returns:
        ``model``.

    Raises:
        InputError: the name is unknown (the message has the nearest one), or the layer is not a linear or convolution
            layer with a known number of channels.
    """
    layers = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    if before not in layers:
        raise unknown_name("layer", before, [n for n, m in layers.items() if _channels_in(m)])
    layer = layers[before]
    found = _channels_in(layer)
    if not found:
        raise InputError(
            f"{before!r} is a {type(layer).__name__}; a norm can be put in front of a linear or convolution layer."
        )
    norm = _make(factory, *found, like=next(layer.parameters())).train(layer.training)
    if isinstance(layer, nn.Linear) and isinstance(norm, WhiteningNorm):
        norm.input_dims = (2,)
    return replace_modules(model, {layer: AppendedNorm(norm, layer)})


def _converted(old: nn.Module, name: str, factory: NormFactory) -> nn.Module:
    """Return the layer that replaces ``old``; it shares its parameters and remembers it."""
    base, with_act = _kind(old, name)
    assert isinstance(old, _BatchNorm)
    kept: dict[str, Any] = {"eps": old.eps, "affine": old.affine}
    tracks = factory.parameters().get("track_running_stats")
    if tracks is not None and tracks.default is True:  # instance norm's is False, and so it stays
        kept |= {"momentum": old.momentum, "track_running_stats": old.track_running_stats}
    like = old.weight if old.weight is not None else old.running_mean
    try:
        norm = _make(factory, old.num_features, _NDIM[base], like=like, **kept)
    except InputError as error:
        raise InputError(f"{name!r}: {error}") from None
    for parameter in ("weight", "bias"):
        mine, theirs = norm._parameters.get(parameter), old._parameters[parameter]
        if mine is not None and old.affine and (theirs is None or theirs.shape == mine.shape):
            norm._parameters[parameter] = theirs
    norm.load_state_dict(old.state_dict(), strict=False)
    new = NormAct(norm, old.drop, old.act) if with_act else norm  # type: ignore[arg-type]
    new.__dict__[_ORIGINAL] = (old, _dtype(norm))
    move_hooks(old, new)
    new.training = norm.training = old.training
    if is_frozen(old):
        for inner in filter(learns_from_batches, norm.modules()):
            check_freezable(inner, name)
            freeze(inner)
        if isinstance(new, NormAct):
            new.training = new.drop.training  # the mode that it would have
    return new


def _kind(old: nn.Module, name: str) -> tuple[type[nn.Module], bool]:
    """Return the BatchNorm class whose forward ``old`` has, and whether timm's dropout and activation follow it."""
    if isinstance(old, _LazyNormBase):
        raise InputError(f"{name!r} ({type(old).__name__}) has seen no input yet; run one forward first, then convert.")
    base = next((cls for cls in type(old).__mro__ if cls in _NDIM), None)
    if base is not None and getattr(old, "process_group", None) is not None:
        raise InputError(
            f"{name!r} synchronises over a process group of its own; the layers here do so over all processes or "
            "(sync=False) over none. Leave it out with exclude=, or make it without process_group."
        )
    if parametrize.is_parametrized(old) or "weight" not in old._parameters:
        raise InputError(f"{name!r} is parametrised or pruned; make that permanent first, or leave it out (exclude=).")
    trains_itself = type(old).train is not nn.Module.train or ("train" in old.__dict__ and not is_frozen(old))
    overridden = trains_itself or "forward" in old.__dict__
    if base is not None and not overridden:
        if type(old).forward is base.forward:
            return base, False
        if type(old).__module__.startswith("timm.") and set(old._modules) == {"drop", "act"}:
            return base, True
    raise InputError(
        f"{name!r} is a {type(old).__qualname__} that does something of its own in forward or train, which a converted "
        "layer would not do. Leave it out with exclude=, or use a plain BatchNorm in the model."
    )


def _reverted(module: nn.Module, elsewhere: Tensor | None) -> nn.Module:
    """Return the BatchNorm that ``module`` was converted from, with current values."""
    old, dtype_then = module.__dict__[_ORIGINAL]
    norm = module.norm if isinstance(module, NormAct) else module
    assert isinstance(old, _BatchNorm) and isinstance(norm, nn.Module)
    if parametrize.is_parametrized(norm):
        raise InputError(f"{type(norm).__name__} is parametrised; make that permanent before reverting.")
    like = next((t for t in (*norm.parameters(), *norm.buffers(), elsewhere) if t is not None), None)
    if like is not None:
        # Not `to` alone: a network made on the meta device and filled since has a memory of it here.
        was_meta = any(tensor.is_meta for tensor in (*old.parameters(), *old.buffers()))
        old.to_empty(device=like.device) if was_meta else old.to(like.device)
    dtype_now = _dtype(norm)
    if dtype_now is not None and dtype_now != dtype_then:  # cast since; until then, a dtype each was as it should be
        old.to(dtype_now)
    for name, value in old._parameters.items():
        mine = norm._parameters.get(name)
        if value is not None and mine is not None and mine.shape == value.shape:
            old._parameters[name] = mine
    if isinstance(norm, WhiteningNorm | _BatchNorm) and norm.track_running_stats and old.track_running_stats:
        with torch.no_grad():
            _copy_statistics(norm, old)
    if isinstance(module, NormAct):
        old.drop, old.act = module.drop, module.act
    move_hooks(module, old)
    learning = [inner for inner in norm.modules() if learns_from_batches(inner)]
    if learning:  # else it has stayed as it was
        thaw(old, module.training)
        if is_frozen(learning[0]):
            freeze(old)
    elif not is_frozen(old):
        old.training = module.training
    return old


def _dtype(norm: nn.Module) -> torch.dtype | None:
    """Return the dtype that a cast changes: that of the parameters, or of the state if there are none."""
    return next((t.dtype for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point()), None)


def _copy_statistics(norm: WhiteningNorm | _BatchNorm, old: _BatchNorm) -> None:
    variance = norm.running_variance(old.state_dict()) if isinstance(norm, WhiteningNorm) else norm.running_var
    for buffer, value in (
        (old.running_var, variance),
        (old.running_mean, norm.running_mean),
        (old.num_batches_tracked, norm.num_batches_tracked),
    ):
        assert buffer is not None and value is not None
        buffer.copy_(value)


def _make(
    factory: NormFactory, num_features: int, ndim: int | None, *, like: Tensor | None, **defaults: Any
) -> nn.Module:
    """Make a layer with the dtype and device of ``like``, and those of ``defaults`` that it accepts."""
    if like is not None:
        defaults |= {"device": like.device, "dtype": like.dtype}
    known = factory.parameters()
    norm = factory(num_features, ndim, **{key: value for key, value in defaults.items() if key in known})
    return norm if like is None or "device" in known else norm.to(like.device)


def _channels_in(layer: nn.Module) -> tuple[int, int] | None:
    """Return a layer's input channels and spatial dimensions (1 for a linear layer), if known."""
    if isinstance(layer, nn.Linear):
        return (layer.in_features, 1) if layer.in_features else None
    for ndim, kinds in enumerate(_CONVOLUTIONS, start=1):
        if isinstance(layer, kinds):
            return (layer.in_channels, ndim) if layer.in_channels else None
    return None


_CONVOLUTIONS = (
    (nn.Conv1d, nn.ConvTranspose1d),
    (nn.Conv2d, nn.ConvTranspose2d),
    (nn.Conv3d, nn.ConvTranspose3d),
)
