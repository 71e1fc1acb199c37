"""The program that watches a long training: its figure, without the hour of the training."""

import statistics

import pytest

from benchmarks.soak import growth


def test_growth_is_of_the_last_quarter_over_the_third():
    third, last = [10, *[20] * 9, 90], [1, *[22] * 9, 23]  # one sample in ten is passed over
    assert growth([*[5] * 11, *[100] * 11, *third, *last]) == pytest.approx(0.1)
    assert growth([5, 5, 100, 100, 10, 30, 11, 11], statistics.mean) == pytest.approx(-0.45)
    assert growth([7]) == 0
