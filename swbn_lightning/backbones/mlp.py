"""The paper's network for MNIST: fully connected layers on the flattened image (appendix E)."""

from collections.abc import Sequence

from torch import Tensor, nn

from swbn_lightning.backbones.base import Backbone, initialize_he
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms import NormFactory


class MLP(Backbone):
    """Linear layers, each followed by a norm and ReLU: "normalization layers are added before ReLU functions".

    The linear layers have no bias (the norm's beta serves as one) and He initialisation for ReLU (He et al., ICCV 2015,
    by fan-in). The paper specifies neither. The features are the last hidden layer's.

    Args:
        norm: makes each normalisation layer, for input ``[N, C]``.
        image_size: side of the square images in pixels; 28 as in MNIST.
        in_channels: 1 for gray, as in MNIST; 3 for RGB.
        hidden: widths of the hidden layers; by default the paper's three of 1,024.
    """

    def __init__(
        self,
        norm: NormFactory,
        image_size: int = 28,
        in_channels: int = 1,
        hidden: Sequence[int] = (1024, 1024, 1024),
    ) -> None:
        super().__init__()
        require_positive("mlp", image_size=image_size)
        if isinstance(hidden, str) or not isinstance(hidden, Sequence) or not hidden:
            raise InputError(f"mlp: hidden must list at least one width, as [1024, 1024], got {hidden!r}.")
        for width in hidden:
            require_positive("mlp", hidden=width)
        self.in_channels = in_channels
        self.image_size = image_size
        self.num_features = hidden[-1]
        layers: list[nn.Module] = [nn.Flatten()]
        previous = in_channels * image_size**2
        for width in hidden:
            layers += [nn.Linear(previous, width, bias=False), norm(width, ndim=1), nn.ReLU(inplace=True)]
            previous = width
        self.layers = nn.Sequential(*layers)
        initialize_he(self, mode="fan_in")

    def forward(self, x: Tensor) -> Tensor:
        """Return features ``[N, C]``."""
        self.require_size(x)
        return self.layers(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """Raise :class:`InputError`: an MLP has no feature map."""
        raise InputError("mlp has no feature map, only a vector; choose a convolutional backbone, such as resnet20.")
