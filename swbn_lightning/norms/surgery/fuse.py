"""Remove normalisation layers for inference: fold each into the layer before, or make it a 1x1 convolution."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import skip_init

from swbn_lightning.errors import InputError
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.passes.rows import whiten
from swbn_lightning.norms.surgery.dataflow import TRANSPOSED, find_dataflow, is_norm
from swbn_lightning.norms.surgery.replace import move_hooks, replace_modules


@dataclass(frozen=True)
class FusionReport:
    """What :func:`fuse_norms` did, by module names."""

    folded: dict[str, str]
    """Maps each folded normalisation layer to the layer it was folded into."""
    convolutions: tuple[str, ...]
    """Whitening layers that became a 1x1 convolution."""
    kept: tuple[str, ...]
    """BatchNorm layers left as they are: nothing before them to fold into, or a subclass."""
    untraced: tuple[str, ...]
    """Parts of the network that could not be traced; their children were examined one by one."""

    def __str__(self) -> str:
        text = f"{len(self.folded)} folded into the layer before, {len(self.convolutions)} left as a 1x1 convolution"
        text += f", {len(self.kept)} BatchNorm kept" if self.kept else ""
        return f"{text}; could not be traced: {', '.join(self.untraced)}" if self.untraced else text


def fuse_norms(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` for inference that computes the same without whitening layers.

    In evaluation a whitening layer is one affine map, as BatchNorm is. If a linear layer or convolution (grouped,
    dilated, strided, transposed, with any padding) comes directly before it and feeds nothing else, the map is folded
    into that layer, in float64. Otherwise the whitening layer becomes a 1x1 convolution: after an addition, for
    example, or where it whitens across the groups of a grouped convolution. BatchNorm layers are folded where possible.

    Layer order is read from a :mod:`torch.fx` trace, with flags and optional arguments of the forward both ways. The
    report names the parts that cannot be traced (control flow that depends on values). Their children are examined one
    by one, on the assumption that such a part does not use a single layer inside one of its children.

    A folded weight is rounded once, to its layer's dtype, so fuse in float32 and cast afterwards.

    Returns:
        A new module in evaluation mode with the same structure. Its attribute ``fusion_report`` is a
        :class:`FusionReport`; ``print(fused.fusion_report)`` shows how many layers were folded.

    Raises:
        InputError: a whitening layer has no running statistics, has a forward set on the instance, or has parameters
            that the network uses elsewhere; or a lazy layer has seen no input yet.
    """
    flow = find_dataflow(_checked(model), (PointwiseConv, _Folded))
    fused = copy.deepcopy(model).eval()
    names = {module: name for name, module in fused.named_modules()}
    dtype = next((p.dtype for p in fused.parameters() if p.is_floating_point()), torch.get_default_dtype())
    chosen: dict[nn.Module, nn.Module] = {}
    folded: dict[str, str] = {}
    convolutions, kept = [], []
    for norm, name in names.items():
        layer = fused.get_submodule(flow.before[name]) if name in flow.before else None
        if not isinstance(norm, WhiteningNorm | _BatchNorm):
            continue
        if isinstance(norm, WhiteningNorm) and name in flow.read:
            raise InputError(f"{name!r}: the network uses this layer's parameters outside of it, where it must stay.")
        if layer is not None and is_norm(norm) and norm.track_running_stats and _fold(layer, *_affine_map(norm, name)):
            chosen[norm] = _Folded(layer)
            folded[name] = flow.before[name]
        elif isinstance(norm, WhiteningNorm):
            chosen[norm] = _pointwise(norm, *_affine_map(norm, name), dtype)
            convolutions.append(name)
        else:
            kept.append(name)
    fused = replace_modules(fused, chosen).eval()
    report = FusionReport(folded, tuple(convolutions), tuple(kept), flow.untraced)
    fused.fusion_report = report  # type: ignore[assignment]
    return fused


class PointwiseConv(nn.Module):
    """A 1x1 convolution for both ``[N, C]`` and ``[N, C, ...]``, which PyTorch does not have.

    Args:
        matrix: ``[g, C/g, C/g]``, one block per group of channels.
        bias: ``[C]``.
    """

    def __init__(self, matrix: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix)
        self.bias = nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return _pointwise_convolution(x, self.weight, self.bias)


@fx.wrap  # one node to whoever traces a fused network
def _pointwise_convolution(x: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    return whiten(x, matrix, None, bias)


class _Folded(nn.Identity):
    """Takes the place of a norm that was folded into ``layer``.

    It checks the number of dimensions that the norm was made for. A linear layer's channels are its input's *last*
    dimension, and ``Conv1d`` takes ``[C, L]`` as one sample; the norm would have used dimension 1 of any input.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        one = isinstance(layer, nn.Conv1d | nn.ConvTranspose1d)
        self.dim = 2 if isinstance(layer, nn.Linear) else 3 if one else None

    def forward(self, input: Tensor) -> Tensor:
        if self.dim is not None:
            torch._assert(input.dim() == self.dim, f"this network was fused for {self.dim}D input here")
        return input


def _checked(model: nn.Module) -> nn.Module:
    for name, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise InputError(f"{name!r} ({type(module).__name__}) has seen no input yet; run the network once first.")
        if isinstance(module, WhiteningNorm) and "forward" in module.__dict__:
            raise InputError(f"{name!r} has a forward set on the instance, which fusing would lose; take it off first.")
    return model


def _affine_map(norm: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return evaluation as ``A x + b``: ``A [g, C/g, C/g]`` and ``b [C]`` in float64."""
    if isinstance(norm, WhiteningNorm):
        try:
            return norm.affine_map()
        except InputError as error:
            raise InputError(f"{name!r}: {error}") from None
    scale = torch.rsqrt(norm.running_var.detach().double() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -scale * norm.running_mean.double()
    return scale.view(-1, 1, 1), shift if norm.bias is None else shift + norm.bias.detach().double()


@torch.no_grad()
def _fold(layer: Any, matrix: Tensor, shift: Tensor) -> bool:
    """Make ``layer`` compute ``A layer(x) + b``. Return False, and change nothing, if that would merge its groups."""
    groups = getattr(layer, "groups", 1)
    transposed = isinstance(layer, TRANSPOSED)
    weight = layer.weight.double().unflatten(0, (groups, -1))
    if transposed:
        weight = weight.transpose(1, 2)  # [groups, out, in, ...] of either kind
    if weight.shape[1] % matrix.shape[1]:
        return False
    blocks = torch.stack([torch.block_diag(*own) for own in matrix.unflatten(0, (groups, -1))])
    weight = (blocks @ weight.flatten(2)).view_as(weight)
    bias = shift
    if layer.bias is not None:
        bias = bias + (blocks @ layer.bias.double().view(groups, -1, 1)).flatten()
    if transposed:
        weight = weight.transpose(1, 2)
    old = layer.weight
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(old.dim())
    layout = torch.contiguous_format if last is None or old.is_contiguous() else last
    weight = weight.flatten(0, 1).to(old.dtype).contiguous(memory_format=layout)
    layer.weight = nn.Parameter(weight, old.requires_grad)
    layer.bias = nn.Parameter(bias.to(old.dtype), old.requires_grad)
    return True


@torch.no_grad()
def _pointwise(norm: WhiteningNorm, matrix: Tensor, shift: Tensor, dtype: torch.dtype) -> nn.Module:
    dtype = dtype if norm.weight is None else norm.weight.dtype
    rounded = matrix.to(dtype)
    # The bias that goes with the rounded matrix: with the exact one a large mean would leave an offset.
    mean = norm.get_buffer("running_mean").double().view(norm.num_groups, -1, 1)
    bias = (shift + ((matrix - rounded.double()) @ mean).flatten()).to(dtype)
    kinds: dict[tuple[int, ...], type[nn.Conv2d | nn.Conv3d]] = {(4,): nn.Conv2d, (5,): nn.Conv3d}
    if norm.input_dims not in kinds:
        layer: nn.Module = PointwiseConv(rounded, bias)
    else:
        like: dict[str, Any] = {"groups": norm.num_groups, "device": bias.device, "dtype": dtype}
        d = norm.num_features
        convolution = skip_init(kinds[norm.input_dims], d, d, 1, **like)  # drawing nothing from the random stream
        convolution.weight.copy_(rounded.reshape(convolution.weight.shape))
        convolution.bias.copy_(bias)
        layer = convolution
    layer.requires_grad_(any(parameter.requires_grad for parameter in norm.parameters()))
    move_hooks(norm, layer)
    return layer
