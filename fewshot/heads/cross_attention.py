"""Cross attention: the head attends to the positions where query and class look alike."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot.heads.base import EpisodeHead, accumulating, means_as_shots
from swbn_lightning.errors import InputError, require_positive, require_positive_number
from swbn_lightning.norms import NormFactory
from swbn_lightning.norms.health import check_running_statistics

# Transductive rounds of the public code: the 35 most confident of an episode's 75 queries, then the 70.
_ADDED, _OF = 35, 75


class PositionLogits(NamedTuple):
    """Inputs of the two training losses of cross attention, for ``m`` positions."""

    episodic: Tensor  # [E, M, W, m]: at each query position
    attended: Tensor  # [E, M, m, C]: the query maps, attended by their true classes
    pooled: Tensor  # [E, M, W], the head's logits; without gradient


class CrossAttentionHead(EpisodeHead):
    """Cross attention module of CAN (Hou et al., NeurIPS 2019), with the defaults of its public code.

    The class map ``P`` is the mean of the support maps, and ``Q`` is a query map. ``p`` and ``q`` are the same maps
    with the channels of every position normalised to length 1. For each pair of class and query (section 4 of the
    paper):

    1. Correlation map: ``R[i, j] = p_i . q_j`` for ``m`` class positions and ``m`` query positions.
    2. Meta-fusion: the mean of ``R`` over class positions, ``[m]``, goes through :class:`MetaFusion`, which gives a
       weight ``w_j`` for every query position.
    3. Attention of the class positions: ``a = softmax_i(mean_j(R[i, j] w_j) / temperature)``.
    4. Residual attention: the class map becomes ``(1 + a_i) P_i``. The query map is treated in the same way, with the
       transposed ``R`` and the same fusion.
    5. Logits: ``scale`` times the cosine of the two maps' means over positions.

    Only means of ``R`` and of the attended maps are needed, so neither is stored for all pairs. Results agree with the
    direct computation up to rounding.

    Args:
        num_positions: ``m = h * w`` of the backbone's maps; it sets the size of the fusion's weights.
        reduction: ``r``; the middle of the fusion has ``max(1, m // r)`` channels.
        temperature: temperature of the attention's softmax.
        scale: fixed factor of the cosines.
        norm: norm of the fusion, a name that :class:`~swbn_lightning.NormFactory` knows. Its samples are the pairs of
            class and query.
        norm_args: options of that norm.
        transductive: classify the queries of an episode together. Twice, the most confident queries join the support
            set with their predicted class, and all queries are classified again. As in the public code (35, then 70 of
            75), 7/15 of the queries join in the first round and twice as many in the second.

    Shape:
        support ``[E, W, K, C, h, w]``, query ``[E, M, C, h, w]`` with any M and ``h * w = m``; logits ``[E, M, W]``.

    Raises:
        InputError: a number out of range; a norm that would use other episodes' statistics in evaluation, or would have
            only one value to normalise; in ``forward``, maps with a different number of positions.
    """

    def __init__(
        self,
        num_positions: int,
        reduction: int = 6,
        temperature: float = 0.025,
        scale: float = 7.0,
        norm: str = "bn",
        norm_args: Mapping[str, Any] | None = None,
        transductive: bool = False,
    ) -> None:
        super().__init__()
        require_positive("cross attention", num_positions=num_positions, reduction=reduction)
        require_positive_number("cross attention", temperature=temperature, scale=scale)
        self.num_positions, self.temperature, self.scale = num_positions, temperature, scale
        self.transductive = transductive
        hidden = max(1, num_positions // reduction)
        self.fusion = MetaFusion(num_positions, hidden, NormFactory(norm, **(norm_args or {})))
        check_running_statistics(self)

    def logits(self, support: Tensor, query: Tensor) -> Tensor:
        logits = self._compare(support.mean(dim=2), query)
        if self.transductive:
            for number in transductive_rounds(query.shape[1]):
                logits = self._compare(_class_maps(support, query, logits, number), query)
        return logits

    def uneven_logits(self, support: Sequence[Tensor], query: Tensor) -> Tensor:
        if self.transductive:  # the queries that join a class are weighed against its shots
            return super().uneven_logits(support, query)
        return self(means_as_shots(support), query[None])[0]

    def position_logits(self, support: Tensor, query: Tensor) -> PositionLogits:
        """Compute the inputs of the two training losses; shapes as in ``forward``, queries class after class.

        The episodic logits compare each position of the query map with the pooled class vector. Attention only scales
        the vector of a position, which cancels in the cosine.
        """
        with torch.autocast(query.device.type, enabled=False):
            support, query = map(self.prepared, accumulating(support, query))
            classes = support.mean(dim=2)
            ways = classes.shape[1]
            of_class, of_query = self._attention(classes, query)
            class_vectors = _normalized_mean(of_class, classes).transpose(1, 2)  # [E, M, W, C]
            episodic = self.scale * class_vectors @ F.normalize(query, dim=-1).mT
            with torch.no_grad():
                query_vectors = _normalized_mean(of_query.transpose(1, 2), query)
                pooled = self.scale * (class_vectors * query_vectors).sum(-1)
            # Query i is of class i // (M / W): its own class's attention, one of W.
            own = of_query.unflatten(2, (ways, -1)).diagonal(dim1=1, dim2=2).movedim(-1, 1).flatten(1, 2)  # [E, M, m]
            return PositionLogits(episodic, own.unsqueeze(-1) * query, pooled)

    def _compare(self, classes: Tensor, query: Tensor) -> Tensor:
        """``[E, W, m, C]`` and ``[E, M, m, C]`` to ``[E, M, W]``."""
        of_class, of_query = self._attention(classes, query)
        class_vectors = _normalized_mean(of_class, classes)
        query_vectors = _normalized_mean(of_query.transpose(1, 2), query)
        return self.scale * (class_vectors.transpose(1, 2) * query_vectors).sum(-1)

    def _attention(self, classes: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """``1 + a`` of the class positions and of the query positions, each ``[E, W, M, m]``."""
        p, q = F.normalize(classes, dim=-1), F.normalize(query, dim=-1)
        query_weights = self.fusion(p.mean(2).unsqueeze(1) @ q.mT)  # [E, M, W, m]
        class_weights = self.fusion(q.mean(2).unsqueeze(1) @ p.mT)  # [E, W, M, m]
        read_query = (query_weights @ q).transpose(1, 2)  # [E, W, M, C]
        read_class = (class_weights @ p).transpose(1, 2)  # [E, M, W, C]
        of_class = read_query @ p.mT
        of_query = (read_class @ q.mT).transpose(1, 2)
        factor = 1 / (self.num_positions * self.temperature)
        return 1 + (of_class * factor).softmax(-1), 1 + (of_query * factor).softmax(-1)

    def prepared(self, features: Tensor) -> Tensor:
        """``[..., C, h, w]`` to ``[..., m, C]``."""
        height, width = features.shape[-2:]
        if height * width != self.num_positions:
            raise InputError(
                f"cross attention was made for maps of {self.num_positions} positions, but these have "
                f"{height}x{width}: images of another size than in training, or another backbone."
            )
        return features.flatten(-2).mT


class MetaFusion(nn.Module):
    """Map the mean correlations of a pair, ``m -> hidden -> m``: two 1x1 convolutions with a norm and a ReLU between.

    On vectors, a 1x1 convolution is a linear layer. Weights are initialised by fan-out, as in the public code. Each
    pair of class and query is one sample of the norm. The module runs once per direction.
    """

    def __init__(self, num_positions: int, hidden: int, norm: NormFactory) -> None:
        super().__init__()
        self.squeeze = nn.Linear(num_positions, hidden)
        self.norm = norm(hidden, ndim=1)
        _check_several_values(self.norm)
        self.expand = nn.Linear(hidden, num_positions)
        for layer in (self.squeeze, self.expand):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, correlation: Tensor) -> Tensor:
        """``[..., m]`` to ``[..., m]``; computed in the parameters' dtype."""
        rows = correlation.flatten(0, -2).to(self.squeeze.weight.dtype)
        weights = self.expand(F.relu(self.norm(self.squeeze(rows))))
        return weights.view_as(correlation).to(correlation.dtype)


def transductive_rounds(num_queries: int) -> tuple[int, int]:
    """Number of an episode's queries that join the support set in the first and in the second round."""
    first = max(1, num_queries * _ADDED // _OF)
    return first, min(2 * first, num_queries)


def _class_maps(support: Tensor, query: Tensor, logits: Tensor, number: int) -> Tensor:
    """Mean maps of the support images and of the ``number`` most confident queries, ``[E, W, m, C]``."""
    confidence, predicted = logits.max(-1)
    chosen = confidence.argsort(dim=-1, descending=True, stable=True)[:, :number]
    joins = torch.zeros_like(logits)
    joins[torch.arange(len(logits), device=logits.device)[:, None], chosen, predicted.gather(1, chosen)] = 1
    total = support.sum(2) + (joins.mT @ query.flatten(2)).unflatten(-1, query.shape[2:])
    return total / (support.shape[2] + joins.sum(1))[..., None, None]


def _normalized_mean(attention: Tensor, maps: Tensor) -> Tensor:
    """Direction of the attended maps' means: ``[E, A, B, m]`` and ``[E, A, m, C]`` to ``[E, A, B, C]``."""
    return F.normalize(attention @ maps / maps.shape[2], dim=-1)


def _check_several_values(norm: nn.Module) -> None:
    """Raise :class:`InputError` for a norm that would normalise each value of a pair by itself."""
    single = isinstance(norm, nn.GroupNorm) and norm.num_groups == norm.num_channels
    if single or isinstance(norm, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d):
        raise InputError(
            f"the fusion of cross attention cannot have {norm}: it would normalise every value by itself and make it "
            "0. Another norm can, such as bn, or gn with num_groups: 1."
        )
