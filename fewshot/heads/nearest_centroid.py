"""The nearest class mean of normalised features."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fewshot.heads.base import accumulating, means_as_shots
from fewshot.heads.features import FeatureHead
from fewshot.heads.prototypical import squared_distances
from swbn_lightning.errors import require_positive_number


class NearestCentroidHead(FeatureHead):
    """SimpleShot (Wang et al., 2019, arXiv 1911.04623): the nearest class mean of the features of a trained network.

    The logits are ``-scale * |x - c|^2``, where ``c`` is the mean of a class's support features. Features are centred
    and normalised before the mean; the means are not normalised again.

    Args:
        features: ``"cl2"`` (the paper's CL2N), ``"l2"`` or ``"plain"``
            (:class:`~fewshot.heads.features.FeatureHead`).
        scale: factor of the logits, which changes no accuracy. None for 1 with plain features and 10 with the others,
            whose distances are of order 1 and would leave the softmax flat.

    Shape:
        support ``[E, W, K, C]``, query ``[E, M, C]`` with any M; logits ``[E, M, W]``.

    Raises:
        InputError: other features; a scale that is not positive and finite; as
            :class:`~fewshot.heads.features.FeatureHead`.
    """

    def __init__(self, features: str = "cl2", scale: float | None = None) -> None:
        super().__init__(features)
        self.scale = distance_scale(self, scale)

    def logits(self, support: Tensor, query: Tensor) -> Tensor:
        return -self.scale * squared_distances(query, support.mean(dim=2))

    def uneven_logits(self, support: Sequence[Tensor], query: Tensor) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            *support, query = (self.prepared(features) for features in accumulating(*support, query))
            return self.logits(means_as_shots(support), query[None])[0]


def distance_scale(head: FeatureHead, scale: float | None) -> float:
    """Return the factor of a head's squared distances: the given one or, for None, one that suits the features."""
    if scale is None:
        return 1.0 if head.features == "plain" else 10.0
    require_positive_number(type(head).__name__, scale=scale)
    return scale
