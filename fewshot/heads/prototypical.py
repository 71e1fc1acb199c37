"""Classification by the nearest class mean."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from fewshot.heads.base import EpisodeHead, means_as_shots
from swbn_lightning.errors import InputError, require_positive_number, unknown_name

METRICS = ("euclidean", "cosine")


class PrototypicalHead(EpisodeHead):
    """Classify by the nearest class mean (Snell et al., NeurIPS 2017).

    The prototype of a class is the mean of its support features. The logits are ``-scale * |query - prototype|^2`` for
    ``metric="euclidean"`` and ``scale * cos(query, prototype)`` for ``metric="cosine"``.

    Args:
        metric: ``"euclidean"`` (squared distance) or ``"cosine"``.
        scale: factor of the logits, above 0. None for the metric's default: 1 for the plain squared distance; 10 for
            the cosine and for the distance averaged over channels, which are of order 1 and would leave the softmax
            flat.
        average_channels: divide the squared distance by the number of channels, so that the scale does not depend on
            the backbone (as in MetaOptNet's code).

    Shape:
        support ``[E, W, K, C]``, query ``[E, M, C]`` with any M; logits ``[E, M, W]``.

    Raises:
        InputError: an unknown metric; ``average_channels`` with the cosine; a scale that is not positive and finite.
    """

    def __init__(
        self,
        metric: str = "euclidean",
        scale: float | None = None,
        average_channels: bool = False,
    ) -> None:
        super().__init__()
        if metric not in METRICS:
            raise unknown_name("metric of prototypes", metric, METRICS)
        if metric == "cosine" and average_channels:
            raise InputError("average_channels belongs to metric 'euclidean'; a cosine has no sum over channels.")
        if scale is None:
            scale = 10.0 if metric == "cosine" or average_channels else 1.0
        require_positive_number("prototypes", scale=scale)
        self.metric, self.average_channels, self.scale = metric, average_channels, scale

    def uneven_logits(self, support: Sequence[Tensor], query: Tensor) -> Tensor:
        return self(means_as_shots(support), query[None])[0]

    def logits(self, support: Tensor, query: Tensor) -> Tensor:
        prototypes = support.mean(dim=2)
        if self.metric == "cosine":
            similarity = F.normalize(query, dim=-1) @ F.normalize(prototypes, dim=-1).mT
        else:
            similarity = -squared_distances(query, prototypes)
            if self.average_channels:
                similarity = similarity / query.shape[-1]
        return similarity * self.scale


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances ``|a_i - b_j|^2``: ``[E, M, C]`` and ``[E, W, C]`` to ``[E, M, W]``.

    Both are centred on the mean of ``b`` first. This leaves the distances unchanged, and a common offset no longer
    costs precision.
    """
    centre = b.mean(dim=1, keepdim=True)
    a, b = a - centre, b - centre
    return a.square().sum(-1, keepdim=True) + b.square().sum(-1).unsqueeze(1) - 2 * (a @ b.mT)
