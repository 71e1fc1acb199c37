"""Student's t and the intervals made with it, against printed tables and numpy."""

import math

import numpy as np
import pytest

from swbn_lightning.runs.intervals import (
    corrected,
    half_width,
    mcnemar,
    mean_interval,
    paired_difference,
    t_quantile,
    two_way_difference,
)

# Two-sided, as every statistics book prints them (Abramowitz & Stegun, table 26.10, to three places).
PRINTED = {
    0.95: {1: 12.706, 2: 4.303, 4: 2.776, 10: 2.228, 120: 1.980},
    0.99: {1: 63.657, 2: 9.925, 10: 3.169},
    0.50: {1: 1.000, 9: 0.703},
}


def test_quantiles_are_the_printed_ones():
    for confidence, printed in PRINTED.items():
        for degrees, expected in printed.items():
            assert t_quantile(degrees, confidence) == pytest.approx(expected, abs=5.1e-4)


def test_an_interval_is_the_textbooks():
    values = np.array([0.61, 0.64, 0.58])
    found = mean_interval(values.tolist())
    assert found.mean == pytest.approx(values.mean()) and found.std == pytest.approx(values.std(ddof=1))
    assert found.half_width == pytest.approx(4.303 * values.std(ddof=1) / np.sqrt(3), rel=1e-4) and found.number == 3
    assert mean_interval([0.5]) == (0.5, None, None, 1)


def test_pairs_are_narrower_than_their_sides():
    rng = np.random.default_rng(0)
    base = rng.normal(0.6, 0.1, 200)
    values = base + rng.normal(0.02, 0.01, 200)
    found = paired_difference(values.tolist(), base.tolist())
    difference = values - base
    assert found.mean == pytest.approx(difference.mean())
    assert found.half_width == pytest.approx(1.97196 * difference.std(ddof=1) / np.sqrt(200), rel=1e-4)  # t(199)
    assert found.half_width < 0.2 * mean_interval(values.tolist()).half_width


def test_equal_values_have_no_interval():
    for values in ([0.5, 0.5], [0.1 + 0.2, 0.3], [0.25] * 9):
        found = mean_interval(values)
        assert found.half_width is None and found.leaves_out_zero is None
    assert mean_interval([0.0, 0.0]).leaves_out_zero is False  # the same run twice
    assert paired_difference([0.65, 0.55], [0.6, 0.5]).leaves_out_zero is None
    assert half_width(0.1, 1) is None
    assert mean_interval([0.61, 0.64]).leaves_out_zero is True


def test_many_comparisons_need_wider_intervals():
    assert corrected(1) == pytest.approx(0.95) and corrected(10) == pytest.approx(0.995)
    values = [0.61, 0.64, 0.58]
    wide = mean_interval(values, 0.99).half_width
    assert wide / mean_interval(values).half_width == pytest.approx(9.925 / 4.303, rel=1e-3)


@pytest.mark.parametrize(("better", "worse"), [(12, 3), (3, 12), (5, 5), (1, 0), (0, 0), (140, 100)])
def test_mcnemars_test_is_the_binomials_two_tails(better, worse):
    sides = np.array([[1, 0]] * better + [[0, 1]] * worse + [[1, 1]] * 30 + [[0, 0]] * 9).T
    found = mcnemar(*sides)
    number, few = better + worse, min(better, worse)
    tail = sum(math.comb(number, k) for k in range(few + 1)) / 2**number
    assert found[:2] == (better, worse) and found.mcnemar_p == pytest.approx(min(1, 2 * tail), rel=1e-9)


def null_differences(rng, seeds, spreads, episodes=2000):
    """Differences of two methods that do not differ: luck of the seed, of the episode, of both."""
    seed, episode, rest = spreads
    return rng.normal(0, seed, (seeds, 1)) + rng.normal(0, episode, episodes) + rng.normal(0, rest, (seeds, episodes))


@pytest.mark.parametrize("seeds", [2, 5])
@pytest.mark.parametrize("spreads", [(0.0, 0.03, 0.06), (0.005, 0.03, 0.06), (0.0, 0.0, 0.07)])
def test_null_differences_over_shared_seeds_and_episodes_are_rarely_called_real(seeds, spreads):
    rng, trials, called = np.random.default_rng(seeds), 300, 0
    zeros = np.zeros((seeds, 2000))
    for _ in range(trials):
        called += two_way_difference(null_differences(rng, seeds, spreads), zeros).leaves_out_zero
    assert called / trials < 0.085  # 5%, or less; 0.085 is 2.8 standard deviations above


@pytest.mark.parametrize(("seeds", "spread"), [(2, 0.0), (3, 0.3), (5, 0.1)])
def test_null_differences_over_shared_images_are_rarely_called_real(seeds, spread):
    rng, called = np.random.default_rng(seeds), 0
    for _ in range(300):
        easy = rng.normal(2, 2.5, 1000)  # in logits: some images are easy for all, some for one method, seeds differ
        logits = easy + rng.normal(0, 1, (2, 1, 1000)) + rng.normal(0, spread, (2, seeds, 1))
        values, baseline = (rng.random(logits.shape) < 1 / (1 + np.exp(-logits))).astype(float)
        called += bool(two_way_difference(values, baseline).leaves_out_zero)
    assert called / 300 < 0.085  # as above


def test_a_two_way_interval_is_the_textbooks():
    """One way is the other's where one has no part in the spread."""
    rng = np.random.default_rng(0)
    of_episodes = rng.normal(0.02, 0.05, 500)
    found = two_way_difference(np.tile(of_episodes, (3, 1)), np.zeros((3, 500)))  # seeds that agree in all
    assert found.mean == pytest.approx(of_episodes.mean())
    assert found.half_width == pytest.approx(mean_interval(of_episodes.tolist()).half_width)
    of_seeds = np.array([[0.01], [0.03], [0.02]])
    found = two_way_difference(np.tile(of_seeds, (1, 500)), np.zeros((3, 500)))
    assert found.half_width == pytest.approx(mean_interval([0.01, 0.03, 0.02]).half_width)
