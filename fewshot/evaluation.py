"""Score many episodes, drawn in bulk, on features that were computed once.

This is valid if an image's feature does not depend on the other images in its batch: evaluation statistics and no
random augmentation. Otherwise, the images of each episode are embedded together, one episode at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fewshot.episodes import EpisodeSampler, Range
from fewshot.heads import EpisodeHead
from swbn_lightning.errors import InputError, require_positive
from swbn_lightning.norms.health import check_running_statistics
from swbn_lightning.runs.confusion import Confusion
from swbn_lightning.runs.intervals import half_width

# Of a chunk of episodes, features and what the head makes of them: near the caches (256 MiB took five times as long).
_CHUNK_BYTES = 16 * 2**20


class Scored(NamedTuple):
    """Some episodes of one shape with what :func:`score` found, all on the CPU."""

    numbers: Tensor  # [E]
    classes: Tensor  # [E, W], values as in the labels
    named: Tensor  # [E, W, W] int64, how many queries of a class (row) were classified as each class
    losses: Tensor  # [E]

    @property
    def right(self) -> Tensor:
        """Correct queries of each class, ``[E, W]``."""
        return self.named.diagonal(dim1=1, dim2=2)


@dataclass(frozen=True)
class EpisodeResult:
    """Accuracies of evaluated episodes, as fractions in [0, 1].

    Args:
        accuracies: ``[E]`` float64 on the CPU, one per episode.
        loss: mean over episodes of the queries' mean cross-entropy, in nats.
        ways: classes per episode; a number or a range.
        shots: support images per class; a number or a range.
        queries: query images per class.
        seed: seed of the episodes.
        classes: ``[L]`` int64, the distinct labels in rising order.
        class_accuracies: ``[L]`` float64, the share of a class's queries that were classified correctly, over all
            episodes; NaN for a class that no episode drew.
        transductive: whether the queries of an episode were classified together.
        scored: the episodes by their shapes, each with its classes and what its queries were classified as.
    """

    accuracies: Tensor
    loss: float
    ways: Range
    shots: Range
    queries: int
    seed: int
    classes: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    class_accuracies: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))
    transductive: bool = False
    scored: Sequence[Scored] = ()

    @property
    def mean(self) -> float:
        """Mean accuracy over episodes."""
        return self.accuracies.mean().item()

    @property
    def std(self) -> float | None:
        """Standard deviation over episodes (divisor ``E - 1``); None for a single episode."""
        return self.accuracies.std().item() if self.num_episodes > 1 else None

    @property
    def ci95(self) -> float | None:
        """Half-width of the 95% interval of the mean, ``t(E - 1) * std / sqrt(E)`` with Student's t.

        None for a single episode, and if all episodes have the same accuracy: they then say nothing about the spread.
        """
        return None if self.std is None else half_width(self.std, self.num_episodes)

    @property
    def num_episodes(self) -> int:
        """Number of episodes, ``E``."""
        return self.accuracies.numel()

    @cached_property
    def confusion(self) -> Confusion:
        """Which classes were taken for which, of the pairs of classes that met in an episode."""
        number = len(self.classes)
        places = [torch.searchsorted(self.classes, part.classes) for part in self.scored]
        pairs = torch.cat([(own[:, :, None] * number + own[:, None, :]).flatten() for own in places])
        named = torch.cat([part.named.flatten() for part in self.scored])
        codes, which, met = torch.unique(pairs, return_inverse=True, return_counts=True)
        counts = torch.bincount(which, named.double()).long()
        pairs = torch.stack([codes // number, codes % number], dim=1)
        return Confusion(self.classes, *(column[counts > 0] for column in (pairs, counts, met * self.queries)))


@torch.no_grad()
def evaluate_episodes(
    features: Tensor,
    labels: Tensor,
    head: nn.Module,
    *,
    ways: Range,
    shots: Range,
    queries: int,
    num_episodes: int,
    seed: int,
    chunk_size: int | None = None,
    class_names: Sequence[str] | None = None,
    embed: Callable[[Tensor], Tensor] | None = None,
) -> EpisodeResult:
    """Score ``head`` on episodes ``0 .. num_episodes - 1`` of ``seed`` over cached features.

    The head runs in evaluation mode. The chunk size affects results only by rounding: an accuracy can change only if
    two logits of a query agree to within about 1e-6 of their size, the loss only in its last digits.

    Args:
        features: ``[N, C]`` (or ``[N, C, h, w]`` for a head that takes maps), one row per image.
        labels: ``[N]`` integers.
        head: maps support ``[E, W, K, ...]`` and query ``[E, W*Q, ...]`` to logits ``[E, W*Q, W]``.
        ways: ``W``, classes per episode; a number or a range, as in :class:`~fewshot.EpisodeSettings`.
        shots: ``K``, support images per class; a number or a range.
        queries: ``Q``, query images per class.
        num_episodes: number of episodes. A longer evaluation begins with the episodes of a shorter one.
        seed: seed of the episodes.
        chunk_size: episodes scored at once; by default as many as fit in about 16 MiB.
        class_names: names for error messages.
        embed: computes features from the rows of ``features``, which then hold, for example, images. It is called with
            one whole episode at a time: support ``[W*K, ...]``, then queries ``[W*Q, ...]``. Use it for networks that
            normalise by batch statistics in evaluation too. It is slow, and the queries of an episode are then
            classified together.

    Raises:
        InputError: as :class:`~fewshot.episodes.EpisodeSampler`; features and labels of different lengths; features or
            logits that are not finite, because their accuracy would mean nothing; without ``embed``, a head with a norm
            that would use the statistics of whichever episodes share a chunk.
    """
    if len(features) != len(labels):
        raise InputError(f"evaluate_episodes: {len(features)} features but {len(labels)} labels.")
    require_positive("evaluate_episodes", num_episodes=num_episodes)
    if embed is None:
        check_running_statistics(head)
    if chunk_size is not None:
        require_positive("evaluate_episodes", chunk_size=chunk_size)
    sampler = EpisodeSampler(labels, ways, shots, queries, class_names)
    if embed is None:
        _check_finite(features, "features")
    held = features[0].numel() * features.element_size() * getattr(head, "features_held", 1)

    def bytes_of(ways: int, shots: int) -> int:
        extra = head.extra_bytes(ways, shots, queries) if isinstance(head, EpisodeHead) else 0
        return ways * (shots + queries) * held + extra

    scored = []
    with evaluating(head):
        for numbers in _chunks(sampler, num_episodes, seed, 1 if embed is not None else chunk_size, bytes_of):
            episodes = sampler.draw(numbers, seed)
            support, query = (rows.to(features.device) for rows in (episodes.support, episodes.query.flatten(1)))
            support, query = features[support], features[query]
            if embed is not None:
                support, query = _embedded_together(embed, support, query)
            named, losses = score(head, support, query)
            scored.append(Scored(torch.from_numpy(numbers), episodes.classes, named.cpu(), losses.cpu()))
    return episode_result(head, labels, scored, ways=ways, shots=shots, queries=queries, seed=seed)


def score(head: nn.Module, support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Score episodes of features with a head in evaluation mode.

    Args:
        head: maps support and query to logits ``[E, W*Q, W]``.
        support: features ``[E, W, K, ...]``.
        query: features ``[E, W*Q, ...]``, class after class.

    Returns:
        How many queries of each class were classified as each class, ``[E, W, W]`` (int64), and the mean cross-entropy
        of the queries, ``[E]`` (float64).
    """
    logits = head(support, query).float()
    _check_finite(logits, "logits")
    target, ways = query_targets(support, query), support.shape[1]
    predicted = logits.argmax(-1).unflatten(1, (ways, -1))
    named = predicted.new_zeros(len(logits), ways, ways).scatter_add_(2, predicted, torch.ones_like(predicted))
    losses = F.cross_entropy(logits.mT, target.expand(len(logits), -1), reduction="none")
    return named, losses.double().mean(-1)


def query_targets(support: Tensor, query: Tensor) -> Tensor:
    """Class position in the episode of every query, ``[W*Q]``; support ``[E, W, ...]``, query ``[E, W*Q, ...]``."""
    ways = support.shape[1]
    return torch.arange(ways, device=query.device).repeat_interleave(query.shape[1] // ways)


def episode_result(
    head: nn.Module,
    labels: Tensor,
    scored: Sequence[Scored],
    *,
    ways: Range,
    shots: Range,
    queries: int,
    seed: int,
) -> EpisodeResult:
    """Build the result of all episodes, in the order of their numbers."""
    order = torch.cat([part.numbers for part in scored]).argsort()
    values = torch.as_tensor(labels).unique().cpu().long()
    places = torch.searchsorted(values, torch.cat([part.classes.flatten() for part in scored]))
    hits = torch.bincount(places, torch.cat([part.right.flatten() for part in scored]).double(), minlength=len(values))
    accuracies = [part.right.sum(1).double() / (part.right.shape[1] * queries) for part in scored]
    return EpisodeResult(
        accuracies=torch.cat(accuracies)[order],
        loss=torch.cat([part.losses for part in scored])[order].mean().item(),
        ways=ways,
        shots=shots,
        queries=queries,
        seed=seed,
        classes=values,
        class_accuracies=hits / (torch.bincount(places, minlength=len(values)) * queries),
        transductive=isinstance(head, EpisodeHead) and head.transductive,
        scored=scored,
    )


def _chunks(
    sampler: EpisodeSampler, num_episodes: int, seed: int, chunk_size: int | None, bytes_of: Callable[[int, int], int]
) -> Iterator[np.ndarray]:
    """Numbers of the episodes that are scored at once: of one shape, and as many as fit if ``chunk_size`` is None."""
    numbers = np.arange(num_episodes)
    shapes = sampler.shapes(numbers, seed)
    for ways, shots in np.unique(shapes, axis=0).tolist():
        own = numbers[(shapes == (ways, shots)).all(1)]
        size = chunk_size or max(1, _CHUNK_BYTES // bytes_of(ways, shots))
        for start in range(0, len(own), size):
            yield own[start : start + size]


def _check_finite(values: Tensor, what: str) -> None:
    """Raise :class:`InputError` if ``values [N, ...]`` hold a NaN or an infinity."""
    if not torch.stack(torch.aminmax(values)).isfinite().all():  # isfinite of all would take as much memory again
        bad = (~torch.isfinite(values)).flatten(1).any(1).nonzero().flatten()
        raise InputError(
            f"{len(bad)} of {len(values)} {what} are not finite, the first of number {int(bad[0])}: no accuracy can be "
            "read off them. Look for weights that are NaN, or use a wider precision."
        )


def _embedded_together(embed: Callable[[Tensor], Tensor], support: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Embed one episode's support and query together: features ``[1, W, K, ...]`` and ``[1, W*Q, ...]``."""
    ways, shots = support.shape[1:3]
    features = embed(torch.cat([support.flatten(0, 2), query.flatten(0, 1)]))
    return features[: ways * shots].unflatten(0, (1, ways, shots)), features[None, ways * shots :]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode in this context; afterwards restore the mode of every submodule."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
