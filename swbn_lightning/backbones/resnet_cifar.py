"""ResNet for 32x32 images (He et al., CVPR 2016, section 4.2): 6n + 2 layers, widths 16, 32, 64."""

from torch import Tensor, nn
from torch.nn import functional as F

from swbn_lightning.backbones.base import Backbone, conv, initialize_fan_out
from swbn_lightning.errors import InputError, unknown_name
from swbn_lightning.norms import NormFactory

SHORTCUTS = ("projection", "identity")


class ResNetCifar(Backbone):
    """ResNet V1 of ``depth = 6n + 2`` layers; 32x32 gives 64x8x8.

    Args:
        norm: makes each normalisation layer, those of projection shortcuts too.
        depth: 20 (0.27 million parameters), 32, 44, ...
        in_channels: 3 for RGB, 1 for gray.
        shortcut: where the size changes: ``"projection"``, a 1x1 convolution and a norm, as in the paper's
            residual units (appendix E); or ``"identity"``, every second pixel padded with zero channels,
            without parameters (He et al.'s option A).
    """

    def __init__(self, norm: NormFactory, depth: int = 20, in_channels: int = 3, shortcut: str = "projection") -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise InputError(f"a CIFAR ResNet has 6n + 2 layers (20, 32, 44, 56, ...), got depth={depth}.")
        if shortcut not in SHORTCUTS:
            raise unknown_name("shortcut of a CIFAR ResNet", shortcut, SHORTCUTS)
        self.in_channels = in_channels
        self.num_features = 64
        self.stem = nn.Sequential(conv(in_channels, 16, 3), norm(16), nn.ReLU(inplace=True))
        blocks: list[nn.Module] = []
        previous = 16
        for width in (16, 32, 64):
            for index in range((depth - 2) // 6):
                stride = 2 if index == 0 and width > 16 else 1
                blocks.append(_Block(norm, previous, width, stride, shortcut))
                previous = width
        self.blocks = nn.Sequential(*blocks)
        initialize_fan_out(self)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x))


class _Block(nn.Module):
    def __init__(self, norm: NormFactory, in_channels: int, out_channels: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(in_channels, out_channels, 3, stride), norm(out_channels)
        self.conv2, self.norm2 = conv(out_channels, out_channels, 3), norm(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            if shortcut == "projection":
                self.shortcut = nn.Sequential(conv(in_channels, out_channels, 1, stride), norm(out_channels))
            else:
                self.shortcut = _PadChannels(out_channels - in_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class _PadChannels(nn.Module):
    """Option A: every ``stride``-th pixel, new channels zero, half of them on either side."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.channels, self.stride = channels, stride

    def forward(self, x: Tensor) -> Tensor:
        before = self.channels // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.channels - before))
