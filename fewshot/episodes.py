"""Draw episodes (classes and images) as index tensors.

Episode ``i`` depends only on ``(seed, epoch, i)``. Every worker, process or chunk therefore draws the same episodes,
and the first hundred of a thousand are also the first hundred of ten thousand. A counter-based generator draws all
episodes at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from swbn_lightning.errors import InputError, require_positive

# The increment and multipliers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014; Vigna's splitmix64.c).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

#: A number for all episodes, or the lowest and the highest of a range from which each episode's number is drawn.
Range = int | tuple[int, int]


def bounds(value: Range) -> tuple[int, int]:
    """The lowest and the highest number."""
    return (value[0], value[1]) if isinstance(value, tuple | list) else (value, value)


def in_words(value: Range) -> int | str:
    """The number as it is; a range as ``"5-20"``."""
    low, high = bounds(value)
    return low if low == high else f"{low}-{high}"


def require_shape(kind: str, *, ways: Range, shots: Range, queries: int) -> None:
    """Raise :class:`InputError` for a number below 1, or a range that is not two rising numbers."""
    for name, value in (("ways", ways), ("shots", shots)):
        numbers = value if isinstance(value, tuple | list) else (value,)
        for number in numbers:
            require_positive(kind, **{name: number})
        if numbers is value and not (len(value) == 2 and value[0] < value[1]):
            raise InputError(f"{kind}: {name} must be a number or two rising ones, as [5, 20], got {list(value)!r}.")
    require_positive(kind, queries=queries)


@dataclass(frozen=True)
class EpisodeSettings:
    """Shape and number of the episodes of one split.

    Each episode draws its ways and its shots where these are a range, such as ``(5, 20)``: uniformly, both ends
    included. All classes of an episode have the same shots. (Meta-Dataset, Triantafillou et al., ICLR 2020, draws shots
    that differ between the classes of an episode; that is not done here.)

    Args:
        ways: classes per episode; a number or a range.
        shots: support images per class; a number or a range.
        queries: query images per class.
        episodes: episodes per epoch in training, total number in validation and test. Use at least 600 for evaluation:
            with 100 episodes, chance alone is worth a point and a half of accuracy.
    """

    ways: Range = 5
    shots: Range = 1
    queries: int = 15
    episodes: int = 600

    @property
    def shape(self) -> dict[str, Any]:
        """``ways``, ``shots`` and ``queries`` as keyword arguments."""
        return {"ways": self.ways, "shots": self.shots, "queries": self.queries}

    @property
    def most_ways(self) -> int:
        """The highest number of ways."""
        return bounds(self.ways)[1]

    @property
    def most_shots(self) -> int:
        """The highest number of shots."""
        return bounds(self.shots)[1]

    @property
    def images_per_class(self) -> int:
        """Images that an episode with the most shots takes of a class."""
        return self.most_shots + self.queries

    @property
    def of_one_shape(self) -> bool:
        """Whether ways and shots are numbers, no ranges."""
        return not isinstance(self.ways, tuple | list) and not isinstance(self.shots, tuple | list)


#: Where nothing else is said.
TRAIN, VAL, TEST = EpisodeSettings(episodes=1000), EpisodeSettings(), EpisodeSettings(episodes=2000)


class Episodes(NamedTuple):
    """``E`` episodes of ``W`` ways, ``K`` shots and ``Q`` queries per class, as int64 tensors.

    Within an episode, a class is identified by its position ``0..W-1`` in ``classes``.

    Args:
        classes: ``[E, W]``, values from ``labels``.
        support: ``[E, W, K]``, indices into ``labels``.
        query: ``[E, W, Q]``, indices into ``labels``.
    """

    classes: Tensor
    support: Tensor
    query: Tensor


class EpisodeSampler:
    """Draw episodes from one list of labels.

    Gives the same episodes as :func:`sample_episodes`, but sorts the labels only once. Memory grows with the number of
    images and of episodes drawn at once, not with classes times episodes.

    Args:
        labels: ``[N]`` integers: the class of every image.
        ways: ``W``, classes per episode; a number or a range, as in :class:`EpisodeSettings`.
        shots: ``K``, support images per class; a number or a range.
        queries: ``Q``, query images per class.
        class_names: ``class_names[label]`` is used in error messages.

    Raises:
        InputError: a number below 1; a range that does not rise; labels that are not one-dimensional; more ways than
            classes; a class with fewer images than shots + queries (the message gives its name, its images and the
            images needed).
    """

    def __init__(
        self,
        labels: ArrayLike | Tensor,
        ways: Range,
        shots: Range,
        queries: int,
        class_names: Sequence[str] | None = None,
    ) -> None:
        require_shape("episodes", ways=ways, shots=shots, queries=queries)
        array = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
        if array.ndim != 1:
            raise InputError(f"episodes: labels must have one dimension, got shape {array.shape}.")
        self.ways, self.shots, self.queries = ways, shots, queries
        self._order = np.argsort(array, kind="stable")
        self._values, self._starts, self._counts = np.unique(array[self._order], return_index=True, return_counts=True)
        self._check(class_names)

    def shapes(self, episodes: ArrayLike, seed: int, epoch: int = 0) -> NDArray[np.int64]:
        """Ways and shots of the episodes with the given numbers, ``[E, 2]``; arguments as of :meth:`draw`."""
        return self._shapes(_keys(episodes, seed, epoch))

    def draw(self, episodes: ArrayLike, seed: int, epoch: int = 0) -> Episodes:
        """Draw the episodes with the given numbers.

        An episode of a range is the same as that of its own ways and shots: it does not depend on the range otherwise.

        Args:
            episodes: ``[E]`` integers from 0.
            seed: any integer from 0.
            epoch: any integer from 0; gives a different set of episodes for the same seed.

        Raises:
            InputError: a negative seed, epoch or number; episodes of several shapes, which no tensor holds.
        """
        keys = _keys(episodes, seed, epoch)
        shapes = self._shapes(keys)
        ways, shots = map(int, shapes[0]) if keys.size else (bounds(self.ways)[0], bounds(self.shots)[0])
        if (shapes != (ways, shots)).any():
            raise InputError(
                f"episodes: not all of these have {ways} ways and {shots} shots as the first: draw one at a time, or "
                "those to which EpisodeSampler.shapes gives the same."
            )
        num_classes = np.full(keys.size, len(self._values))
        chosen = _choose(keys, num_classes, ways)  # [E, W]
        per_class = _mix(keys[:, None] + np.arange(1, ways + 1, dtype=np.uint64) * np.uint64(_MIX[0]))
        images = _choose(per_class.reshape(-1), self._counts[chosen].reshape(-1), shots + self.queries)
        places = self._starts[chosen][..., None] + images.reshape(*chosen.shape, shots + self.queries)
        picked = self._order[places]
        return Episodes(
            torch.from_numpy(self._values[chosen].astype(np.int64)),
            torch.from_numpy(np.ascontiguousarray(picked[..., :shots])),
            torch.from_numpy(np.ascontiguousarray(picked[..., shots:])),
        )

    def _shapes(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        own = _mix(keys + np.uint64(_MIX[1]))  # a stream of its own: classes and images do not depend on it
        columns = []
        for slot, (low, high) in enumerate((bounds(self.ways), bounds(self.shots))):
            columns.append(low + _uniform_below(own, slot, high - low + 1))
        return np.stack(columns, axis=1)

    def _check(self, names: Sequence[str] | None) -> None:
        if bounds(self.ways)[1] > len(self._values):
            raise InputError(
                f"episodes: {in_words(self.ways)} ways asked of {len(self._values)} classes; "
                f"give at most {len(self._values)} ways."
            )
        needed = bounds(self.shots)[1] + self.queries
        smallest = int(self._counts.argmin())
        if self._counts[smallest] < needed:
            label = int(self._values[smallest])
            name = repr(names[label]) if names is not None else str(label)
            short = int((self._counts < needed).sum())
            raise InputError(
                f"episodes: class {name} has {self._counts[smallest]} images, but {in_words(self.shots)} shots + "
                f"{self.queries} queries need {needed} ({short} of {len(self._values)} classes have too few)."
            )


def sample_episodes(
    labels: ArrayLike | Tensor,
    ways: int,
    shots: int,
    queries: int,
    num_episodes: int,
    seed: int,
    epoch: int = 0,
    start: int = 0,
) -> Episodes:
    """Draw episodes ``start .. start + num_episodes - 1`` of ``(seed, epoch)``.

    Classes within an episode and images within a class are drawn uniformly and without replacement. Support and query
    therefore share no image.

    Args:
        labels: ``[N]`` integers: the class of every image.
        ways: ``W``, classes per episode; for a range use :class:`EpisodeSampler`.
        shots: ``K``, support images per class.
        queries: ``Q``, query images *per class*.
        num_episodes: ``E``.
        seed: any integer from 0.
        epoch: gives a different set of episodes for the same seed.
        start: number of the first episode.

    Raises:
        InputError: as :class:`EpisodeSampler`; a negative seed, epoch or start.
    """
    require_positive("episodes", num_episodes=num_episodes)
    sampler = EpisodeSampler(labels, ways, shots, queries)
    return sampler.draw(np.arange(start, start + num_episodes), seed, epoch)


def _keys(episodes: ArrayLike, seed: int, epoch: int) -> NDArray[np.uint64]:
    """The key of each episode's random stream, ``[E]``."""
    numbers = np.asarray(episodes, dtype=np.int64).reshape(-1)
    if seed < 0 or epoch < 0 or (numbers.size and numbers.min() < 0):
        raise InputError(f"episodes: seed, epoch and numbers must not be negative, got {seed=}, {epoch=}.")
    state = _mix(np.uint64(seed) + np.uint64(_GOLDEN))
    state = _mix(state ^ _mix(np.uint64(epoch) + np.uint64(1)))
    return _mix(state ^ _mix(numbers.astype(np.uint64) + np.uint64(2)))


def _mix(x: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection on 64-bit numbers that scatters neighbouring values."""
    x = np.atleast_1d(np.asarray(x, dtype=np.uint64)).copy()  # arrays wrap around without a warning
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX[0])
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX[1])
    x ^= x >> np.uint64(31)
    return x


def _uniform_below(keys: NDArray[np.uint64], slot: int, bound: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """One integer in ``[0, bound)`` per key, from position ``slot`` of the key's random stream."""
    bits = _mix(keys + np.uint64((slot + 1) * _GOLDEN % 2**64))
    # High half times bound, high half again: off uniform by at most bound / 2^32.
    return (((bits >> np.uint64(32)) * np.asarray(bound).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def _choose(keys: NDArray[np.uint64], population: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """``[M, count]`` distinct numbers below ``population [M]``; every ordered choice is equally likely.

    Floyd's algorithm (Bentley and Floyd, CACM 1987) draws a uniform set in ``count`` steps, whatever the population.
    Each new member is inserted at a uniformly drawn place, so its order is uniform too.
    """
    chosen = np.empty((keys.size, count), dtype=np.int64)
    rows = np.arange(keys.size)
    for step in range(count):
        last = population - count + step
        candidate = _uniform_below(keys, 2 * step, last + 1)
        taken = (chosen[:, :step] == candidate[:, None]).any(axis=1)
        chosen[:, step] = np.where(taken, last, candidate)
        # An inside-out Fisher-Yates shuffle: swap the new member with a uniformly drawn earlier place.
        place = _uniform_below(keys, 2 * step + 1, step + 1)
        chosen[rows, step], chosen[rows, place] = chosen[rows, place], chosen[rows, step].copy()
    return chosen
