"""Pre-activation ResNets (He et al., ECCV 2016, "Identity Mappings"): for 32x32 images and for ImageNet.

A residual unit repeats norm, ReLU and convolution two or three times; nothing comes after the addition. In a network's
first unit, and in every unit that changes the size, shortcut and residual share the first activation. One more norm and
ReLU follow the last unit. Projections have no norm.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from swbn_lightning.backbones.base import Backbone, conv, initialize_he
from swbn_lightning.errors import InputError, unknown_name
from swbn_lightning.norms import NormFactory

BLOCKS = ("basic", "bottleneck")


class PreActBasic(nn.Module):
    """Two 3x3 convolutions with dropout between; ``shared``: an identity shortcut starts from the activation."""

    def __init__(
        self,
        norm: NormFactory,
        in_channels: int,
        out_channels: int,
        stride: int = 1,
        shared: bool = False,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        projects = stride != 1 or in_channels != out_channels
        self.shared = shared or projects
        self.norm1, self.conv1 = norm(in_channels), conv(in_channels, out_channels, 3, stride)
        self.norm2, self.conv2 = norm(out_channels), conv(out_channels, out_channels, 3)
        self.dropout = nn.Dropout(drop_rate) if drop_rate else nn.Identity()
        self.shortcut = conv(in_channels, out_channels, 1, stride) if projects else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        shortcut = self.shortcut(active if self.shared else x)
        out = self.conv1(active)
        out = self.conv2(self.dropout(F.relu(self.norm2(out))))
        return out + shortcut


class PreActBottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution; the first two give a quarter of the output channels.

    Args:
        norm: makes each normalisation layer.
        in_channels: input channels.
        out_channels: output channels.
        stride: stride of the shortcut and of the 3x3 convolution, or of the first convolution with ``first``.
        shared: an identity shortcut starts from the first activation too, as a projection always does.
        active: the input is already activated, so no norm comes before the first convolution.
        first: the first convolution has the stride, not the 3x3.
    """

    def __init__(
        self,
        norm: NormFactory,
        in_channels: int,
        out_channels: int,
        stride: int = 1,
        shared: bool = False,
        active: bool = False,
        first: bool = True,
    ) -> None:
        super().__init__()
        width = out_channels // 4
        projects = stride != 1 or in_channels != out_channels
        self.shared = shared or projects
        self.norm1 = nn.Identity() if active else norm(in_channels)
        self.conv1 = conv(in_channels, width, 1, stride if first else 1)
        self.norm2, self.conv2 = norm(width), conv(width, width, 3, 1 if first else stride)
        self.norm3, self.conv3 = norm(width), conv(width, out_channels, 1)
        self.shortcut = conv(in_channels, out_channels, 1, stride) if projects else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))  # what comes activated stays as it is
        shortcut = self.shortcut(active if self.shared else x)
        out = self.conv1(active)
        out = self.conv2(F.relu(self.norm2(out)))
        out = self.conv3(F.relu(self.norm3(out)))
        return out + shortcut


class ResNetV2Cifar(Backbone):
    """Pre-activation ResNet for 32x32 images: 6n + 2 layers of basic blocks, or 9n + 2 of bottlenecks.

    32x32 gives 64x8x8 (basic) or 256x8x8 (bottleneck). A bottleneck's stride is in its first convolution, and the
    initialisation is He's by fan-out. Both follow the authors' public code (resnet-1k-layers).

    Args:
        norm: makes each normalisation layer.
        depth: 56 (as in the paper, section 4.2.1), 110, 164, ...
        block: ``"basic"`` or ``"bottleneck"``. The paper does not say which its 56 layers have (both fit). He et al.
            use basic blocks for such low depths.
        in_channels: 3 for RGB, 1 for gray.
    """

    min_image_size = 4

    def __init__(self, norm: NormFactory, depth: int = 56, block: str = "basic", in_channels: int = 3) -> None:
        super().__init__()
        if block not in BLOCKS:
            raise unknown_name("block of a pre-activation ResNet", block, BLOCKS)
        per_unit, make, expansion = (6, PreActBasic, 1) if block == "basic" else (9, PreActBottleneck, 4)
        if depth < per_unit + 2 or (depth - 2) % per_unit:
            raise InputError(f"a CIFAR ResNet of {block} blocks has {per_unit}n + 2 layers, got depth={depth}.")
        self.in_channels = in_channels
        self.stem = conv(in_channels, 16, 3)
        blocks: list[nn.Module] = []
        previous = 16
        for width in (16, 32, 64):
            for index in range((depth - 2) // per_unit):
                stride = 2 if index == 0 and width > 16 else 1
                blocks.append(make(norm, previous, width * expansion, stride, shared=not blocks))
                previous = width * expansion
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(norm(previous), nn.ReLU(inplace=True))
        self.num_features = previous
        initialize_he(self)

    def forward_features(self, x: Tensor) -> Tensor:
        self.require_size(x)
        return self.last(self.blocks(self.stem(x)))


class ResNetV2(Backbone):
    """Pre-activation ResNet for ImageNet: four stages of bottlenecks; 224x224 gives 2048x7x7.

    The first activation comes "right after conv1 and before splitting into two paths" (He et al., appendix). Here that
    is before the max-pooling, as in fb.resnet.torch, so the first unit has none of its own. A unit halves the size in
    its 3x3 convolution, and the initialisation is He's by fan-out, both as in fb.resnet.torch.

    Args:
        norm: makes each normalisation layer.
        layers: units per stage: (3, 4, 6, 3) for 50 layers, (3, 4, 23, 3) for 101.
        in_channels: 3 for RGB, 1 for gray.
    """

    min_image_size = 32

    def __init__(self, norm: NormFactory, layers: Sequence[int] = (3, 4, 6, 3), in_channels: int = 3) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.stem = nn.Sequential(
            conv(in_channels, 64, 7, stride=2), norm(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        )
        blocks: list[nn.Module] = []
        previous = 64
        for stage, count in enumerate(layers):
            out = 256 * 2**stage
            for index in range(count):
                stride = 2 if index == 0 and stage else 1
                blocks.append(PreActBottleneck(norm, previous, out, stride, active=not blocks, first=False))
                previous = out
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(norm(previous), nn.ReLU(inplace=True))
        self.num_features = previous
        initialize_he(self)

    def forward_features(self, x: Tensor) -> Tensor:
        self.require_size(x)
        return self.last(self.blocks(self.stem(x)))
