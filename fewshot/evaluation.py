"""Scoring many episodes, drawn in bulk, from features that were computed once.

Valid whenever an image's feature does not depend on the images beside it, that is, with evaluation statistics and
without random augmentation. Where it does, each episode's images are embedded together, episode by episode.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot.episodes import EpisodeSampler
from fewshot.heads import EpisodeHead
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms.health import check_running_statistics
from swbn_lightning.runs.intervals import half_width

# Of a chunk of episodes, features and what the head makes of them: near the caches (256 MiB took five times as long).
_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class EpisodeResult:
    """Accuracies of evaluated episodes; fractions in [0, 1].

    The accuracy of a class is that of all its queries, in whatever episodes they were; NaN where none drew it.
    """

    accuracies: Tensor  # [E] float64, on the CPU
    loss: float  # mean cross-entropy over all queries, nats
    ways: int
    shots: int
    queries: int
    seed: int
    classes: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # [L] the distinct labels
    class_accuracies: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))  # [L] over queries
    transductive: bool = False  # whether an episode's queries were classified together

    @property
    def mean(self) -> float:
        """Mean accuracy over the episodes."""
        return self.accuracies.mean().item()

    @property
    def std(self) -> float | None:
        """Standard deviation over the episodes (n - 1); None for a single one, which has none."""
        return self.accuracies.std().item() if self.num_episodes > 1 else None

    @property
    def ci95(self) -> float | None:
        """Half-width of the 95% interval of the mean over episodes, ``t(E - 1) * std / sqrt(E)`` with Student's t.

        None for a single one, and where all episodes have the same accuracy, which says nothing of its spread.
        """
        return None if self.std is None else half_width(self.std, self.num_episodes)

    @property
    def num_episodes(self) -> int:
        """``E``."""
        return self.accuracies.numel()


@torch.no_grad()
def evaluate_episodes(
    features: Tensor,
    labels: Tensor,
    head: nn.Module,
    *,
    ways: int,
    shots: int,
    queries: int,
    num_episodes: int,
    seed: int,
    chunk_size: int | None = None,
    class_names: Sequence[str] | None = None,
    embed: Callable[[Tensor], Tensor] | None = None,
) -> EpisodeResult:
    """Accuracy of ``head`` on episodes ``0 .. num_episodes - 1`` of ``seed`` over cached features.

    The head is run in evaluation mode. The size of the chunks changes accuracies only where two logits of a query agree
    to within rounding, about 1e-6 of their size, and the loss in its last digits at most.

    Args:
        features: ``[N, C]`` (or ``[N, C, h, w]`` for a head that takes maps), one row an image.
        labels: ``[N]`` integers.
        head: called with support ``[E, W, K, ...]`` and query ``[E, W*Q, ...]``, gives ``[E, W*Q, W]``.
        ways: ``W``, classes an episode.
        shots: ``K``, support images a class.
        queries: ``Q``, query images a class.
        num_episodes: how many; a longer evaluation begins with the episodes of a shorter one.
        seed: of the episodes.
        chunk_size: episodes scored at once; by default as many as take about 16 MiB.
        class_names: for error messages.
        embed: makes features of what ``features`` then holds, say images, a whole episode at a time: support
            ``[W*K, ...]``, then queries ``[W*Q, ...]``. For networks that normalise by their batch in evaluation too;
            slow, and an episode's queries are then classified together.

    Raises:
        InputError: as :class:`~fewshot.episodes.EpisodeSampler`; features and labels of different length; features or
            logits that are not finite, since every accuracy could be read off them; a head with a norm that would
            normalise by the episodes that happen to be in a chunk.
    """
    if len(features) != len(labels):
        raise InputError(f"evaluate_episodes: {len(features)} features but {len(labels)} labels.")
    require_positive("evaluate_episodes", num_episodes=num_episodes)
    if embed is None:
        check_running_statistics(head)
        _check_finite(features, "features")
    sampler = EpisodeSampler(labels, ways, shots, queries, class_names)
    if embed is not None:
        chunk_size = 1
    elif chunk_size is None:
        size = (
            ways * (shots + queries) * features[0].numel() * features.element_size() * getattr(head, "features_held", 1)
        )
        chunk_size = max(1, _CHUNK_BYTES // size)
    require_positive("evaluate_episodes", chunk_size=chunk_size)
    classes, right, losses = [], [], []
    with evaluating(head):
        for start in range(0, num_episodes, chunk_size):
            episodes = sampler.draw(range(start, min(start + chunk_size, num_episodes)), seed)
            support, query = (rows.to(features.device) for rows in (episodes.support, episodes.query.flatten(1)))
            support, query = features[support], features[query]
            if embed is not None:
                support, query = _embedded_together(embed, support, query)
            scored = score(head, support, query)
            classes.append(episodes.classes)
            right.append(scored[0].cpu())
            losses.append(scored[1].cpu())
    return episode_result(
        head, labels, torch.cat(classes), torch.cat(right), torch.cat(losses), shots=shots, queries=queries, seed=seed
    )


def score(head: nn.Module, support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Of episodes of features, support ``[E, W, K, ...]`` and query ``[E, W*Q, ...]``, for a head in evaluation mode:
    queries of each class that were right ``[E, W]`` (int64), and the queries' mean cross-entropy ``[E]`` (float64).
    """
    logits = head(support, query).float()
    _check_finite(logits, "logits")
    target = query_targets(support, query)
    right = (logits.argmax(-1) == target).unflatten(1, (support.shape[1], -1)).sum(-1)
    losses = F.cross_entropy(logits.mT, target.expand(len(logits), -1), reduction="none")
    return right, losses.double().mean(-1)


def query_targets(support: Tensor, query: Tensor) -> Tensor:
    """``[W*Q]``: the class inside its episode of every query of ``[E, W*Q, ...]``, for support ``[E, W, ...]``."""
    ways = support.shape[1]
    return torch.arange(ways, device=query.device).repeat_interleave(query.shape[1] // ways)


def episode_result(
    head: nn.Module,
    labels: Tensor,
    classes: Tensor,
    right: Tensor,
    losses: Tensor,
    *,
    shots: int,
    queries: int,
    seed: int,
) -> EpisodeResult:
    """The result of episodes with ``classes [E, W]`` out of ``labels``, as :func:`score` gave them; all on the CPU."""
    ways = classes.shape[1]
    values = torch.as_tensor(labels).unique().cpu().long()
    places = torch.searchsorted(values, classes).flatten()
    hits = torch.bincount(places, right.flatten().double(), minlength=len(values))
    return EpisodeResult(
        accuracies=right.sum(1).double() / (ways * queries),
        loss=losses.mean().item(),
        ways=ways,
        shots=shots,
        queries=queries,
        seed=seed,
        classes=values,
        class_accuracies=hits / (torch.bincount(places, minlength=len(values)) * queries),
        transductive=isinstance(head, EpisodeHead) and head.transductive,
    )


def _check_finite(values: Tensor, what: str) -> None:
    """Raise :class:`InputError` where ``values [N, ...]`` hold a NaN or an infinity."""
    if not torch.isfinite(values).all():
        bad = (~torch.isfinite(values)).flatten(1).any(1).nonzero().flatten()
        raise InputError(
            f"{len(bad)} of {len(values)} {what} are not finite, the first of number {int(bad[0])}: no accuracy can be "
            "read off them. Look for weights that are NaN, or use a wider precision."
        )


def _embedded_together(embed: Callable[[Tensor], Tensor], support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Features of one episode from what they are made of: ``[1, W, K, ...]`` and ``[1, W*Q, ...]``."""
    ways, shots = support.shape[1:3]
    features = embed(torch.cat([support.flatten(0, 2), query.flatten(0, 1)]))
    return features[: ways * shots].unflatten(0, (1, ways, shots)), features[None, ways * shots :]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode within; afterwards every part is in the mode in which it was."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
