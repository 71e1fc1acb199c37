"""Measure a network's normalisation layers without changing the network."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from swbn_lightning.errors import InputError
from swbn_lightning.norms.factory import norm_layer_types
from swbn_lightning.norms.surgery.patterns import chosen
from swbn_lightning.whiteness.measures import MEASURES, Matrices
from swbn_lightning.whiteness.moments import FeatureMoments


@dataclass(frozen=True)
class LayerWhiteness:
    """How white one layer's output is, before gamma and beta.

    Constant channels are left out of every measure, so ``d`` is ``num_features - num_constant``.
    """

    distance: float  # norm_F(Corr - I)
    rms: float  # the same over sqrt(d (d - 1)): RMS off-diagonal correlation, in [0, 1]
    mean_abs: float  # mean absolute off-diagonal correlation, in [0, 1]
    covariance: float  # norm_F(Cov - I) / sqrt(d)
    effective_rank: float  # exp(entropy of the normalised eigenvalues of Cov) / d, in [1/d, 1]
    log10_condition: float  # of Cov; infinite if that is singular
    kl: float  # (tr Cov - ln det Cov - d) / 2, the paper's equation 1; infinite if Cov is singular
    fro: float  # norm_F(I - Cov) / 2, equation 2
    num_features: int
    num_samples: int
    num_constant: int  # channels without variance

    @property
    def few_samples(self) -> bool:
        """Whether there are fewer samples than varying channels, so that the covariance is singular for any layer."""
        return self.num_samples < self.num_features - self.num_constant


def measure_whiteness(
    model: nn.Module,
    images: Tensor,
    forward: Callable[[Tensor], Any] | None = None,
    layers: str | Sequence[str] = ("*",),
    batch_size: int = 128,
    exclude: str | Sequence[str] = (),
) -> dict[str, LayerWhiteness]:
    """Measure how white every normalisation layer's output is, in evaluation mode, before gamma and beta.

    Afterwards the model's modes, state and random streams are what they were before.

    Args:
        model: contains the layers. Compiled networks run uncompiled meanwhile.
        images: ``[N, ...]``, the model's input.
        forward: runs on each batch of images; by default the model itself.
        layers: pattern of module names, such as ``"backbone.blocks.*"``, or several; a layer must match one.
        batch_size: images per forward.
        exclude: pattern of layers to leave out, or several.

    Returns:
        Maps layer names to :class:`LayerWhiteness`, in the order of the model's modules. Layers that the forward does
        not reach are left out. All uses of a layer in one forward count together.

    Raises:
        InputError: the model has no normalisation layer; a pattern matches none, or the patterns leave none; or it is
            unclear which dimension of a ``LayerNorm`` holds the channels.
    """
    return {
        name: summarize(moments)
        for name, moments in feature_moments(model, images, forward, layers, batch_size, exclude).items()
    }


@torch.no_grad()
def feature_moments(
    model: nn.Module,
    images: Tensor,
    forward: Callable[[Tensor], Any] | None = None,
    layers: str | Sequence[str] = ("*",),
    batch_size: int = 128,
    exclude: str | Sequence[str] = (),
) -> dict[str, FeatureMoments]:
    """Return the moments from which :func:`measure_whiteness` computes its measures; the arguments are the same.

    They give the matrices, for example to draw them.
    """
    norms = choose_layers(model, layers, exclude)
    found: dict[str, FeatureMoments] = {}

    def record(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        features = features_before_affine(name, layer, args[0] if args else next(iter(kwargs.values())))
        if name not in found:
            found[name] = FeatureMoments().to(features.device)
        found[name].update(features)

    with _without_a_trace(model), ExitStack() as hooks:
        for name, layer in norms.items():
            hooks.callback(layer.register_forward_hook(partial(record, name), with_kwargs=True).remove)
        for batch in images.split(batch_size):
            (forward or model)(batch)
    return {name: found[name] for name in norms if name in found}


def choose_layers(
    model: nn.Module, layers: str | Sequence[str] = ("*",), exclude: str | Sequence[str] = ()
) -> dict[str, nn.Module]:
    """Return the normalisation layers that match, by their names before compilation; no match is an error."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, norm_layer_types()):
            names.setdefault(module, []).append(name.replace("_orig_mod.", ""))
    return {name: layer for layer, name in chosen("normalisation layer", names, layers, exclude).items()}


def summarize(moments: FeatureMoments) -> LayerWhiteness:
    """Return every measure of the features as plain numbers."""
    matrices = Matrices(moments)
    return LayerWhiteness(
        **{name: float(measure(matrices)) for name, measure in MEASURES.items()},
        num_features=moments.num_features,
        num_samples=moments.num_samples(),
        num_constant=moments.num_constant(),
    )


@contextmanager
def _without_a_trace(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode; restore modes and random streams, even after an error."""
    # Assigned, not by `train()`, which a module may have made do something of its own (merge weights, say).
    modes = [(module, module.training) for module in model.modules()]
    failed: BaseException | None = None
    # Compiled code does not run hooks that were registered after it was made.
    with isolate_rng(), torch.compiler.set_stance("force_eager"):
        try:
            for module, _ in modes:
                module.training = False
            yield
        except BaseException as error:
            failed = error  # `isolate_rng` puts nothing back when an error passes it
        finally:
            for module, mode in modes:
                module.training = mode
    if failed is not None:
        raise failed


def features_before_affine(name: str, layer: nn.Module, x: Tensor) -> Tensor:
    """Return the layer's output for ``x`` with gamma 1 and beta 0, channels in dimension 1.

    The output is computed again, not divided by gamma: a gamma of 0 would hide a channel. For PyTorch's layers this is
    only the normalisation, without what a subclass does after it. Other layers run their forward with ``weight`` 1 and
    ``bias`` 0.
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
    """Return the channel dimension: the last, or 1 in a subclass for maps (``LayerNorm2d`` of torchvision or timm)."""
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
