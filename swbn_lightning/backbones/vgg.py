"""The paper's VGG for 32x32 images (appendix A): nine 3x3 convolutions."""

from torch import Tensor, nn

from swbn_lightning.backbones.base import Backbone, conv
from swbn_lightning.norms import NormFactory

_WIDTHS = (64, 64, None, 128, 128, None, 256, 256, None, 512, 512, None, 512)  # None: 2x2 max-pooling


class VGG(Backbone):
    """Nine times convolution, norm and ReLU, with four max-poolings; 32x32 gives 512x2x2.

    The figure's average pooling (over the 2x2 that is left of 32x32 pixels) is a mean over the whole map here, so
    larger images work too. The initialisation is Glorot and Bengio's, which the original VGG names (Simonyan and
    Zisserman, ICLR 2015, section 3.1). The paper does not specify one.

    Args:
        norm: makes each of the nine normalisation layers.
        in_channels: 3 for RGB, 1 for gray.
    """

    min_image_size = 16

    def __init__(self, norm: NormFactory, in_channels: int = 3) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.num_features = 512
        layers: list[nn.Module] = []
        previous = in_channels
        for width in _WIDTHS:
            if width is None:
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [conv(previous, width, 3), norm(width), nn.ReLU(inplace=True)]
                previous = width
        self.layers = nn.Sequential(*layers)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.xavier_uniform_(layer.weight)

    def forward_features(self, x: Tensor) -> Tensor:
        self.require_size(x)
        return self.layers(x)
