"""A screen that fails ends no run, and files are written before anything is shown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.text import Text

from cli import main
from swbn_lightning.files.screen import Screen, table_console
from swbn_lightning.training.callbacks.result_table import result_table
from tests.conftest import REPOSITORY


def screen(kind, tmp_path):
    if kind == "a full disk":
        return Path("/dev/full").open("w")
    if kind == "a reader that has gone":
        reading, writing = os.pipe()
        os.close(reading)
        return os.fdopen(writing, "w")
    return None if kind == "none" else (tmp_path / "screen").open("w", encoding=kind)


@pytest.mark.parametrize("kind", ["a full disk", "a reader that has gone", "none", "latin-1"])
def test_a_test_keeps_its_results_whatever_the_screen_is(kind, trained, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen(kind, tmp_path))
        main(["test", *trained[1], f"--run.root={tmp_path}", "--run.report=true", "--ckpt_path", str(trained[0])])
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.close()  # as Python does at its end: nothing is left that fails
    folder = tmp_path / "quickstart" / "version_0"
    results = json.loads((folder / "results.json").read_text())
    assert results["results"][0]["episodes"] == 5 and results["ended"].endswith("+00:00")
    assert (folder / "episodes.csv").exists() and "1-shot" in (folder / "report.html").read_text()
    if kind == "latin-1":
        text = (tmp_path / "screen").read_text(encoding=kind)
        assert "run folder: " in text and "start ? end" in text and "±" in text


def test_letters_that_a_full_disk_lacks():
    with Path("/dev/full").open("w", encoding="latin-1", buffering=1) as disk:
        full = Screen(disk)
        assert full.write("start → end\n") and full.lost.strerror == "No space left on device"


def test_a_comparison_that_could_not_be_shown_is_no_success(tmp_path):
    """What it shows is what it is for; but a reader that had enough, as ``head``, is none of its business."""
    run = tmp_path / "a"
    run.mkdir()
    (run / "episodes.csv").write_text("episode,accuracy\n0,0.2\n1,0.4\n2,0.6\n")
    row = {"split": "test", "episodes": 3, "ways": 5, "shots": 1, "queries": 15, "seed": 0, "episodes_id": "x"}
    (run / "results.json").write_text(json.dumps({"results": [row], "tested_checkpoint": "elsewhere.ckpt"}))
    command = f"{sys.executable} cli.py compare a={run} b={run}"
    done = subprocess.run(
        ["bash", "-c", f"{command} > /dev/full; echo $?; {command} | true; echo ${{PIPESTATUS[0]}}"],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "0"]
    assert done.stderr == "swbn: not all could be shown ([Errno 28] No space left on device); files are whole.\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_narrow_screen_cuts_nothing_off_the_results(terminal, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    row = {"images": 10_000_000_000, "accuracy": 0.5, "ci95": 0.25, "rms": [0.325, 0.125]}
    names = ["val (best, epoch 100000)", "val (last, epoch 200000)"]
    table_console().print(result_table([{**row, "split": name} for name in names]))
    lines = Text.from_ansi(capsys.readouterr().out).plain.splitlines()
    cells = [line.strip("│┃").replace("┃", "│").split("│") for line in lines if line[0] in "│┃"]
    columns = ["".join(column).replace(" ", "") for column in zip(*cells, strict=True)]
    assert columns[0].startswith("splitimagesaccuracy±95%interval") and columns[0].endswith("RMScorrelation,start→end")
    for column, name in zip(columns[1:], names, strict=True):
        assert column.startswith(f"{name.replace(' ', '')}10000000000") and column.endswith("0.325→0.125")
