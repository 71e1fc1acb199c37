"""Student's t and the intervals made with it, against printed tables and numpy."""

import numpy as np
import pytest

from swbn_lightning.errors import InputError
from swbn_lightning.intervals import mean_interval, paired_difference, t_quantile

# Two-sided, as every statistics book prints them (Abramowitz & Stegun, table 26.10, to three places).
PRINTED = {
    0.95: {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 9: 2.262, 10: 2.228, 30: 2.042, 120: 1.980},
    0.99: {1: 63.657, 2: 9.925, 3: 5.841, 4: 4.604, 5: 4.032, 10: 3.169, 30: 2.750},
    0.50: {1: 1.000, 2: 0.816, 3: 0.765, 4: 0.741, 9: 0.703},
}


@pytest.mark.parametrize("confidence", PRINTED)
def test_quantiles_are_the_printed_ones(confidence):
    for degrees, expected in PRINTED[confidence].items():
        assert t_quantile(degrees, confidence) == pytest.approx(expected, abs=5.1e-4)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 8, 51])
def test_the_density_between_the_quantiles_adds_up(degrees):
    bound = t_quantile(degrees)
    t = np.linspace(-bound, bound, 200_001)
    density = (1 + t**2 / degrees) ** (-(degrees + 1) / 2)
    far = np.tan(np.linspace(-np.pi / 2 + 1e-6, np.pi / 2 - 1e-6, 400_001))  # all of the line
    whole = (1 + far**2 / degrees) ** (-(degrees + 1) / 2)
    assert np.trapezoid(density, t) / np.trapezoid(whole, far) == pytest.approx(0.95, abs=2e-5)


def test_many_degrees_come_to_the_normal_distribution():
    assert t_quantile(9_999) == pytest.approx(1.95996 + (1.95996**3 + 1.95996) / (4 * 9_999), abs=1e-5)


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


def test_what_has_no_interval_is_an_error():
    with pytest.raises(InputError, match="at least one value"):
        mean_interval([])
    with pytest.raises(InputError, match="2 and 1"):
        paired_difference([0.1, 0.2], [0.1])
    for degrees, confidence in ((0, 0.95), (3, 1.0), (3, 0.0)):
        with pytest.raises(InputError, match=f"got {degrees}, {confidence}"):
            t_quantile(degrees, confidence)
