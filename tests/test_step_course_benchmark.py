"""The program that tries courses of the step size, at a size of seconds."""

import json
import re
import sys

import numpy as np
import pytest

from benchmarks import step_course


def test_arms_differ_in_nothing_else_and_are_paired_by_seed(tiny_mnist, tmp_path, monkeypatch, capsys):
    output = tmp_path / "course.json"
    words = ["--root", str(tiny_mnist), "--data", "MNIST", "--hidden", "16", "--epochs", "2", "--batch", "16"]
    words += ["--seeds", "2", "--norms", "swbn-kl", "--budgets", "0.1", "--arms", "constant", "linear", "whitened"]
    monkeypatch.setattr(sys, "argv", ["step_course", *words, "--output", str(output)])
    step_course.main()
    printed = capsys.readouterr().out
    rows = json.loads(output.read_text())["rows"]
    assert [(row["norm"], row["arm"]) for row in rows[:4]] == [
        ("bn", "constant"), ("swbn-kl", "constant"), ("swbn-kl", "linear"), ("swbn-kl", "whitened")
    ]  # fmt: skip
    assert {row["steps"] for row in rows} == {24} and {row["seed"] for row in rows} == {0, 1}
    values = {
        arm: [100 * r["accuracy"] for r in rows if r["arm"] == arm and r["norm"] != "bn"]
        for arm in ("constant", "linear")
    }
    difference = np.subtract(values["linear"], values["constant"])
    half = 12.706204736 * difference.std(ddof=1) / np.sqrt(2)
    spread = f" ± {half:.2f}" if half > 1e-9 else " |"  # two equal differences have no interval
    assert re.search(
        re.escape(f"| linear | {np.mean(values['linear']):.2f}")
        + ".*"
        + re.escape(f"{difference.mean():+.2f}{spread}"),
        printed,
    )


def test_what_would_diverge_is_not_run():
    options = step_course.argparse.Namespace(data="MNIST", root="nowhere", batch=16, epochs=1, steps=10, backbone="mlp")
    found = step_course.run("swbn-kl", 1.0, "constant", 0, options)
    assert "would exceed 0.01" in found["skipped"]
    rows = [{"norm": "swbn-kl", "budget": 1.0, "arm": "constant", "seed": 0, **found}]
    assert "not run: its first step size would exceed 0.01" in step_course.table(rows)


def test_wrong_words(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["step_course", "--root", "x", "--arms", "sideways"])
    with pytest.raises(SystemExit):
        step_course.main()
    assert "sideways" in capsys.readouterr().err
