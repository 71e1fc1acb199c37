"""95% intervals of means and of paired differences, right for a few seeds and for thousands of episodes alike."""

import functools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from swbn_lightning.errors import InputError


class Interval(NamedTuple):
    """A mean and what is known of it."""

    mean: float
    std: float | None  # standard deviation (n - 1); None for a single value
    half_width: float | None  # of the 95% interval of the mean; None for a single value, which has none
    number: int  # of values


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean with its 95% interval by Student's t: ``mean ± t(n - 1) * std / sqrt(n)``.

    It holds for independent values that are about normal; of 50 or more, for any.

    Raises:
        InputError: no values.
    """
    if not values:
        raise InputError("an interval needs at least one value, got none.")
    mean, number = statistics.fmean(values), len(values)
    if number == 1:
        return Interval(mean, None, None, 1)
    std = statistics.stdev(values)
    return Interval(mean, std, t_quantile(number - 1) * std / math.sqrt(number), number)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """The mean of ``values - baseline`` with its 95% interval, pair by pair.

    What both of a pair have in common (the seed's network and batches, the episode's images) cancels, so the interval
    can be far narrower than the two means' own.

    Args:
        values: one a pair.
        baseline: the same number, in the same order.

    Raises:
        InputError: different numbers of values, or none.
    """
    if len(values) != len(baseline):
        raise InputError(f"pairs need as many values on both sides, got {len(values)} and {len(baseline)}.")
    return mean_interval([value - base for value, base in zip(values, baseline, strict=True)])


@functools.cache
def t_quantile(degrees: int, confidence: float = 0.95) -> float:
    """The ``t`` with ``P(|T| < t) = confidence`` for Student's distribution: 12.706 for one degree of freedom.

    Args:
        degrees: of freedom, at least 1.
        confidence: of the two-sided interval, in (0, 1).

    Raises:
        InputError: a number out of its range.
    """
    if degrees < 1 or not 0 < confidence < 1:
        raise InputError(f"t needs at least 1 degree of freedom and 0 < confidence < 1, got {degrees}, {confidence}.")
    low, high = 0.0, math.pi / 2  # the probability rises with the angle, so halving finds it
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _probability(angle: float, degrees: int) -> float:
    """``P(|T| < sqrt(degrees) * tan(angle))``: Abramowitz & Stegun, 26.7.3 (odd degrees) and 26.7.4 (even)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    # Terms cos^k with k = 1, 3, ..., degrees - 2 (odd) or 0, 2, ..., degrees - 2 (even), each from the one before it.
    term, total = cosine if odd else 1.0, 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
