"""Scoring many episodes from features that were computed once.

Each image of a split is embedded once; episodes are drawn in bulk and scored in chunks. Valid whenever an
image's feature does not depend on the images beside it, that is, with evaluation statistics and without
random augmentation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot.episodes import EpisodeSampler
from swbn_lightning.errors import InputError, require_positive

# Most bytes that the gathered features of one chunk of episodes take: small enough to stay near the caches
# (256 MiB took five times as long on a CPU).
_CHUNK_BYTES = 16 * 2**20
_Z95 = 1.959963984540054  # 97.5% quantile of the normal distribution


@dataclass(frozen=True)
class EpisodeResult:
    """Accuracies of evaluated episodes; fractions in [0, 1]."""

    accuracies: Tensor  # [E] float64, on the CPU
    loss: float  # mean cross-entropy over all queries, nats
    ways: int
    shots: int
    queries: int
    seed: int

    @property
    def mean(self) -> float:
        """Mean accuracy over the episodes."""
        return self.accuracies.mean().item()

    @property
    def std(self) -> float:
        """Standard deviation over the episodes (n - 1); 0 for a single one."""
        return self.accuracies.std().item() if self.num_episodes > 1 else 0.0

    @property
    def ci95(self) -> float:
        """Half-width of the 95% interval of the mean over episodes, ``1.96 * std / sqrt(E)``."""
        return _Z95 * self.std / math.sqrt(self.num_episodes)

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
) -> EpisodeResult:
    """Accuracy of ``head`` on episodes ``0 .. num_episodes - 1`` of ``seed`` over cached features.

    Args:
        features: ``[N, C]`` (or ``[N, C, h, w]`` for a head that takes maps), one row an image.
        labels: ``[N]`` integers.
        head: called with support ``[E, W, K, ...]`` and query ``[E, W*Q, ...]``, gives ``[E, W*Q, W]``.
        ways: ``W``, classes an episode.
        shots: ``K``, support images a class.
        queries: ``Q``, query images a class.
        num_episodes: how many; a longer evaluation begins with the episodes of a shorter one.
        seed: of the episodes.
        chunk_size: episodes scored at once; the default keeps a chunk's gathered features under 16 MiB.
            The result does not depend on it.
        class_names: for error messages.

    Raises:
        InputError: as :class:`~fewshot.episodes.EpisodeSampler`; features and labels of different length.
    """
    if len(features) != len(labels):
        raise InputError(f"evaluate_episodes: {len(features)} features but {len(labels)} labels.")
    require_positive("evaluate_episodes", num_episodes=num_episodes)
    if chunk_size is None:
        row_bytes = features[:1].numel() * features.element_size()
        chunk_size = max(1, _CHUNK_BYTES // (ways * (shots + queries) * row_bytes))
    require_positive("evaluate_episodes", chunk_size=chunk_size)
    sampler = EpisodeSampler(labels, ways, shots, queries, class_names)
    target = torch.arange(ways, device=features.device).repeat_interleave(queries)
    accuracies, losses = [], []
    for start in range(0, num_episodes, chunk_size):
        numbers = range(start, min(start + chunk_size, num_episodes))
        _, support, query = sampler.draw(numbers, seed)
        rows = features[support.to(features.device)], features[query.to(features.device).flatten(1)]
        logits = head(*rows).float()
        right = logits.argmax(-1) == target
        accuracies.append(right.double().mean(-1).cpu())
        targets = target.expand(len(numbers), -1)
        losses.append(F.cross_entropy(logits.mT, targets, reduction="none").double().mean(-1).cpu())
    return EpisodeResult(torch.cat(accuracies), torch.cat(losses).mean().item(), ways, shots, queries, seed)
