"""Class means that the queries refine."""

from torch import Tensor

from fewshot.heads.features import FeatureHead
from fewshot.heads.nearest_centroid import distance_scale
from fewshot.heads.prototypical import squared_distances
from swbn_lightning.errors import require_positive


class SoftKMeansHead(FeatureHead):
    """Soft k-means on the queries (Ren et al., ICLR 2018, section 3.1.1). Transductive.

    The paper refines the class means with unlabelled images; here these are the episode's queries. In each step every
    query ``x`` belongs to class ``c`` with the weight ``softmax_c(-scale * |x - p_c|^2)``, and every support image to
    its own class with weight 1. The weighted mean of all is the new ``p_c``. The logits are ``-scale * |x - p_c|^2``.

    Args:
        features: ``"plain"`` (the paper's), ``"l2"`` or ``"cl2"`` (:class:`~fewshot.heads.features.FeatureHead`).
        steps: number of refinements; the public code has 1.
        scale: factor of the squared distances; the smaller, the softer the assignment. None for 1 with plain features
            (the paper's) and 10 with the others, whose distances are of order 1.

    Shape:
        support ``[E, W, K, C]``, query ``[E, M, C]`` with any M; logits ``[E, M, W]``.

    Raises:
        InputError: other features; a number out of range; as :class:`~fewshot.heads.features.FeatureHead`.
    """

    transductive = True
    learns_from_episodes = False

    def __init__(self, features: str = "plain", steps: int = 1, scale: float | None = None) -> None:
        super().__init__(features)
        require_positive("soft k-means", steps=steps)
        self.steps, self.scale = steps, distance_scale(self, scale)

    def logits(self, support: Tensor, query: Tensor) -> Tensor:
        shots, total = support.shape[2], support.sum(dim=2)
        means = total / shots
        for _ in range(self.steps):
            weights = (-self.scale * squared_distances(query, means)).softmax(-1)
            means = (total + weights.mT @ query) / (shots + weights.sum(dim=1).unsqueeze(-1))
        return -self.scale * squared_distances(query, means)
