"""Normalisation layers gone at inference: folded into the layer before, or one 1x1 convolution each."""

import copy
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from swbn_lightning.errors import InputError
from swbn_lightning.norms import functional as WF
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.replace import HOOKS, move_hooks, replace_modules

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Exactly these: a subclass (a parametrised one, too) may use its weight in another way.
_FOLDABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# What changes nothing in evaluation may stand between the two.
_TRANSPARENT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@dataclass(frozen=True)
class FusionReport:
    """What :func:`fuse_norms` did, by module names."""

    folded: dict[str, str]
    """Normalisation layer to the layer that it went into."""
    convolutions: tuple[str, ...]
    """Layers that became a 1x1 convolution."""
    kept: tuple[str, ...]
    """BatchNorm layers with nothing before them to fold into, left as they are."""

    def __str__(self) -> str:
        text = f"{len(self.folded)} folded into the layer before, {len(self.convolutions)} left as a 1x1 convolution"
        return f"{text}, {len(self.kept)} BatchNorm kept" if self.kept else text


def fuse_norms(model: nn.Module) -> nn.Module:
    """A copy of ``model`` for inference, without the whitening layers; it computes the same.

    In evaluation a whitening layer (as BatchNorm) is one affine map. Where a convolution (grouped, dilated, strided,
    transposed, with any padding) or linear layer comes directly before it and feeds nothing else, the map is folded
    into that layer, in float64. Where none does (after an addition, say), and where the fold would merge the groups
    of a grouped convolution at greater cost than a 1x1 convolution behind it, the layer becomes a 1x1 convolution.
    BatchNorm layers are folded too where they can be, and kept otherwise.

    What feeds what is found by :mod:`torch.fx`; parts of a network that it cannot trace (control flow that depends
    on values) are looked at child by child, so that layers of different children are not folded into each other.
    It is taken for granted that such a part does not reach into a child to use one of the child's layers alone.

    Args:
        model: any network, in either mode; it stays as it is.

    Returns:
        A new module in evaluation mode with the same structure and the attribute ``fusion_report``, a
        :class:`FusionReport`: ``print(fused.fusion_report)`` says how many of each.

    Raises:
        InputError: a whitening layer without running statistics, or a lazy layer that has seen no input yet.
    """
    _refuse_lazy(model)
    fused = copy.deepcopy(model).eval()
    names = {module: name for name, module in fused.named_modules()}
    dtype = next((p.dtype for p in fused.parameters() if p.is_floating_point()), torch.get_default_dtype())
    before = _layers_before(model)
    chosen: dict[nn.Module, nn.Module] = {}
    folded: dict[str, str] = {}
    convolutions, kept = [], []
    for norm, name in names.items():
        if not _is_norm(norm):
            continue
        layer = fused.get_submodule(before[name]) if name in before else None
        if isinstance(norm, WhiteningNorm) or (layer is not None and norm.track_running_stats):
            matrix, shift = _affine_map(norm, name)
        if layer is not None and norm.track_running_stats and _fold(layer, matrix, shift):
            chosen[norm] = _AfterLinear() if isinstance(layer, nn.Linear) else nn.Identity()
            folded[name] = before[name]
        elif isinstance(norm, WhiteningNorm):
            chosen[norm] = _pointwise(norm, matrix, shift, dtype)
            convolutions.append(name)
        else:
            kept.append(name)
    fused = replace_modules(fused, chosen).eval()
    fused.fusion_report = FusionReport(folded, tuple(convolutions), tuple(kept))  # type: ignore[assignment]
    return fused


class PointwiseConv(nn.Module):
    """A 1x1 convolution for ``[N, C]`` and ``[N, C, ...]`` alike, which no class of PyTorch is.

    Args:
        matrix: ``[g, C/g, C/g]``, one block a group of channels.
        bias: ``[C]``.
    """

    def __init__(self, matrix: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix)
        self.bias = nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return WF.whiten(x, self.weight, None, self.bias)


class _AfterLinear(nn.Identity):
    """In the place of a norm that went into a linear layer, whose channels are its input's *last* dimension."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 2:
            raise ValueError(
                f"expected 2D input (got {input.dim()}D input): the normalisation here was over dimension 1, and was "
                "folded into a linear layer over the last one"
            )
        return input


def _is_norm(module: nn.Module) -> Any:
    return isinstance(module, WhiteningNorm) or type(module) in _BATCH_NORMS


def _refuse_lazy(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise InputError(f"{name!r} ({type(module).__name__}) has seen no input yet; run the network once first.")


def _affine_map(norm: Any, name: str) -> tuple[Tensor, Tensor]:
    """Evaluation as ``A x + b``: ``A [g, C/g, C/g]`` and ``b [C]`` in float64."""
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
    """Let ``layer`` give ``A layer(x) + b``; False, and nothing done, where a 1x1 convolution is cheaper."""
    groups = getattr(layer, "groups", 1)
    transposed = isinstance(layer, _TRANSPOSED)
    weight = layer.weight.double().unflatten(0, (groups, -1))
    if transposed:
        weight = weight.transpose(1, 2)  # [groups, out, in, ...] of either kind
    out, width = weight.shape[1], matrix.shape[1]
    channels = len(shift)
    # Groups of the folded layer: as many as respect both the layer's and the norm's.
    new_groups = channels // math.lcm(out, width)
    merged = groups // new_groups
    positions = math.prod(layer.stride) if transposed else 1  # output positions an input position
    if weight.numel() * merged > weight.numel() + matrix.numel() * positions:
        return False
    blocks = _block_diagonal(matrix.unflatten(0, (new_groups, -1)))
    weight = _block_diagonal(weight.unflatten(0, (new_groups, merged)))
    weight = (blocks @ weight.flatten(2)).view_as(weight)
    bias = shift
    if layer.bias is not None:
        bias = bias + (blocks @ layer.bias.double().view(new_groups, -1, 1)).flatten()
    if transposed:
        weight = weight.transpose(1, 2)
    old = layer.weight
    layout = torch.channels_last if old.dim() == 4 and not old.is_contiguous() else torch.contiguous_format
    weight = weight.flatten(0, 1).to(old.dtype).contiguous(memory_format=layout)
    layer.weight = nn.Parameter(weight, old.requires_grad)
    layer.bias = nn.Parameter(bias.to(old.dtype), old.requires_grad)
    if groups != new_groups:
        layer.groups = new_groups
    return True


def _block_diagonal(blocks: Tensor) -> Tensor:
    """``[g, r, a, b, ...]`` to ``[g, r a, r b, ...]``: the ``r`` blocks along a diagonal."""
    g, r, a, b, *rest = blocks.shape
    result = blocks.new_zeros(g, r, a, r, b, *rest)
    for i in range(r):
        result[:, i, :, i] = blocks[:, i]
    return result.view(g, r * a, r * b, *rest)


@torch.no_grad()
def _pointwise(norm: WhiteningNorm, matrix: Tensor, shift: Tensor, dtype: torch.dtype) -> nn.Module:
    dtype = dtype if norm.weight is None else norm.weight.dtype
    kinds = {(4,): nn.Conv2d, (5,): nn.Conv3d}
    if norm.input_dims not in kinds:
        layer: nn.Module = PointwiseConv(matrix.to(dtype), shift.to(dtype))
    else:
        like: dict[str, Any] = {"groups": norm.num_groups, "device": shift.device, "dtype": dtype}
        convolution = kinds[norm.input_dims](norm.num_features, norm.num_features, 1, **like)
        convolution.weight.copy_(matrix.reshape(convolution.weight.shape))
        assert convolution.bias is not None
        convolution.bias.copy_(shift)
        layer = convolution
    move_hooks(norm, layer)
    return layer


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaves = (WhiteningNorm, _BatchNorm, *_FOLDABLE)
        return isinstance(m, leaves) or super().is_leaf_module(m, module_qualified_name)


def _layers_before(model: nn.Module) -> dict[str, str]:
    """Name of a norm to that of the layer whose output is used by this norm alone, and it by nothing else."""
    # The structure is copied (tracing may leave things in it), the tensors are not.
    tensors: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, tensors).eval()
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    # What each norm was seen to follow, and each layer to feed; None for anything else than the other kind.
    follows: dict[nn.Module, set[nn.Module | None]] = {}
    feeds: dict[nn.Module, set[nn.Module | None]] = {}
    traced_whole = _observe(model, follows, feeds)
    found = {}
    for norm, layers in follows.items():
        layer = next(iter(layers))
        if layer is None or layers != {layer} or feeds[layer] != {norm} or _has_hooks(norm) or _has_hooks(layer):
            continue
        if traced_whole or len(names[norm]) == len(names[layer]) == 1:
            found[names[norm][0]] = names[layer][0]
    return found


def _observe(module: nn.Module, follows: dict[nn.Module, set], feeds: dict[nn.Module, set]) -> bool:
    graphs = list(_graphs(module))
    for graph in graphs:
        _read(graph, module, follows, feeds)
    if not graphs:
        for child in module.children():
            _observe(child, follows, feeds)
    return bool(graphs)


def _graphs(module: nn.Module) -> Iterator[fx.Graph]:
    """What a forward does: with optional arguments given, and with them left out, as far as each can be traced."""
    optional = {
        name: parameter.default
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.default is not parameter.empty
    }
    for given in ({}, optional) if optional else ({},):
        try:
            yield _Tracer().trace(module, concrete_args=given or None)
        except Exception:  # a forward may do anything with what stands for its input
            continue


def _read(graph: fx.Graph, module: nn.Module, follows: dict[nn.Module, set], feeds: dict[nn.Module, set]) -> None:
    called = {node: module.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    for node, submodule in called.items():
        if _is_norm(submodule):
            follows.setdefault(submodule, set()).add(_source(node, called))
        elif type(submodule) in _FOLDABLE:
            feeds.setdefault(submodule, set()).add(_only_user(node, called))
    for node in graph.nodes:
        if node.op == "get_attr":  # somebody uses a layer's weight by itself
            owner = module.get_submodule(str(node.target).rpartition(".")[0])
            feeds.setdefault(owner, set()).add(None)


def _source(node: fx.Node, called: dict[fx.Node, nn.Module]) -> nn.Module | None:
    """The foldable layer that a norm's input comes from."""
    source = node.args[0] if node.args else None
    while isinstance(source, fx.Node) and isinstance(called.get(source), _TRANSPARENT):
        source = source.args[0] if source.args else None
    found = called.get(source) if isinstance(source, fx.Node) else None
    return found if type(found) in _FOLDABLE else None


def _only_user(node: fx.Node, called: dict[fx.Node, nn.Module]) -> nn.Module | None:
    """The norm that alone uses a layer's output."""
    while len(node.users) == 1:
        node = next(iter(node.users))
        found = called.get(node)
        if found is not None and _is_norm(found):
            return found
        if not isinstance(found, _TRANSPARENT):
            return None
    return None


def _has_hooks(module: nn.Module) -> bool:
    return any(module.__dict__[name] for name in HOOKS)
