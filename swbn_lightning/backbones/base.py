"""What every backbone offers, and the blocks' common pieces."""

from torch import Tensor, nn


class Backbone(nn.Module):
    """Images ``[N, in_channels, H, W]`` to features.

    A subclass sets ``num_features`` (C) and ``in_channels`` and defines :meth:`forward_features`.
    """

    num_features: int
    in_channels: int

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map, ``[N, C, h, w]``."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """The map averaged over its positions, ``[N, C]``."""
        return self.forward_features(x).mean(dim=(2, 3))


def conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias (a normalisation follows) that keeps the size at stride 1."""
    return nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)


def initialize_fan_out(module: nn.Module, nonlinearity: str = "relu") -> None:
    """He initialisation by fan-out for every convolution, in order of definition.

    Normalisation layers draw no random numbers, so the same seed gives the same convolutions whatever
    the norm (section 4.1 of the paper compares networks that start from identical parameters).
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity=nonlinearity)  # type: ignore[arg-type]
