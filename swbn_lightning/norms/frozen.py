"""One layer that stays as it is, whatever mode it is put in."""

from torch import nn

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


def freeze(norm: nn.Module) -> None:
    """Let the layer evaluate from now on."""
    norm.__dict__[_TRAIN] = _StaysFrozen(norm)
    norm.training = False


def thaw(norm: nn.Module, training: bool) -> None:
    """Give the layer its own ``train`` back, and a mode."""
    if is_frozen(norm):
        del norm.__dict__[_TRAIN]
    norm.training = training


def is_frozen(norm: nn.Module) -> bool:
    """Whether :func:`freeze` has stopped this layer."""
    return isinstance(norm.__dict__.get(_TRAIN), _StaysFrozen)
