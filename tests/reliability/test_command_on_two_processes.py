"""The command on two processes with all that a user has, the progress bar included, in every documented way."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCALING = REPOSITORY / "configs" / "scaling"
SMALL = [
    "--config", str(REPOSITORY / "configs" / "quickstart.yaml"), "--data.val.episodes=50",
    "--data.train={ways: 5, shots: 1, queries: 3, episodes: 6}", "--data.test.episodes=50",
    "--trainer.max_epochs=2", "--whiteness.num_images=64", "--run.name=two",
    "--model.backbone=mlp", "--model.backbone_args={hidden: [16, 16]}",
]  # fmt: skip
CPU = ["--trainer.accelerator=cpu", "--trainer.sync_batchnorm=false"]


def start(folder, *arguments, launcher=("-m",), **environment):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *launcher, "cli", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def assert_ends_well(*processes):
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs[-1][-3000:]
    assert not any("Warning" in output for output in outputs), outputs  # Lightning's and torch's, of their own inside
    return outputs[0]


def results(folder, number):
    return json.loads((folder / "runs" / "two" / f"version_{number}" / "results.json").read_text())


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_training_with_the_bar(tmp_path):
    """Process 0 reduces its metrics for the bar, and was in another collective than process 1."""
    given = ["fit", *SMALL, *CPU, "--trainer.devices=2", "--trainer.strategy=ddp"]
    output = assert_ends_well(start(tmp_path, *given, FORCE_COLOR="1", TERM="xterm"))
    assert results(tmp_path, 0)["completed"] and "Epoch 2/2" in output and " done, step" not in output


def test_a_log_of_two_processes_has_one_line_an_epoch(tmp_path):
    given = ["fit", *SMALL, *CPU, "--trainer.devices=2", "--trainer.strategy=ddp"]
    output = assert_ends_well(start(tmp_path, *given, FORCE_COLOR="", TERM="dumb"))
    lines = [line for line in output.splitlines() if " done, step" in line]
    assert [line.partition(" epoch ")[2].partition(":")[0] for line in lines] == [
        "1/2 done, step 3",
        "2/2 done, step 6",
    ]


@pytest.mark.slow
def test_training_validation_and_test_with_the_overlay(tmp_path):
    given = [*SMALL, "--config", str(SCALING / "ddp.yaml"), *CPU, "--trainer.devices=2"]
    assert_ends_well(start(tmp_path, "fit", *given))
    for number, command in enumerate(("validate", "test"), start=1):
        assert_ends_well(start(tmp_path, command, *given, "--ckpt_path=runs/two/version_0"))
        assert results(tmp_path, number)["results"][0]["split"] == command.replace("validate", "val")
    best = results(tmp_path, 0)["results"][0]["accuracy"]
    assert results(tmp_path, 1)["results"][0]["accuracy"] == pytest.approx(best, abs=1e-9)
    assert_ends_well(start(tmp_path, "fit", *given, "--ckpt_path=runs/two/version_0", "--trainer.max_epochs=3"))
    assert results(tmp_path, 3)["completed"]


@pytest.mark.slow
def test_two_machines(tmp_path):
    """Each has an address of its own, here on the loopback."""
    port, machines = free_port(), []
    for rank in range(2):
        torchrun = (
            "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1",
            "--master-addr=127.0.0.1", f"--master-port={port}", "-m",
        )  # fmt: skip
        given = [*SMALL, "--config", str(SCALING / "several_machines.yaml"), *CPU, "--trainer.devices=1"]
        machines.append(start(tmp_path, "fit", *given, launcher=torchrun))
    assert_ends_well(*machines)
    assert results(tmp_path, 0)["completed"]
