"""Any classification network of torchvision or timm by name, with its BatchNorm layers converted."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from swbn_lightning.backbones.base import Backbone
from swbn_lightning.errors import InputError
from swbn_lightning.norms import NormFactory, convert_norms

_CLASSES = 1000  # outputs of the classifier that is taken off; what the ImageNet weights have
_DECIDED = ("num_classes", "in_chans", "pretrained", "weights", "progress")  # by options of the classes below
# Arguments of timm's that read files or addresses of one's choice, which a checkpoint's model_args must not say.
_FILES = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
_OLDEST_TIMM = (1, 0, 26)  # before, it loads pickles that may run code (weights_only=False)


class LibraryBackbone(Backbone):
    """A network of another package without its last linear layer; its features are that layer's input.

    The norms are replaced by :func:`~swbn_lightning.convert_norms`. Only with norm ``"bn"`` and no options does the
    network stay as it is.

    Args:
        norm: makes the layers that replace BatchNorm.
        model: the network's name in its package.
        in_channels: 3 for RGB, 1 for gray.
        pretrained: start from the package's ImageNet weights, downloaded unless they are in its cache.
        include: names of the BatchNorm layers to convert.
        exclude: names of those to leave, such as ``"*downsample*"`` for the projection shortcuts of a ResNet.
        model_args: further arguments of the network's constructor.

    Raises:
        InputError: an unknown network (the message has the nearest names) or argument; unavailable weights; a network
            without BatchNorm, unless the norm is ``"bn"``.
    """

    package: str

    def __init__(
        self,
        norm: NormFactory,
        model: str,
        in_channels: int = 3,
        pretrained: bool = False,
        include: str | Sequence[str] = ("*",),
        exclude: str | Sequence[str] = (),
        model_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.name = f"{self.package}/{model}"
        self.in_channels = in_channels
        arguments = dict(model_args or {})
        for argument in arguments:
            if argument in (*_DECIDED, *_FILES):
                raise InputError(
                    f"{self.name}: model_args must not have {argument!r}; see in_channels and pretrained. Weights of "
                    "one's own come in by backbone_checkpoint, or in Python by load_state_dict."
                )
        network, self.num_features = self.build(model, arguments, pretrained)
        if norm.name != "bn" or norm.options or exclude or include not in (("*",), ["*"], "*"):
            network = convert_norms(network, norm, include, exclude)
        self.network = network

    def build(self, model: str, arguments: dict[str, Any], pretrained: bool) -> tuple[nn.Module, int]:
        """Return the network without its classifier, for ``self.in_channels``, and its number of features."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return features ``[N, C]``."""
        return self.network(x)

    def no_map(self, reason: str) -> InputError:
        """Return the error for features that are not the average of a map with as many channels."""
        return InputError(f"{self.name} has no feature map [N, {self.num_features}, h, w]: {reason}.")

    @torch.no_grad()
    def check_image_size(self, height: int, width: int) -> None:
        """Raise :class:`InputError` if the network fails on a (black) image of this size."""
        modes = [(module, module.training) for module in self.network.modules()]
        like = next(self.network.parameters())
        image = torch.zeros(1, self.in_channels, height, width, device=like.device, dtype=like.dtype)
        try:
            shape = list(self.network.eval()(image).shape)
        except Exception as error:  # a network may fail in any way
            raise InputError(f"{self.name} cannot take images of {height}x{width} pixels: {error}") from error
        finally:
            for module, training in modes:
                module.training = training
        if shape != [1, self.num_features]:
            raise InputError(f"{self.name} gives {shape} for one image, not the one vector that a classifier needs.")

    def not_made(self, arguments: dict[str, Any], pretrained: bool, error: Exception) -> InputError:
        """Return the error for a constructor that failed; it may fail in any way, and may also download."""
        how = [*(["its pretrained weights"] if pretrained else []), *([f"model_args {arguments}"] if arguments else [])]
        return InputError(f"{self.name} cannot be made{' with ' if how else ''}{' and '.join(how)}: {error}")

    def unknown(self, model: str, known: Iterable[str]) -> InputError:
        """Return the error for a name that the package does not have."""
        names = list(known)
        near = difflib.get_close_matches(model.lower(), names, n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(map(repr, near))}? " if near else ""
        return InputError(f"unknown {self.package} model {model!r}; {hint}{self.package} has {len(names)}.")


class TorchvisionBackbone(LibraryBackbone):
    """``torchvision/<model>``: any of torchvision's classification networks; arguments as in :class:`LibraryBackbone`.

    With ``in_channels=1``, the weights of the first convolution are summed over the three colours. The network then
    gives what the colour network gives for the same gray in all three. Auxiliary classifiers (GoogLeNet, Inception) are
    removed.
    """

    package = "torchvision"

    def build(self, model: str, arguments: dict[str, Any], pretrained: bool) -> tuple[nn.Module, int]:
        from torchvision import models

        known = models.list_models(module=models)
        if model not in known:
            raise self.unknown(model, known)
        weights = models.get_model_weights(model)["DEFAULT"] if pretrained else None
        if weights is None and model in ("googlenet", "inception_v3"):
            arguments.setdefault("init_weights", True)  # their default, which they warn of
        try:
            network = models.get_model(model, weights=weights, **arguments)
        except OSError as error:
            if weights is None:
                raise
            place = Path(torch.hub.get_dir(), "checkpoints", Path(weights.url).name)
            raise InputError(
                f"{self.name}: the pretrained weights cannot be downloaded ({error}): put {weights.url} at {place}, or "
                "leave out pretrained."
            ) from error
        except Exception as error:
            raise self.not_made(arguments, pretrained, error) from error
        if isinstance(network, models.GoogLeNet | models.Inception3):
            network.aux_logits = False
            for name in {"aux1", "aux2", "AuxLogits"} & {name for name, _ in network.named_children()}:
                setattr(network, name, None)
        if self.in_channels != 3:
            _make_gray(network, self.in_channels, self.name)
        return network, _cut_classifier(network, self.name)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return what the network averages over its positions last, ``[N, C, h, w]``."""
        averaged: list[Tensor] = []
        with _Averaged(averaged):
            self.network(x)
        if not averaged:
            raise self.no_map("it averages none")
        if averaged[-1].shape[1] != self.num_features:
            raise self.no_map(f"it has layers between its map of {averaged[-1].shape[1]} channels and its features")
        return averaged[-1]


class TimmBackbone(LibraryBackbone):
    """``timm/<model>``: any of timm's networks.

    The name may have a tag for weights: ``resnet26`` or ``resnet26.bt_in1k``. Arguments as in :class:`LibraryBackbone`.
    """

    package = "timm"

    def build(self, model: str, arguments: dict[str, Any], pretrained: bool) -> tuple[nn.Module, int]:
        try:
            import timm
        except ImportError as error:
            raise InputError(f"{self.name} needs the package timm ({error}): pip install timm") from error
        if tuple(int(part) for part in re.findall(r"\d+", timm.__version__)[:3]) < _OLDEST_TIMM:
            oldest = ".".join(map(str, _OLDEST_TIMM))
            raise InputError(
                f"{self.name}: timm {timm.__version__} loads weights that may run code; pip install 'timm>={oldest}'"
            )
        if not timm.is_model(model):
            raise self.unknown(model, timm.list_models())
        try:
            network = timm.create_model(
                model, pretrained=pretrained, num_classes=0, in_chans=self.in_channels, **arguments
            )
        except Exception as error:
            raise self.not_made(arguments, pretrained, error) from error
        width: Any = network.num_features
        return network, getattr(network, "head_hidden_size", width)  # where layers follow the last map

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last map of timm's own ``forward_features``, ``[N, C, h, w]``."""
        found = self.network.forward_features(x)  # type: ignore[operator]
        if not isinstance(found, Tensor) or found.dim() != 4:
            raise self.no_map("it gives tokens")
        if found.shape[1] != self.num_features and found.shape[3] == self.num_features:
            found = found.permute(0, 3, 1, 2)
        if found.shape[1] != self.num_features:
            raise self.no_map(f"it has layers between its map {list(found.shape)} and its features")
        return found


class _Averaged(TorchFunctionMode):
    """Record every map that is averaged over its positions; torchvision's networks use a layer or a call for it."""

    def __init__(self, maps: list[Tensor]) -> None:
        super().__init__()
        self.maps = maps

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.adaptive_avg_pool2d:
            self.maps.append(args[0])
        elif func in (Tensor.mean, torch.mean):
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if args[0].dim() == 4 and dims in ([2, 3], (2, 3), [-2, -1], (-2, -1)):
                self.maps.append(args[0])
        return func(*args, **kwargs)


def _make_gray(network: nn.Module, in_channels: int, name: str) -> None:
    """Make the first convolution take one channel."""
    first = next((m for m in network.modules() if isinstance(m, nn.Conv2d)), None)
    if in_channels != 1 or first is None or first.in_channels != 3 or getattr(network, "transform_input", False):
        raise InputError(f"{name} cannot be made for in_channels={in_channels}; 3 will do, and 1 for most networks.")
    first.in_channels = 1
    first.weight = nn.Parameter(first.weight.detach().sum(1, keepdim=True))


def _cut_classifier(network: nn.Module, name: str) -> int:
    """Replace the last layer with weights by an identity; return the number of its inputs."""
    layers = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    place, last = layers[-1]
    outputs, inputs = (
        (last.out_features, last.in_features)
        if isinstance(last, nn.Linear)
        else (last.out_channels, last.in_channels)  # SqueezeNet's
    )
    if outputs != _CLASSES:
        raise InputError(f"{name}: its last layer {place!r} has {outputs} outputs, so it is not the classifier.")
    network.set_submodule(place, nn.Identity())
    return inputs
