"""LaplacianShot: queries near each other agree on their class."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fewshot.heads.features import FeatureHead
from fewshot.heads.prototypical import squared_distances
from swbn_lightning.errors import require_flag, require_positive, require_positive_number

_SHARPNESS = 10.0  # of the cosines that weight the images of a rectified mean, in the public code


class LaplacianShotHead(FeatureHead):
    """Laplacian-regularised assignment of all queries together (Ziko et al., ICML 2020). Transductive.

    The assignments ``y_q`` of the queries, a probability for each class, minimise the distances to the class means plus
    ``strength / 2 * sum_qp w_qp |y_q - y_p|^2``, which asks neighbours to agree: ``w_qp`` is 1 if ``p`` is one of the
    nearest queries of ``q``, and 0 otherwise. Each round minimises a bound of a relaxation of that, for every query by
    itself and in closed form: ``y_q = softmax_c(-|x_q - m_c|^2 + strength * sum_p w_qp y_pc)``, starting from
    ``softmax_c(-|x_q - m_c|^2)``. The logits are the argument of the last softmax.

    With ``rectify`` (Liu et al., ECCV 2020, as in the paper's experiments) the queries are first shifted by the
    difference of the means of support and queries. Then every query joins the class whose mean has the highest cosine,
    and ``m_c`` is the mean over the support images and queries of class ``c``, each multiplied by its
    ``softmax_c(10 cos)``.

    Args:
        features: ``"cl2"`` (the paper's), ``"l2"`` or ``"plain"`` (:class:`~fewshot.heads.features.FeatureHead`).
        strength: lambda. The paper chooses it on the validation classes, from 0.1 to 1.5; 1 is the default of its
            public code.
        neighbours: nearest queries of each query, itself not counted. 2 in the public code, whose ``knn`` of 3 counts
            it; if there are fewer, all.
        rounds: number of updates; at most 20 in the public code, which stops when nothing changes any more.
        rectify: rectify the class means.

    Shape:
        support ``[E, W, K, C]``, query ``[E, M, C]`` with any M; logits ``[E, M, W]``.

    Raises:
        InputError: other features; a number out of range; as :class:`~fewshot.heads.features.FeatureHead`.
    """

    transductive = True
    learns_from_episodes = False

    def __init__(
        self,
        features: str = "cl2",
        strength: float = 1.0,
        neighbours: int = 2,
        rounds: int = 20,
        rectify: bool = True,
    ) -> None:
        super().__init__(features)
        require_positive_number("LaplacianShot", strength=strength)
        require_positive("LaplacianShot", neighbours=neighbours, rounds=rounds)
        require_flag("LaplacianShot", rectify=rectify)
        self.strength, self.neighbours, self.rounds, self.rectify = strength, neighbours, rounds, rectify

    def extra_bytes(self, ways: int, shots: int, queries: int) -> int:
        return 3 * 4 * (ways * queries) ** 2

    def logits(self, support: Tensor, query: Tensor) -> Tensor:
        means = support.mean(dim=2)
        if self.rectify:
            query = query + support.mean(dim=(1, 2)).unsqueeze(1) - query.mean(dim=1, keepdim=True)
            means = _rectified(means, support, query)
        alone = -squared_distances(query, means)
        affinity = _affinity(query, self.neighbours)
        logits = alone
        for _ in range(self.rounds):
            logits = alone + self.strength * (affinity @ logits.softmax(-1))
        return logits


def _rectified(means: Tensor, support: Tensor, query: Tensor) -> Tensor:
    """Return the rectified class means, ``[E, W, C]``."""
    ways, shots = support.shape[1:3]
    images = torch.cat([support.flatten(1, 2), query], dim=1)
    cosines = F.normalize(images, dim=-1) @ F.normalize(means, dim=-1).mT
    labels = torch.arange(ways, device=query.device).repeat_interleave(shots).expand(len(query), -1)
    predicted = torch.cat([labels, cosines[:, ways * shots :].argmax(-1)], dim=1)
    members = F.one_hot(predicted, ways).to(images.dtype)
    weights = members * (_SHARPNESS * cosines).softmax(-1)
    return weights.mT @ images / members.sum(dim=1).unsqueeze(-1)


def _affinity(query: Tensor, neighbours: int) -> Tensor:
    """Return ``w [E, M, M]``: 1 at the nearest others of each query, 0 elsewhere."""
    distances = squared_distances(query, query)
    distances.diagonal(dim1=-2, dim2=-1).fill_(float("inf"))
    nearest = distances.topk(min(neighbours, query.shape[1] - 1), largest=False).indices
    return torch.zeros_like(distances).scatter_(-1, nearest, 1)
