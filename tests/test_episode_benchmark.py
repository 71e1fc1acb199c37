"""The benchmark of episodes runs, and its rows are what they say."""

import importlib.util
import json
import sys

import pytest
import torch

from benchmarks import episodes

OURS = {"draw", "prototypes, 64", "matching, 64", "matching, full context, 64", "cross attention, 64x8x8", "images"}


def run(monkeypatch, output, *arguments):
    monkeypatch.setattr(sys, "argv", ["episodes", "--smoke", "--device=cpu", "--output", str(output), *arguments])
    threads = torch.get_num_threads()
    try:
        episodes.main()
    finally:
        torch.set_num_threads(threads)
    return {row["piece"]: row for row in json.loads(output.read_text())["rows"]}


def test_episodes(monkeypatch, tmp_path, capsys):
    rows = run(monkeypatch, tmp_path / "figures.json")
    others = {episodes.LEARN2LEARN: "learn2learn", episodes.EASYFSL: "easyfsl"}
    installed = {name for name, package in others.items() if importlib.util.find_spec(package)}
    assert set(rows) == OURS | {episodes.STEP} | installed
    for row in rows.values():
        assert row["episodes_per_second"] == pytest.approx(row["episodes"] / row["seconds"])
        for name, key in ((episodes.LEARN2LEARN, "times_learn2learn"), (episodes.EASYFSL, "times_easyfsl")):
            expected = row["episodes_per_second"] / rows[name]["episodes_per_second"] if name in installed else None
            assert row[key] == (pytest.approx(expected) if expected else None)
    # 4 episodes of 5 x 20 images of 3x32x32 floats, once at least; and the indices of 4 episodes.
    assert rows["images"]["peak_bytes"] > 100 * 3 * 32 * 32 * 4 and 0 < rows["draw"]["peak_bytes"] < 2**20
    shown = capsys.readouterr().out
    assert "| cross attention, 64x8x8 | 4 |" in shown and "% of the time of ResNet20's step" in shown
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path / "none.json", "--ways=0")


def test_batches_are_the_episodes_asked_for(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["episodes", "--smoke", "--step-episodes=2"])
    options = episodes._options()
    options.step_episodes = 2
    labels = torch.arange(6).repeat_interleave(25)
    pixels = torch.randint(0, 256, (150, 3, 32, 32), dtype=torch.uint8)
    training = episodes.Training(pixels, labels, options, torch.device("cpu"))
    first, second = training._next(), training._next()
    assert first.support.shape == (2, 5, 5, 3, 32, 32) and first.query.shape == (2, 75, 3, 32, 32)
    assert not torch.equal(first.classes, second.classes)  # a new one each time
    before = [p.clone() for p in training.model.parameters()]
    training.steps(2)
    assert any(not torch.equal(p, b) for p, b in zip(training.model.parameters(), before, strict=True))


def test_peak_memory_is_what_is_held_at_once():
    def run():
        for _ in range(3):
            torch.empty(2**18, dtype=torch.float32).add_(1)  # 1 MiB, three times, one at a time
        return bytearray(2**20)

    assert 2 * 2**20 <= episodes.peak(run) < 2.2 * 2**20
