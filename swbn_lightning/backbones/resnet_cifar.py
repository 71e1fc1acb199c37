"""ResNet V1 for 32x32 images (He et al., CVPR 2016, section 4.2): 6n + 2 layers, widths 16, 32, 64."""

from torch import Tensor, nn
from torch.nn import functional as F

from swbn_lightning.backbones.base import Backbone, conv, initialize_he
from swbn_lightning.errors import InputError, unknown_name
from swbn_lightning.norms import NormFactory

SHORTCUTS = ("projection", "identity")
SHORTCUT_NORMS = ("given", "bn")
FORMS = ("he", "appendix")


class ResNetCifar(Backbone):
    """ResNet V1 of ``depth = 6n + 2`` layers; 32x32 gives 64x8x8.

    The initialisation is He's, by fan-out, as in the public code of the architecture's authors (fb.resnet.torch).

    Args:
        norm: makes each normalisation layer.
        depth: 20 (0.27 million parameters), 32, 44, ...
        in_channels: 3 for RGB, 1 for gray.
        shortcut: where the size changes. ``"projection"``: a 1x1 convolution and a norm, as in the paper's residual
            units (appendix E). ``"identity"``: every second pixel, padded with zero channels, without parameters (He et
            al.'s option A).
        shortcut_norm: norm of the projections. ``"given"``: the same as elsewhere; ``"bn"``: always BatchNorm.
        form: ``"he"``: as described by He et al. ``"appendix"``: as drawn in the paper's figures B.1 to B.3, where the
            second convolution of a unit is 1x1, and one more norm and ReLU come before the pooling.
    """

    min_image_size = 4

    def __init__(
        self,
        norm: NormFactory,
        depth: int = 20,
        in_channels: int = 3,
        shortcut: str = "projection",
        shortcut_norm: str = "given",
        form: str = "he",
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise InputError(f"a CIFAR ResNet has 6n + 2 layers (20, 32, 44, 56, ...), got depth={depth}.")
        if shortcut not in SHORTCUTS:
            raise unknown_name("shortcut of a CIFAR ResNet", shortcut, SHORTCUTS)
        if shortcut_norm not in SHORTCUT_NORMS:
            raise unknown_name("shortcut_norm of a CIFAR ResNet", shortcut_norm, SHORTCUT_NORMS)
        if form not in FORMS:
            raise unknown_name("form of a CIFAR ResNet", form, FORMS)
        self.in_channels = in_channels
        self.num_features = 64
        self.stem = nn.Sequential(conv(in_channels, 16, 3), norm(16), nn.ReLU(inplace=True))
        projection_norm = NormFactory("bn") if shortcut_norm == "bn" else norm
        blocks: list[nn.Module] = []
        previous = 16
        for width in (16, 32, 64):
            for index in range((depth - 2) // 6):
                stride = 2 if index == 0 and width > 16 else 1
                side: nn.Module = nn.Identity()
                if stride == 2 and shortcut == "projection":
                    side = nn.Sequential(conv(previous, width, 1, stride), projection_norm(width))
                elif stride == 2:
                    side = _PadChannels(width - previous, stride)
                blocks.append(_Block(norm, previous, width, stride, side, second=3 if form == "he" else 1))
                previous = width
        if form == "appendix":
            blocks += [norm(64), nn.ReLU(inplace=True)]
        self.blocks = nn.Sequential(*blocks)
        initialize_he(self)

    def forward_features(self, x: Tensor) -> Tensor:
        self.require_size(x)
        return self.blocks(self.stem(x))


def resnet32(
    norm: NormFactory,
    in_channels: int = 3,
    shortcut: str = "projection",
    shortcut_norm: str = "bn",
    form: str = "he",
) -> ResNetCifar:
    """The paper's ResNetV1-32, whose projections keep BatchNorm (appendix E); arguments as in :class:`ResNetCifar`."""
    return ResNetCifar(norm, 32, in_channels, shortcut, shortcut_norm, form)


class _Block(nn.Module):
    def __init__(
        self, norm: NormFactory, in_channels: int, out_channels: int, stride: int, shortcut: nn.Module, second: int
    ) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(in_channels, out_channels, 3, stride), norm(out_channels)
        self.conv2, self.norm2 = conv(out_channels, out_channels, second), norm(out_channels)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class _PadChannels(nn.Module):
    """Option A: every ``stride``-th pixel; new channels are zero, half of them on either side."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.channels, self.stride = channels, stride

    def forward(self, x: Tensor) -> Tensor:
        before = self.channels // 2
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.channels - before))
