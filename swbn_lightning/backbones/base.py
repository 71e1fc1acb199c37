"""The interface of every backbone, and common pieces of their blocks."""

from torch import Tensor, fx, nn

from swbn_lightning.errors import InputError


class Backbone(nn.Module):
    """Base class of networks from images ``[N, in_channels, H, W]`` to features ``[N, C]``.

    A subclass sets ``num_features`` (C), ``in_channels`` and, unless any image size works, ``min_image_size`` or
    ``image_size``. It defines :meth:`forward_features`, which first calls :meth:`require_size`.
    """

    num_features: int
    in_channels: int
    #: Side in pixels that an image needs for the last map to have one whole position: the product of the strides.
    min_image_size: int = 1
    #: Side of the only images that the network takes; None for all from ``min_image_size`` on.
    image_size: int | None = None

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map, ``[N, C, h, w]``."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature map averaged over its positions, ``[N, C]``."""
        return self.forward_features(x).mean(dim=(2, 3))

    def check_image_size(self, height: int, width: int) -> None:
        """Raise :class:`InputError` for images of a size that cannot work; can be called before training."""
        _check_size(self.min_image_size, self.image_size, height, width, type(self).__name__)

    def require_size(self, x: Tensor) -> None:
        """Check channels and :meth:`check_image_size` inside a forward; torch.fx keeps it as one node."""
        _require_size(x, self.in_channels, self.min_image_size, self.image_size, type(self).__name__)


@fx.wrap
def _require_size(x: Tensor, channels: int, smallest: int, only: int | None, network: str) -> None:
    if x.dim() != 4 or x.shape[1] != channels:
        raise InputError(f"{network} was made for images [N, {channels}, H, W], got {list(x.shape)}.")
    _check_size(smallest, only, x.shape[-2], x.shape[-1], network)


def _check_size(smallest: int, only: int | None, height: int, width: int, network: str) -> None:
    if height < smallest or width < smallest:
        raise InputError(
            f"{network} needs images of at least {smallest}x{smallest} pixels, got {height}x{width}: enlarge them, "
            "or choose a network for smaller ones (the smallest: 4x4 for resnet20, resnet32, resnetv2_56, wrn_*)."
        )
    if only is not None and (height, width) != (only, only):
        raise InputError(
            f"{network} was made for images of {only}x{only} pixels, got {height}x{width}: set "
            f"backbone_args: {{image_size: {height}}}{'' if height == width else ' and make the images square'}."
        )


def conv(in_channels: int, out_channels: int, size: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Make a convolution without bias (a normalisation follows) that keeps the size at stride 1."""
    return nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, groups=groups, bias=False)


def initialize_he(module: nn.Module, mode: str = "fan_out", nonlinearity: str = "relu") -> None:
    """Apply He initialisation (He et al., ICCV 2015) to every convolution and linear layer, in order of definition.

    Normalisation layers draw no random numbers, so a seed gives the same weights for every norm (section 4.1 of the
    paper compares networks that start from identical parameters).

    Args:
        module: contains the layers.
        mode: ``"fan_out"``, as in the ResNets' public code, or ``"fan_in"``, as in He et al. and Wide ResNet's code.
        nonlinearity: the activation that follows, ``"relu"`` or ``"leaky_relu"``.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity=nonlinearity)  # type: ignore[arg-type]
