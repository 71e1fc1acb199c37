"""Confidence intervals of means and paired differences, for a few seeds as well as thousands of episodes or images.

An image of a classifier's test is like an episode, with an accuracy of 1 or 0; "episodes" means either here.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
_ROUNDING = 1e-10  # values this near to each other are equal: of accuracies, as fractions or per cent, it is rounding


class Interval(NamedTuple):
    """A mean with its confidence interval."""

    mean: float
    std: float | None  # standard deviation (n - 1); None for a single value
    half_width: float | None  # of the interval of the mean; None for a single value and for equal ones
    number: int  # of values

    @property
    def leaves_out_zero(self) -> bool | None:
        """Whether the interval excludes zero. None without an interval; False if several values are all 0."""
        if self.half_width is None:
            return False if self.number > 1 and abs(self.mean) <= _ROUNDING else None
        return abs(self.mean) > self.half_width


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the mean with its Student's t interval: ``mean ± t(n - 1) * std / sqrt(n)``.

    It holds for independent values that are about normal; from 50 values on, for any distribution. Values that are
    equal up to rounding have no interval, because two seeds that agree do not prove a spread of 0.

    Args:
        values: at least one.
        confidence: confidence of the interval, in (0, 1).
    """
    mean, number = statistics.fmean(values), len(values)
    if number == 1:
        return Interval(mean, None, None, 1)
    std = statistics.stdev(values)
    return Interval(mean, std, half_width(std, number, confidence), number)


def half_width(std: float, number: int, confidence: float = CONFIDENCE) -> float | None:
    """Return ``t(number - 1) * std / sqrt(number)``; None for fewer than two values, or for equal ones."""
    if number < 2 or std <= _ROUNDING:
        return None
    return t_quantile(number - 1, confidence) * std / math.sqrt(number)


def share_half_width(share: float, number: int) -> float | None:
    """:func:`half_width` of the mean of ``number`` ones and zeros, of which ``share`` are ones; None if all agree."""
    return half_width(math.sqrt(share * (1 - share) * number / max(number - 1, 1)), number)


def paired_difference(
    values: Sequence[float], baseline: Sequence[float], *, confidence: float = CONFIDENCE
) -> Interval:
    """Return the mean of ``values - baseline`` with its interval, pair by pair.

    What the two values of a pair have in common cancels.
    """
    return mean_interval([value - base for value, base in zip(values, baseline, strict=True)], confidence)


def two_way_difference(
    values: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]], *, confidence: float = CONFIDENCE
) -> Interval:
    """Return the mean of ``values - baseline``, with an interval for other seeds *and* other episodes.

    All seeds share the same episodes, so the episodes affect every seed's difference alike. The model is
    ``difference[s, e] = mean + seed[s] + episode[e] + rest[s, e]``, all random. The half-width is ``sqrt(a**2 +
    b**2)``:

    - ``a`` is Student's half-width over the means of the seeds, and at least that of the rest. Otherwise two seeds that
      agree by chance would prove anything.
    - ``b`` is the half-width over the means of the episodes, less the rest, which ``a`` already contains.

    Adding squared half-widths follows Graybill and Wang, J. Amer. Statist. Assoc. 75, 1980.

    Args:
        values: one row per seed with its accuracies on the episodes; at least two seeds and two episodes.
        baseline: the same, for the same seeds on the same episodes.
        confidence: as in :func:`mean_interval`.
    """
    difference = np.asarray(values, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    seeds, episodes = difference.shape
    mean = float(difference.mean())
    of_seeds, of_episodes = difference.mean(1) - mean, difference.mean(0) - mean
    rest = difference - mean - of_seeds[:, None] - of_episodes
    total = seeds * episodes
    # Variances of the mean: what the seeds' means say of it, the episodes' means, and the rest.
    from_rest = (rest**2).sum() / ((seeds - 1) * (episodes - 1)) / total
    from_seeds = (of_seeds**2).sum() / (seeds - 1) / seeds
    from_episodes = (of_episodes**2).sum() / (episodes - 1) / episodes
    t_seeds, t_episodes = (t_quantile(number - 1, confidence) for number in (seeds, episodes))
    a = max(t_seeds**2 * from_seeds, t_episodes**2 * from_rest)
    b = t_episodes**2 * max(from_episodes - from_rest, 0.0)
    half = math.sqrt(a + b)
    return Interval(mean, None, half if half > _ROUNDING else None, total)


def percent(mean: float, half_width: float | None, sign: str = "") -> str:
    """A fraction in percent, with the half-width of its interval where it has one; ``sign`` "+" is for differences."""
    return f"{100 * mean:{sign}.2f}" + (f" ± {100 * half_width:.2f}" if half_width is not None else "")


class Difference(NamedTuple):
    """By how much one side of the pairs is above the other."""

    over_seeds: Interval | None  # for other seeds, on these episodes or images
    over_episodes: Interval | None  # for other episodes, with these networks
    over_both: Interval | None  # for other seeds and other episodes

    @property
    def deciding(self) -> Interval | None:
        """The interval that decides.

        It is the one over both, for several seeds that share their episodes. For one seed it is the one over episodes.
        Without saved episodes it is the one over seeds.
        """
        if self.over_both is not None:
            return self.over_both
        several = self.over_seeds is not None and self.over_seeds.number > 1
        return self.over_seeds if several or self.over_episodes is None else self.over_episodes


def difference(
    values: Sequence[float],
    baseline: Sequence[float],
    episodes: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]] | None = None,
    confidence: float = CONFIDENCE,
) -> Difference:
    """Return the difference between two sides, by seed and, where both were tested on the same episodes, by episode.

    Args:
        values: one per seed; empty if the sides have no seed in common.
        baseline: for the same seeds.
        episodes: for both sides, one row per seed with its accuracies on the same episodes. Without a common seed, any
            rows.
        confidence: as in :func:`mean_interval`.
    """
    over_seeds = paired_difference(values, baseline, confidence=confidence) if values else None
    if episodes is None:
        return Difference(over_seeds, None, None)
    means = [[statistics.fmean(own) for own in zip(*side, strict=True)] for side in episodes]
    over_episodes = paired_difference(*means, confidence=confidence)
    both = len(values) > 1 and len(means[0]) > 1
    return Difference(over_seeds, over_episodes, two_way_difference(*episodes, confidence=confidence) if both else None)


class McNemar(NamedTuple):
    """Which of two classifiers was right where only one was, and how likely so uneven a share is by chance."""

    only_this_right: int  # images
    only_first_right: int
    mcnemar_p: float


def mcnemar(values: Sequence[float], baseline: Sequence[float]) -> McNemar:
    """Return McNemar's test of two classifiers on the same images: the exact two-sided binomial test.

    If both have the same error rate, each image that only one of them got right is as likely this one's as the first
    one's (McNemar, Psychometrika 12, 1947). The images on which they agree do not count.

    Args:
        values: of each image 1 if it was classified correctly, else 0.
        baseline: the same of the first classifier.
    """
    from scipy import stats  # as in t_quantile

    this, first = (np.asarray(side) > 0.5 for side in (values, baseline))
    better, worse = int((this & ~first).sum()), int((first & ~this).sum())
    p = float(stats.binomtest(better, better + worse).pvalue) if better + worse else 1.0
    return McNemar(better, worse, p)


def corrected(comparisons: int) -> float:
    """Return the confidence each of several intervals needs so that all are right in 95% of cases (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / comparisons


@functools.cache
def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the ``t`` with ``P(|T| < t) = confidence`` for Student's distribution; 12.706 for one degree."""
    from scipy import stats  # a second of loading, which what needs no interval is spared

    return float(stats.t.ppf((1 + confidence) / 2, degrees))
