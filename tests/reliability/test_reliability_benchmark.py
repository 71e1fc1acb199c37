"""The program that does faults to trainings: its parts, without the minutes of its trainings."""

import statistics

import pytest
import torch

from benchmarks.reliability.__main__ import Outcome, being_written, growth, last_logged_step, same, steps_of


def test_a_run_is_read_as_far_as_it_got(tmp_path):
    assert steps_of(tmp_path) == 0 and last_logged_step(tmp_path) == 0 and not being_written(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    torch.save({"global_step": 64}, tmp_path / "checkpoints" / "last.ckpt")
    (tmp_path / "checkpoints" / ".last.ckpt.1.tmp").touch()
    (tmp_path / "metrics.csv").write_text("epoch,step,loss\n0,0,1.5\n1,41,\n1,4")
    assert steps_of(tmp_path) == 64 and last_logged_step(tmp_path) == 42 and being_written(tmp_path)


def test_same_is_bit_for_bit():
    first = {"a": [torch.ones(2), 1], "b": (None, "x")}
    assert same(first, {"a": [torch.ones(2), 1], "b": (None, "x")})
    for other in (
        {"a": [torch.ones(2) + 1e-7, 1], "b": (None, "x")}, {"a": [torch.ones(2), 2], "b": (None, "x")},
        {"a": [torch.ones(2)], "b": (None, "x")}, {"a": [torch.ones(2), 1]},
    ):  # fmt: skip
        assert not same(first, other)


def test_growth_is_of_the_last_quarter_over_the_third():
    third, last = [10, *[20] * 9, 90], [1, *[22] * 9, 23]  # one sample in ten is passed over
    assert growth([*[5] * 11, *[100] * 11, *third, *last]) == pytest.approx(0.1)
    assert growth([5, 5, 100, 100, 10, 30, 11, 11], statistics.mean) == pytest.approx(-0.45)
    assert growth([7]) == 0


def test_a_line_says_what_was_lost():
    assert str(Outcome("SIGTERM", 143, 0, True)) == "| SIGTERM | 143 | 0 steps trained again | yes, bit for bit |"
    assert "came too late" in str(Outcome("x", 0, None, True)) and "NO" in str(Outcome("x", -9, 3, False))
