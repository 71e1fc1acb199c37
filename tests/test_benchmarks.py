"""The benchmarks run, write what they print, and compare with baselines that compute the same."""

import json
import sys

import pytest
import torch

from benchmarks import gpu, layer, memory, network, timing
from benchmarks.literal import LiteralIterNorm, LiteralSWBN
from swbn_lightning import IterNorm2d, SWBN2d
from swbn_lightning.errors import InputError
from swbn_lightning.norms.passes import kernels
from swbn_lightning.runs.study.variant import Variant


def run(module, monkeypatch, tmp_path, *arguments):
    output = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments, "--device=cpu", "--output", str(output)])
    module.main()
    return json.loads(output.read_text())


def test_layer(monkeypatch, tmp_path, capsys):
    shapes = ["--shapes", "4x8x4x4", "4x256x2x2", "--rounds=1"]
    content = run(layer, monkeypatch, tmp_path, *shapes, "--norms", *layer.NORMS, "swbn-fro:num_groups=2")
    found = {(row["norm"], row["mode"], row["shape"]): row for row in content["rows"]}
    assert len(found) == 2 * (len(layer.NORMS) + 1 + len(layer.EVALUATED) + 1)
    assert all(row["ms"] > 0 for row in found.values())
    assert {row["paper_ratio"] for row in found.values()} == {None}  # other shapes than the paper's
    assert "torch" in content["environment"]
    assert "| swbn-fro:num_groups=2, train |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["layer", "--channels", "16", "512", "--device=cpu"])
    assert layer.parse().shapes == ["64x16x32x32", "64x512x6x6"]
    with pytest.raises(SystemExit):
        run(layer, monkeypatch, tmp_path, "--graph")
    assert "--graph needs a GPU" in capsys.readouterr().err


def test_rows_by_kernels(monkeypatch, tmp_path, capsys):
    assert timing.split_kernels("swbn-fro:kernels,num_groups=4") == ("swbn-fro:num_groups=4", True)
    assert timing.split_kernels("swbn-fro:num_groups=2") == ("swbn-fro:num_groups=2", False)
    assert timing.split_kernels("bn") == ("bn", False)
    switched = []
    timing.by_kernels(lambda: switched.append(kernels.enabled()), False)()
    assert switched == [False]
    if not kernels.available():
        for module in (layer, network, memory):
            with pytest.raises(SystemExit):
                run(module, monkeypatch, tmp_path, "--norms", "bn", "swbn-fro:kernels")
            assert f"swbn-fro:kernels: {kernels.available().reason}" in capsys.readouterr().err


def run_gpu(monkeypatch, tmp_path, *arguments):
    output = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--smoke", "--output", str(output), *arguments])
    gpu.main()
    return json.loads(output.read_text())["sections"]


@pytest.mark.slow
def test_the_gpus_program_keeps_what_it_has(monkeypatch, tmp_path, capsys):
    found = run_gpu(monkeypatch, tmp_path, "--sections", "memory")
    assert found["memory"]["verdict"] == "done"
    assert {row["norm"] for row in found["memory"]["rows"]} >= {"bn", "swbn-fro"} and found["memory"]["tables"]
    assert run_gpu(monkeypatch, tmp_path, "--budget", "4") == {}
    assert "left out, the budget of 4.0 s is spent" in capsys.readouterr().out
    section = gpu.Section("layer", tmp_path / "gpu.json", smoke=True)
    assert gpu._run("memory", section.output, True, 0.01) == "stopped, out of budget"

    def rows():
        yield {"norm": "bn"}
        raise RuntimeError("out of memory")

    def half(section):
        section.add(rows(), str, "Half")

    section.attempt(half)
    stored = json.loads(section.output.read_text())["sections"]["layer"]
    assert stored["rows"] == [{"title": "Half", "norm": "bn"}] and "out of memory" in stored["errors"][0]
    if not kernels.available():
        monkeypatch.setattr(sys, "argv", ["gpu"])
        with pytest.raises(SystemExit):
            gpu.main()
        assert "--smoke tries the program out on a CPU" in capsys.readouterr().err


@pytest.mark.slow
def test_all_of_the_gpus_program(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    found = run_gpu(monkeypatch, tmp_path, "--budget", "3000")  # a machine may be slow
    assert set(found) == set(gpu.SECTIONS)
    assert all(section["verdict"] == "done" and not section["errors"] for section in found.values())
    assert all(row["ok"] for row in found["check"]["rows"])
    assert found["tests"]["rows"][0]["returncode"] == 0
    assert {row["kernel"] for row in found["alone"]["rows"]} >= {"moments", "direction", "gradient"}


@pytest.mark.slow
def test_network(monkeypatch, tmp_path):
    content = run(network, monkeypatch, tmp_path, "--batch=2", "--rounds=1", "--norms", "bn", "literal-iternorm")
    assert {row["norm"] for row in content["rows"]} >= {"bn", "literal-iternorm", "fused swbn-fro", "none"}


def test_memory_is_batchnorms(monkeypatch, tmp_path):
    content = run(memory, monkeypatch, tmp_path, "--channels=16", "--side=32", "--batch=16", "--depth=4")
    peak = {(row["norm"], row["dtype"]): row["peak_bytes"] for row in content["rows"]}
    activation = 16 * 16 * 32 * 32 * 4
    assert peak["bn", "float32"] == pytest.approx((2 * 4 + 1) * activation, rel=0.01)
    for dtype in ("float32", "bfloat16"):
        for norm, most in (("swbn-fro", 1.02), ("swbn-kl", 1.02), ("iternorm", 1.15)):
            assert peak[norm, dtype] <= most * peak["bn", dtype], (norm, dtype)
        assert peak["literal-swbn", dtype] > 1.5 * peak["bn", dtype]


@pytest.mark.parametrize(("literal", "ours"), [(LiteralSWBN, SWBN2d), (LiteralIterNorm, IterNorm2d)])
def test_the_literal_layers_compute_the_same(literal, ours):
    torch.manual_seed(0)
    mine, theirs = ours(6), literal(6)
    for _ in range(3):
        x = torch.randn(8, 6, 5, 5)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = mine(a), theirs(b)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        y.pow(3).sum().backward(), expected.pow(3).sum().backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(mine.whitening_matrix[0], theirs.whitening_matrix, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.running_mean, theirs.running_mean)


def test_options_of_a_norm():
    assert Variant.parse("bn") == Variant("bn", "bn", None)
    given = Variant.parse("swbn-kl:step_size=1e-4,num_groups=2,criterion=auto,affine=false")
    assert given.name == "swbn-kl"
    assert given.options == {"step_size": 1e-4, "num_groups": 2, "criterion": "auto", "affine": False}
    for wrong in ("bn:", "bn:eps", "bn:eps=1,momentum"):
        with pytest.raises(InputError, match="options of bn are given as bn:KEY=VALUE"):
            Variant.parse(wrong)


def test_the_papers_ratios():
    # Zhang et al., CVPR 2021, table of the single layer's wall-clock time.
    assert layer.paper_ratio("iternorm", (64, 2048, 32, 32)) == pytest.approx(475.34 / 11.44)
    assert layer.paper_ratio("swbn-kl", (64, 1024, 32, 32)) == pytest.approx(72.5 / 5.01)
    for norm, shape in (("dbn", (64, 256, 32, 32)), ("swbn-kl", (64, 64, 32, 32)), ("swbn-kl", (64, 256, 8, 8)),
                        ("swbn-kl", (4, 256, 32, 32))):  # fmt: skip
        assert layer.paper_ratio(norm, shape) is None
