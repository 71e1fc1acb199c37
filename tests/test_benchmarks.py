"""The benchmarks run, write what they print, and measure what they say."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import episodes, gpu, layer, memory, network, scaling
from swbn_lightning import DBN2d, IterNorm2d, SWBN2d
from swbn_lightning.norms.passes import kernels
from swbn_lightning.runs.study.cells import Variant

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a benchmark with arguments; the content of its JSON file."""

    def start(module, *arguments):
        output = tmp_path / "figures.json"
        monkeypatch.setattr(sys, "argv", ["benchmark", "--output", str(output), *arguments])
        module.main()
        return json.loads(output.read_text())

    return start


def test_layer(run, capsys):
    shapes = ["--device=cpu", "--shapes", "4x8x4x4", "4x256x2x2", "--rounds=1"]
    content = run(layer, *shapes, "--norms", *layer.NORMS, "swbn-fro:num_groups=2")
    found = {(row["norm"], row["mode"], row["shape"]): row for row in content["rows"]}
    assert len(found) == 2 * (len(layer.NORMS) + 1 + len(layer.EVALUATED) + 1)
    assert all(row["ms"] > 0 and row["paper_ratio"] is None for row in found.values())  # other shapes than the paper's
    assert "torch" in content["environment"]
    assert "| swbn-fro:num_groups=2, train |" in capsys.readouterr().out


@pytest.mark.skipif(bool(kernels.available()), reason="the kernels run here")
def test_rows_by_kernels(run, capsys):
    for module in (layer, network, memory):
        with pytest.raises(SystemExit):
            run(module, "--device=cpu", "--norms", "bn", "swbn-fro:kernels,num_groups=4")
        assert f"swbn-fro:kernels,num_groups=4: {kernels.available().reason}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_gpus_program_keeps_what_it_has(run, tmp_path, capsys):
    found = run(gpu, "--smoke", "--sections", "memory")["sections"]
    assert found["memory"]["verdict"] == "done"
    assert {row["norm"] for row in found["memory"]["rows"]} >= {"bn", "swbn-fro"} and found["memory"]["tables"]
    assert run(gpu, "--smoke", "--budget", "4")["sections"] == {}
    assert "left out, the budget of 4.0 s is spent" in capsys.readouterr().out
    section = gpu.Section("layer", tmp_path / "figures.json", smoke=True)
    assert gpu._run("memory", section.output, True, 0.01) == "stopped, out of budget"

    def rows():
        yield {"norm": "bn"}
        raise RuntimeError("out of memory")

    section.attempt(lambda section: section.add(rows(), str, "Half"))
    stored = json.loads(section.output.read_text())["sections"]["layer"]
    assert stored["rows"] == [{"title": "Half", "norm": "bn"}] and "out of memory" in stored["errors"][0]


@pytest.mark.slow
def test_all_of_the_gpus_program(run):
    pytest.importorskip("triton")
    found = run(gpu, "--smoke", "--budget", "3000")["sections"]  # a machine may be slow
    assert set(found) == set(gpu.SECTIONS)
    assert all(section["verdict"] == "done" and not section["errors"] for section in found.values())
    assert all(row["ok"] for row in found["check"]["rows"])
    assert found["tests"]["rows"][0]["returncode"] == 0
    assert {row["kernel"] for row in found["alone"]["rows"]} >= {"moments", "direction", "gradient"}


@pytest.mark.slow
def test_network(run):
    content = run(network, "--device=cpu", "--batch=2", "--rounds=1", "--norms", "bn", "iternorm")
    assert {row["norm"] for row in content["rows"]} >= {"bn", "iternorm", "fused swbn-fro", "none"}


def test_memory_is_batchnorms(run):
    content = run(memory, "--device=cpu", "--channels=16", "--side=32", "--batch=16", "--depth=4")
    peak = {(row["norm"], row["dtype"]): row["peak_bytes"] for row in content["rows"]}
    activation = 16 * 16 * 32 * 32 * 4
    assert peak["bn", "float32"] == pytest.approx((2 * 4 + 1) * activation, rel=0.01)
    for dtype in ("float32", "bfloat16"):
        for norm, most in (("swbn-fro", 1.02), ("swbn-kl", 1.02), ("iternorm", 1.15)):
            assert peak[norm, dtype] <= most * peak["bn", dtype], (norm, dtype)


def test_options_of_a_norm():
    assert Variant.parse("bn") == Variant("bn", "bn", None)
    given = Variant.parse("swbn-kl:step_size=1e-4,num_groups=2,criterion=auto,affine=false")
    assert given.name == "swbn-kl"
    assert given.options == {"step_size": 1e-4, "num_groups": 2, "criterion": "auto", "affine": False}


def test_the_papers_ratios():
    # Zhang et al., CVPR 2021, table of the single layer's wall-clock time.
    assert layer.paper_ratio("iternorm", (64, 2048, 32, 32)) == pytest.approx(475.34 / 11.44)
    for norm, shape in (("dbn", (64, 256, 32, 32)), ("swbn-kl", (64, 64, 32, 32)), ("swbn-kl", (4, 256, 32, 32))):
        assert layer.paper_ratio(norm, shape) is None


@pytest.mark.parametrize("kind", [SWBN2d, IterNorm2d, DBN2d])
def test_the_collectives_alone_are_those_of_a_step(kind, monkeypatch):
    sent = []  # what a process of two gives to each collective
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lambda values: sent.append(values.numel()))
    layers = nn.Sequential(kind(4), kind(8, num_groups=2))
    x = torch.randn(32, 4, 3, 3, requires_grad=True)
    layers[1](torch.cat([layers[0](x)] * 2, 1) + torch.randn(32, 8, 3, 3)).square().sum().backward()
    of_a_step = sent.copy()
    sent.clear()
    scaling._collectives(list(layers), torch.device("cpu"))()
    assert sent == of_a_step and len(sent) == 4


@pytest.mark.slow
def test_scaling(tmp_path):
    output = tmp_path / "scaling.json"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
        "benchmarks.scaling", "--batch", "4", "--rounds", "1", "--device", "cpu", "--output", str(output),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {(row["norm"], row["what"]): row["ms"] for row in json.loads(output.read_text())["rows"]}
    assert len(rows) == 7 and all(ms > 0 for ms in rows.values()) and "| swbn-fro |" in done.stdout


def test_episodes(run, capsys):
    threads = torch.get_num_threads()
    content = run(episodes, "--smoke", "--device=cpu")
    torch.set_num_threads(threads)
    rows = {row["piece"]: row for row in content["rows"]}
    for piece, package in ((episodes.LEARN2LEARN, "learn2learn"), (episodes.SKLEARN, "sklearn")):
        assert (piece in rows) == bool(importlib.util.find_spec(package))
    assert {f"{name}, 64" for name in episodes.HEADS} < set(rows)
    for row in rows.values():
        assert row["episodes_per_second"] == pytest.approx(row["episodes"] / row["seconds"])
    # 4 episodes of 5 x 20 images of 3x32x32 floats, once at least; and the indices of 4 episodes.
    assert rows["images"]["peak_bytes"] > 100 * 3 * 32 * 32 * 4 and 0 < rows["draw"]["peak_bytes"] < 2**20
    shown = capsys.readouterr().out
    assert "| cross attention, 64x8x8 | 4 |" in shown and "% of the time of ResNet20's step" in shown
    with pytest.raises(SystemExit):
        run(episodes, "--smoke", "--ways=0")
