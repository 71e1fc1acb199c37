"""ResNet V1 (He et al., CVPR 2016) and ResNeXt (Xie et al., CVPR 2017) for ImageNet."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from swbn_lightning.backbones.base import Backbone, conv, initialize_he
from swbn_lightning.errors import unknown_name
from swbn_lightning.norms import NormFactory

PLACEMENTS = ("all", "imagenet")


class ResNet(Backbone):
    """Four stages of bottlenecks; 224x224 gives 2048x7x7.

    It matches torchvision's network without ``fc``, module by module. A unit halves the size in its 3x3 convolution, as
    in ResNeXt, fb.resnet.torch and torchvision, so weights and accuracies are comparable. He et al. halve it in the
    first 1x1. The initialisation is He's, by fan-out, as in those three.

    Args:
        norm: makes the normalisation layers.
        layers: units per stage: (3, 4, 6, 3) for 50 layers, (3, 4, 23, 3) for 101.
        groups: groups of the 3x3 convolutions; 1 for ResNet, 32 for ResNeXt 32x4d.
        group_width: channels per group in the first stage; 64 for ResNet, 4 for ResNeXt 32x4d.
        in_channels: 3 for RGB, 1 for gray.
        placement: ``"all"``: the norm everywhere, as in the paper's ResNeXt. ``"imagenet"``: as in the paper's
            ResNet-50 (section 4.2.2, after IterNorm's): the norm of the first layer, and an extra one on the pooled
            features before the last linear layer; all others are BatchNorm.
    """

    min_image_size = 32

    def __init__(
        self,
        norm: NormFactory,
        layers: Sequence[int] = (3, 4, 6, 3),
        groups: int = 1,
        group_width: int = 64,
        in_channels: int = 3,
        placement: str = "all",
    ) -> None:
        super().__init__()
        if placement not in PLACEMENTS:
            raise unknown_name("placement of the norms in a ResNet", placement, PLACEMENTS)
        inner = norm if placement == "all" else NormFactory("bn")
        self.in_channels = in_channels
        self.stem = nn.Sequential(
            conv(in_channels, 64, 7, stride=2), norm(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        )
        blocks: list[nn.Module] = []
        previous = 64
        for stage, count in enumerate(layers):
            width, out = groups * group_width * 2**stage, 256 * 2**stage
            for index in range(count):
                stride = 2 if index == 0 and stage else 1
                blocks.append(_Bottleneck(inner, previous, width, out, stride, groups))
                previous = out
        self.blocks = nn.Sequential(*blocks)
        self.pooled_norm = norm(previous, ndim=1) if placement == "imagenet" else nn.Identity()
        self.num_features = previous
        initialize_he(self)

    def forward_features(self, x: Tensor) -> Tensor:
        self.require_size(x)
        return self.blocks(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return the pooled map, ``[N, C]``; with placement ``"imagenet"`` it is normalised once more."""
        return self.pooled_norm(super().forward(x))


class _Bottleneck(nn.Module):
    def __init__(
        self,
        norm: NormFactory,
        in_channels: int,
        width: int,
        out_channels: int,
        stride: int,
        groups: int,
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(in_channels, width, 1), norm(width)
        self.conv2, self.norm2 = conv(width, width, 3, stride, groups), norm(width)
        self.conv3, self.norm3 = conv(width, out_channels, 1), norm(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(conv(in_channels, out_channels, 1, stride), norm(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = F.relu(self.norm2(self.conv2(out)))
        return F.relu(self.norm3(self.conv3(out)) + self.shortcut(x))
