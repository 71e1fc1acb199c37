"""Modules that replace a single layer in a converted network."""

from typing import Any

from torch import nn


class _Sequential(nn.Sequential):
    _moved_into = ""  # the child that has the parameters of the layer which stood here alone

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in list(state_dict):
            if key.startswith(prefix) and key[len(prefix) :].partition(".")[0] not in self._modules:
                state_dict[f"{prefix}{self._moved_into}.{key[len(prefix) :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


class AppendedNorm(_Sequential):
    """A layer with one more normalisation before it: ``norm``, then ``layer``.

    It also loads a state dict with the layer's original parameter names (``fc.weight``).
    """

    _moved_into = "layer"

    def __init__(self, norm: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.layer = layer
        self.training = layer.training


class NormAct(_Sequential):
    """A normalisation with what timm's ``BatchNormAct2d`` does after it: ``norm``, ``drop``, ``act``.

    It also loads the state dict of the layer that it replaces (``bn1.weight``).
    """

    _moved_into = "norm"

    def __init__(self, norm: nn.Module, drop: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.drop = drop
        self.act = act
