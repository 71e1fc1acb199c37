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
KINDS = (*two_processes.NORMS, "few-shot")
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
def test_the_first_20_losses_and_whitening_matrices_are_those_of_one_process(kind, runs):
    one, both = runs[0][kind], [found[kind] for found in runs[1]]
    assert len(one["losses"]) >= 20
    for step in range(20):
        # Each process's loss is the mean over its half of the batch.
        assert (both[0]["losses"][step] + both[1]["losses"][step]) / 2 == pytest.approx(one["losses"][step], rel=2e-4)
        for first, second, whole in zip(
            both[0]["matrices"][step], both[1]["matrices"][step], one["matrices"][step], strict=True
        ):
            assert torch.equal(first, second)
            torch.testing.assert_close(first, whole, rtol=2e-4, atol=3e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_batches_of_all_processes_are_that_of_one(kind, runs):
    one, both = runs[0][kind], [found[kind] for found in runs[1]]
    for whole, first, second in zip(one["seen"], both[0]["seen"], both[1]["seen"], strict=True):
        assert first != second and sorted(first + second) == sorted(whole)
        assert whole[0::2] == first and whole[1::2] == second  # process r takes numbers r, r + 2, ...


@pytest.mark.parametrize("kind", KINDS)
def test_accuracies_are_the_same_to_the_digit_and_every_process_has_them(kind, runs):
    one, both = runs[0][kind], [found[kind] for found in runs[1]]
    for split in ("val", "test"):
        assert both[0]["results"][split] == both[1]["results"][split]
        assert both[0]["results"][split]["images"] == one["results"][split]["images"]
        assert both[0]["results"][split]["accuracy"] == pytest.approx(one["results"][split]["accuracy"], abs=1e-9)
        assert both[0]["results"][split]["loss"] == pytest.approx(one["results"][split]["loss"], rel=1e-3)
    assert both[0]["logged"] == both[1]["logged"]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_statistics_and_the_checkpoint_agree(kind, runs):
    both = [found[kind]["state"] for found in runs[1]]
    saved = torch.load(runs[2] / kind / "last.ckpt", weights_only=True)
    for name, value in both[0].items():
        assert torch.equal(value, both[1][name]) and torch.equal(value, saved["state_dict"][name]), name
        if value.is_floating_point():
            torch.testing.assert_close(value, runs[0][kind]["state"][name], rtol=1e-3, atol=1e-4)
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
    "process 0": 9, "process 1": 9, "both, one after the other": 9, "in a validation": 12, "accumulating": 8,
    "accumulating and validating": 8,
    "at an epoch's end": 6, "in the last step": None,
}  # fmt: skip


@pytest.mark.parametrize("name", two_processes.STOPS)
def test_all_processes_stop_at_the_same_step_and_go_on_bit_for_bit(name, runs):
    for found in runs[1]:
        assert found["stops"][name] == ENDED[name]
    assert_same_training(*(runs[2] / "stops" / name / kind / "last.ckpt" for kind in ("whole", "on")))
