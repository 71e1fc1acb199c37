"""Wide ResNet for 32x32 images (Zagoruyko and Komodakis, BMVC 2016)."""

from torch import Tensor, nn

from swbn_lightning.backbones.base import Backbone, conv, initialize_he
from swbn_lightning.backbones.resnetv2 import PreActBasic
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms import NormFactory


class WideResNet(Backbone):
    """WRN-d-k: pre-activation basic blocks of widths 16k, 32k and 64k.

    It has d = 6n + 4 layers, counting the three projections. 32x32 gives 64k x 8 x 8. The initialisation is He's, by
    fan-in, as in the authors' public code.

    Args:
        norm: makes each normalisation layer.
        depth: 16, 22, 28, 34, 40, ...
        width: the widening factor k.
        in_channels: 3 for RGB, 1 for gray.
        drop_rate: dropout between the convolutions of a block; 0 for none. The accuracies that the paper quotes for BN
            (in its CIFAR tables) come from the authors' runs with 0.3.
    """

    min_image_size = 4

    def __init__(
        self, norm: NormFactory, depth: int = 28, width: int = 10, in_channels: int = 3, drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        require_positive("wrn", depth=depth, width=width)
        if depth < 10 or (depth - 4) % 6:
            raise InputError(f"wrn: a Wide ResNet has 6n + 4 layers (16, 22, 28, 34, 40, ...), got depth={depth}.")
        if not 0 <= drop_rate < 1:
            raise InputError(f"wrn: drop_rate must be in [0, 1), got {drop_rate}.")
        self.in_channels = in_channels
        self.stem = conv(in_channels, 16, 3)
        blocks: list[nn.Module] = []
        previous = 16
        for stage in range(3):
            out = 16 * width * 2**stage
            for index in range((depth - 4) // 6):
                stride = 2 if index == 0 and stage else 1
                blocks.append(PreActBasic(norm, previous, out, stride, drop_rate=drop_rate))
                previous = out
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Sequential(norm(previous), nn.ReLU(inplace=True))
        self.num_features = previous
        initialize_he(self, mode="fan_in")

    def forward_features(self, x: Tensor) -> Tensor:
        self.require_size(x)
        return self.last(self.blocks(self.stem(x)))
