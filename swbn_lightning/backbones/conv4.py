"""Conv4, the few-shot backbone of four convolutions (Vinyals et al., NeurIPS 2016; Snell et al., NeurIPS 2017)."""

from torch import Tensor, nn

from swbn_lightning.backbones.base import Backbone, conv, initialize_he
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms import NormFactory

_WIDTH, _BLOCKS = 64, 4


class Conv4(Backbone):
    """Four blocks of 3x3 convolution with 64 filters, norm, ReLU and 2x2 max-pooling; 84x84 gives 64x5x5.

    The papers flatten the last map: 1,600 features for 84x84 pixels, 256 for 32x32, 64 for 28x28. The other backbones
    here average it, and so does this one by default: 64 features, for images of any size. They are not the papers'
    network then. Give ``flatten: true`` and the ``image_size`` for that.

    The papers' convolutions have biases, which a norm's mean makes useless; here they have none. The papers do not
    specify the initialisation. It is He's by fan-out, as in Chen et al.'s code (ICLR 2019).

    Args:
        norm: makes each of the four normalisation layers.
        in_channels: 3 for RGB, 1 for gray.
        flatten: flatten the last map to the features instead of averaging it. The network then has no feature map for
            methods that take one.
        image_size: side of the square images in pixels; with ``flatten`` only, which needs it.
    """

    min_image_size = 2**_BLOCKS

    def __init__(
        self, norm: NormFactory, in_channels: int = 3, flatten: bool = False, image_size: int | None = None
    ) -> None:
        super().__init__()
        if flatten != (image_size is not None):
            raise InputError(
                "conv4: flatten and image_size belong together, as {flatten: true, image_size: 84}; "
                f"got {flatten=}, {image_size=}."
            )
        self.in_channels, self.image_size = in_channels, image_size
        self.num_features = _WIDTH
        if image_size is not None:
            require_positive("conv4", image_size=image_size)
            self.check_image_size(image_size, image_size)
            self.num_features *= (image_size // self.min_image_size) ** 2
        layers: list[nn.Module] = []
        for previous in (in_channels, *[_WIDTH] * (_BLOCKS - 1)):
            layers += [conv(previous, _WIDTH, 3), norm(_WIDTH), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers)
        initialize_he(self)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last map, ``[N, 64, h, w]``; with ``flatten`` raise :class:`InputError`."""
        if self.image_size is not None:
            raise InputError("conv4 with flatten gives a vector, no feature map; leave out flatten and image_size.")
        self.require_size(x)
        return self.layers(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features, ``[N, num_features]``."""
        if self.image_size is None:
            return super().forward(x)
        self.require_size(x)
        return self.layers(x).flatten(1)
