"""Two processes under Lightning give what one gives on the same batches: losses, W, accuracies, checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.reliability import two_processes
from tests.reliability.tiny_runs import assert_same_training

REPOSITORY = Path(__file__).parents[2]
KINDS = (*two_processes.NORMS, "few-shot", "base classes")
pytestmark = pytest.mark.slow  # two processes of Lightning: half a minute, on a busy machine more


@pytest.fixture(scope="module")
def runs(tiny_mnist, tiny_cifar100, tmp_path_factory):
    """What the single process found, and each of two; all jobs in one launch."""
    roots = [str(tiny_mnist), str(tiny_cifar100)]
    folder = tmp_path_factory.mktemp("two")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.reliability.two_processes", json.dumps(roots), str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    threads = torch.get_num_threads()
    one = two_processes.work(1, roots, tmp_path_factory.mktemp("one"))
    torch.set_num_threads(threads)
    both = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    return one, both, folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_do_what_one_does(kind, runs):
    one, both = runs[0][kind], [found[kind] for found in runs[1]]
    assert len(one["losses"]) >= 20
    for step in range(20):
        # Each process's loss is the mean over its half of the batch.
        assert (both[0]["losses"][step] + both[1]["losses"][step]) / 2 == pytest.approx(one["losses"][step], rel=2e-4)
        for first, second, whole in zip(*(found["matrices"][step] for found in (*both, one)), strict=True):
            assert torch.equal(first, second)
            torch.testing.assert_close(first, whole, rtol=2e-4, atol=3e-5)
    for whole, first, second in zip(one["seen"], both[0]["seen"], both[1]["seen"], strict=True):
        assert (
            first != second and whole[0::2] == first and whole[1::2] == second
        )  # process r takes numbers r, r + 2, ...


@pytest.mark.parametrize("kind", KINDS)
def test_every_process_has_the_results_and_the_weights(kind, runs):
    one, both = runs[0][kind], [found[kind] for found in runs[1]]
    assert both[0]["logged"] == both[1]["logged"]
    for split in ("val", "test"):
        ours, expected = both[0]["results"][split], one["results"][split]
        assert ours == both[1]["results"][split] and ours["images"] == expected["images"]
        assert ours["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-9)
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        held_out = {key: value for key, value in expected.items() if key.startswith("held_out")}
        assert bool(held_out) is (kind == "base classes" and split == "val")
        assert {key: ours.get(key) for key in held_out} == pytest.approx(held_out, rel=1e-3)
    saved = torch.load(runs[2] / kind / "last.ckpt", weights_only=True)
    for name, value in both[0]["state"].items():
        assert torch.equal(value, both[1]["state"][name]) and torch.equal(value, saved["state_dict"][name]), name
        if value.is_floating_point():
            torch.testing.assert_close(value, one["state"][name], rtol=1e-3, atol=1e-4)
    assert len(saved["random_streams"]) == 2


def test_the_check_finds_one_number_that_drifts_and_names_it_on_both(runs):
    for found in runs[1]:
        assert "the processes disagree after batch 2 of epoch 0" in found["drift"]
        assert "backbone.layers.2.whitening_matrix" in found["drift"] and "(1 of " in found["drift"]


def test_a_batch_that_is_not_finite_on_one_process_ends_both(runs):
    first, second = (found["not finite"] for found in runs[1])
    assert "it began in another process" in first and "the batch itself is not finite" in second


# SIGTERM is seen one batch later, after which the step of the optimiser and a validation that is due are finished.
ENDED = {
    "process 1": 9, "both, one after the other": 9, "in a validation": 12, "accumulating and validating": 8,
    "at an epoch's end": 6, "in the last step": None,
}  # fmt: skip


@pytest.mark.parametrize("name", two_processes.STOPS)
def test_all_processes_stop_at_the_same_step_and_go_on_bit_for_bit(name, runs):
    for found in runs[1]:
        assert found["stops"][name] == ENDED[name]
    assert_same_training(*(runs[2] / "stops" / name / kind / "last.ckpt" for kind in ("whole", "on")))
