"""What the scaling benchmark sends is what the layers send, and its command gives a table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.scaling import _collectives
from swbn_lightning import DBN2d, IterNorm2d, SWBN2d

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def sent(monkeypatch):
    """The sizes of what a process of two gives to each collective, in order."""
    sizes = []

    def all_gather(gathered, values):
        sizes.append(("gather", values.numel()))
        for part in gathered:
            part.copy_(values)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", lambda values: sizes.append(("reduce", values.numel())))
    return sizes


@pytest.mark.parametrize("kind", [SWBN2d, IterNorm2d, DBN2d])
def test_the_collectives_alone_are_those_of_a_step(kind, sent):
    layers = nn.Sequential(kind(4), kind(8, num_groups=2))
    x = torch.randn(32, 4, 3, 3, requires_grad=True)
    layers[1](torch.cat([layers[0](x)] * 2, 1) + torch.randn(32, 8, 3, 3)).square().sum().backward()
    of_a_step = sent.copy()
    sent.clear()
    _collectives(list(layers), torch.device("cpu"))()
    assert sent == of_a_step and len(sent) >= 6


@pytest.mark.slow
def test_command(tmp_path):
    output = tmp_path / "scaling.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
        "benchmarks.scaling", "--batch", "4", "--rounds", "1", "--device", "cpu", "--output", str(output),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(output.read_text())["rows"]
    assert {(row["norm"], row["what"]) for row in rows} == {
        ("bn", "off"), *((norm, what) for norm in ("swbn-fro", "iternorm") for what in ("off", "on", "collectives"))
    }  # fmt: skip
    assert all(row["ms"] > 0 for row in rows) and "| swbn-fro |" in done.stdout
