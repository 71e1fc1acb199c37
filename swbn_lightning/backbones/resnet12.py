"""ResNet-12, the few-shot backbone: four residual blocks of three 3x3 convolutions, in two forms.

==============  =============================  ==========================================
form            ``"can"`` (the default)        ``"metaoptnet"``
==============  =============================  ==========================================
source          Hou et al., NeurIPS 2019       Lee et al., CVPR 2019
widths          64, 128, 256, 512              64, 160, 320, 640
stem            3x3 convolution, norm, ReLU    none
activation      ReLU                           LeakyReLU 0.1
halving         stride 2 in the second conv.   2x2 max-pooling after the block
regularisation  none                           dropout (blocks 1, 2), DropBlock (3, 4)
84x84 gives     512x6x6                        640x5x5
parameters      8.0 M                          12.4 M
==============  =============================  ==========================================

The features are the mean of the last map, as in LibFewShot. MetaOptNet's own code flattens it: 16,000 values for 84x84.
"""

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import DropBlock2d, drop_block2d

from swbn_lightning.backbones.base import Backbone, conv, initialize_he
from swbn_lightning.errors import InputError, require_positive, unknown_name
from swbn_lightning.norms import NormFactory

FORMS = ("can", "metaoptnet")


class ResNet12(Backbone):
    """ResNet-12 in CAN's or MetaOptNet's form; the table above compares them.

    Args:
        norm: makes each normalisation layer, also in the shortcuts.
        in_channels: 3 for RGB, 1 for gray.
        form: ``"can"`` or ``"metaoptnet"``.
        drop_rate: rate of dropout and DropBlock, only for MetaOptNet's form; 0 (the default) for none. Its public code
            uses 0.1, and raises DropBlock's rate to it over the first 40,000 steps; here the rate is constant.
        drop_block_size: side of the square that DropBlock removes, an odd number; 5 as in the public code for 84x84
            pixels (2 for 32x32). On a smaller map, the largest odd side that fits.
    """

    min_image_size = 16

    def __init__(
        self,
        norm: NormFactory,
        in_channels: int = 3,
        form: str = "can",
        drop_rate: float = 0.0,
        drop_block_size: int = 5,
    ) -> None:
        super().__init__()
        if form not in FORMS:
            raise unknown_name("form of resnet12", form, FORMS)
        if drop_rate and form == "can":
            raise InputError("resnet12: drop_rate belongs to form 'metaoptnet'; form 'can' has no dropout.")
        require_positive("resnet12", drop_block_size=drop_block_size)
        if drop_block_size % 2 == 0:
            raise InputError(f"resnet12: drop_block_size must be odd, got {drop_block_size}.")
        if not 0 <= drop_rate < 1:
            raise InputError(f"resnet12: drop_rate must be in [0, 1), got {drop_rate}.")
        self.in_channels = in_channels
        if form == "can":
            widths = (64, 128, 256, 512)
            self.stem: nn.Module = nn.Sequential(conv(in_channels, 64, 3), norm(64), nn.ReLU(inplace=True))
            previous = 64
        else:
            widths = (64, 160, 320, 640)
            self.stem = nn.Identity()
            previous = in_channels
        blocks: list[nn.Module] = []
        for index, width in enumerate(widths):
            if form == "can":
                blocks.append(_Block(norm, previous, width, stride=2))
            else:
                blocks.append(_Block(norm, previous, width, slope=0.1, pool=True))
                if drop_rate:
                    blocks.append(_DropBlock(drop_rate, drop_block_size) if index >= 2 else nn.Dropout(drop_rate))
            previous = width
        self.blocks = nn.Sequential(*blocks)
        self.num_features = widths[-1]
        initialize_he(self, nonlinearity="relu" if form == "can" else "leaky_relu")

    def forward_features(self, x: Tensor) -> Tensor:
        self.require_size(x)
        return self.blocks(self.stem(x))


class _DropBlock(DropBlock2d):
    """torchvision's, which fails on maps of an even size below the block's, as 32x32 images have here."""

    def forward(self, input: Tensor) -> Tensor:
        side = min(self.block_size, *input.shape[2:])
        return drop_block2d(input, self.p, side - (side % 2 == 0), self.inplace, training=self.training)


class _Block(nn.Module):
    """Three 3x3 convolutions with a 1x1 projection as shortcut; halves the size by stride or by pooling."""

    def __init__(
        self,
        norm: NormFactory,
        in_channels: int,
        out_channels: int,
        stride: int = 1,
        slope: float = 0.0,
        pool: bool = False,
    ) -> None:
        super().__init__()
        self.slope = slope
        self.pool = pool
        self.conv1, self.norm1 = conv(in_channels, out_channels, 3), norm(out_channels)
        self.conv2, self.norm2 = conv(out_channels, out_channels, 3, stride), norm(out_channels)
        self.conv3, self.norm3 = conv(out_channels, out_channels, 3), norm(out_channels)
        self.shortcut = nn.Sequential(conv(in_channels, out_channels, 1, stride), norm(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        out = F.leaky_relu(self.norm1(self.conv1(x)), self.slope)
        out = F.leaky_relu(self.norm2(self.conv2(out)), self.slope)
        out = F.leaky_relu(self.norm3(self.conv3(out)) + self.shortcut(x), self.slope)
        return F.max_pool2d(out, 2) if self.pool else out
