"""Find the layer directly before each normalisation, for fusing."""

import copy
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.surgery.replace import HOOKS
from swbn_lightning.norms.torch_internals import tree_leaves

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Exactly these: a subclass (a parametrised one, too) may use its weight in another way.
FOLDABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# What changes nothing in evaluation may stand between the two.
_TRANSPARENT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
# Whoever holds one of these may also run its parts by themselves, as `for layer in self.features`.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MOST_VARIANTS = 16
_GIVEN = object()  # an optional argument that a caller gives, whatever it is


@dataclass
class Dataflow:
    """The result of tracing a network."""

    before: dict[str, str] = field(default_factory=dict)
    """Maps a norm to the layer before it, if only the norm uses that layer's output and the norm uses nothing else."""
    read: set[str] = field(default_factory=set)
    """Norms with parameters that are used outside their own forward."""
    untraced: tuple[str, ...] = ()
    """Modules that could not be traced; their children were examined one by one."""


def is_norm(module: nn.Module) -> bool:
    """Return whether a module can be folded: a whitening layer, or exactly PyTorch's BatchNorm."""
    return isinstance(module, WhiteningNorm) or type(module) in _BATCH_NORMS


def find_dataflow(model: nn.Module, leaves: tuple[type[nn.Module], ...] = ()) -> Dataflow:
    """Trace ``model`` in evaluation with :mod:`torch.fx`, part by part if the whole fails; not into ``leaves``."""
    # Tracing runs what a forward does to its module: on a copy. Parameters are shared, being large and constant.
    model = copy.deepcopy(model, {id(p): p for p in model.parameters()}).eval()
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    seen = _Observer(leaves)
    seen.observe(model)
    flow = Dataflow(
        read={names[norm][0] for norm in seen.read}, untraced=tuple(names[m][0] or "(the model)" for m in seen.untraced)
    )
    for norm, sources in seen.follows.items():
        (layer, *others) = sources
        alone = layer is not None and not others and seen.feeds[layer] == {norm}
        # Of a module with two names, the second use may be where nothing could be traced.
        known = not seen.untraced or (layer is not None and len(names[norm]) == len(names[layer]) == 1)
        if layer is not None and alone and known and not is_altered(norm):
            flow.before[names[norm][0]] = names[layer][0]
    return flow


def is_altered(module: nn.Module) -> bool:
    """Return whether calling the module does more than its class says: hooks, or a forward on the instance."""
    return "forward" in module.__dict__ or any(module.__dict__[name] for name in HOOKS)


class _Observer:
    def __init__(self, leaves: tuple[type[nn.Module], ...]) -> None:
        self.leaves = (WhiteningNorm, _BatchNorm, *FOLDABLE, *leaves)
        # What each norm was seen to follow and each layer to feed; None for anything else than the other kind.
        self.follows: dict[nn.Module, set[nn.Module | None]] = {}
        self.feeds: dict[nn.Module, set[nn.Module | None]] = {}
        self.read: set[nn.Module] = set()
        self.untraced: list[nn.Module] = []

    def observe(self, module: nn.Module) -> None:
        """Follow every path through the module's forward; child by child if one of them cannot be traced."""
        if isinstance(module, self.leaves):
            return  # by itself, where its parent could not be traced: it follows and feeds nothing known
        graphs = list(self._graphs(module))
        if graphs and None not in graphs:
            for graph in graphs:
                self._read(graph, module)
            return
        self.untraced.append(module)
        for child in module.children():
            for part in _parts(child):
                self.observe(part)

    def _graphs(self, module: nn.Module) -> Iterator[tuple[fx.Graph, set[fx.Node]] | None]:
        """Yield graphs of the forward, each with the nodes whose value it leaves in a module; None for one that fails.

        A flag is traced both ways, and another optional argument both given and left out.
        """
        if "forward" in module.__dict__:  # torch.fx would trace the class's
            yield None
            return
        choices: dict[str, tuple[Any, ...]] = {}
        for name, parameter in inspect.signature(module.forward).parameters.items():
            if isinstance(parameter.default, bool):
                choices[name] = (True, False)
            elif parameter.default is not parameter.empty:
                choices[name] = (_GIVEN, parameter.default)
        if math.prod(map(len, choices.values())) > _MOST_VARIANTS:
            yield None
            return
        for values in itertools.product(*choices.values()):
            tracer = _Tracer(self.leaves)
            try:
                given = dict(zip(choices, values, strict=True))
                graph = tracer.trace(module, {k: v for k, v in given.items() if v is not _GIVEN} or None)
            except Exception:  # a forward may do anything with what stands for its input
                yield None
                return
            yield graph, _left_behind(module)

    def _read(self, traced: Any, module: nn.Module) -> None:
        graph, left = traced
        called = {node: module.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"}
        for node, submodule in called.items():
            if is_norm(submodule):
                self.follows.setdefault(submodule, set()).add(_source(node, called))
            elif isinstance(submodule, FOLDABLE):
                self.feeds.setdefault(submodule, set()).add(_only_user(node, called, left))
            elif not isinstance(submodule, self.leaves) and is_altered(submodule):
                for part in _parts(submodule):
                    self.observe(part)
        for node in graph.nodes:
            if node.op == "get_attr":  # somebody uses a parameter or buffer by itself
                owner = module.get_submodule(str(node.target).rpartition(".")[0])
                self.feeds.setdefault(owner, set()).add(None)
                if is_norm(owner):
                    self.read.add(owner)


class _Tracer(fx.Tracer):
    def __init__(self, leaves: tuple[type[nn.Module], ...]) -> None:
        super().__init__()
        self.leaves = leaves

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # What has hooks is looked into by itself: they must not run on what stands for an input.
        altered = any(m.__dict__[name] for name in HOOKS)
        return altered or isinstance(m, self.leaves) or super().is_leaf_module(m, module_qualified_name)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module, or the contents of a container that its parent may take apart."""
    if not isinstance(module, _CONTAINERS):
        yield module
        return
    for child in module.children():
        yield from _parts(child)


def _left_behind(module: nn.Module) -> set[fx.Node]:
    """Return the nodes of values that a forward has stored in the module (``self.features = x``)."""
    values = tree_leaves([list(part.__dict__.values()) for part in module.modules()])
    return {value.node for value in values if isinstance(value, fx.Proxy)}


def _is_transparent(module: nn.Module | None) -> bool:
    return module is not None and isinstance(module, _TRANSPARENT) and not is_altered(module)


def _source(node: fx.Node, called: dict[fx.Node, nn.Module]) -> nn.Module | None:
    """Return the foldable layer that a norm's input comes from."""
    source = node.args[0] if node.args else None
    while isinstance(source, fx.Node) and _is_transparent(called.get(source)):
        source = source.args[0] if source.args else None
    found = called.get(source) if isinstance(source, fx.Node) else None
    return found if found is not None and type(found) in FOLDABLE and not is_altered(found) else None


def _only_user(node: fx.Node, called: dict[fx.Node, nn.Module], left: set[fx.Node]) -> nn.Module | None:
    """Return the norm that is the only user of a layer's output."""
    while len(node.users) == 1 and node not in left:
        node = next(iter(node.users))
        found = called.get(node)
        if found is not None and is_norm(found):
            return found
        if not _is_transparent(found):
            return None
    return None
