"""Whole studies, through the command's own `main()`."""

import csv
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl

from swbn_lightning.runs.study import running as study_runs
from swbn_lightning.runs.study.command import main
from tests.study.tiny import CIFAR_FS, GLYPHS, TINY, TINY_FEW_SHOT


def own_lines(capsys):
    """What the study itself printed, after what its commands did."""
    printed = capsys.readouterr().out
    return printed[printed.index("## ") :]


def read(folder, name="study.csv"):
    return list(csv.DictReader((folder / name).open()))


def results(folder):
    return json.loads((Path(folder) / "results.json").read_text())


@pytest.mark.slow
def test_a_classification_study(in_process, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given, calls = [str(GLYPHS), "--norms", "bn", "swbn-fro", "--seeds", "0,1", "--reach", "0.2"], in_process
    given += ["--set", *TINY]
    main(given)
    printed = own_lines(capsys)
    assert [command for command, _ in calls] == ["fit", "test"] * 4
    rows = read(Path("runs"))
    assert [row["seed"] + row["norm"] for row in rows] == ["0bn", "0swbn-fro", "1bn", "1swbn-fro"]
    for row in rows:
        fitted, tested = results(row["run"]), results(row["test"])
        (result,) = tested["results"]
        assert result["split"] == "test" and int(row["tested"]) == result["images"]
        assert [float(row[name]) for name in ("value", "ci95", "loss")] == [
            result[name] for name in ("accuracy", "ci95", "loss")
        ]
        assert [float(row["rms_start"]), float(row["rms_end"])] == result["rms"]
        assert float(row["epoch_seconds"]) == np.median(fitted["epoch_seconds"]) and row["continued"] == "0"
        best = max((float(line["val/accuracy"]), -int(line["step"])) for line in validated(row["run"]))
        assert tested["tested_checkpoint"] == row["checkpoint"] and f"step{1 - best[1]:06d}" in row["checkpoint"]
        assert row["paper"] == "" and row["dataset"] == "GlyphDataModule" and row["reach_split"] == "val"
    check_table(printed, rows)
    assert Path("runs/study.md").read_text() in printed + "\n"

    # Nothing is done twice; the table comes from what is there.
    before = len(calls)
    Path("runs/study.csv").unlink()
    main(given)
    assert len(calls) == before and own_lines(capsys) == printed and read(Path("runs")) == rows
    # Nor for a part of the grid, or in another place.
    Path("runs").rename("moved")
    main([*(word if word != "0,1" else "1" for word in given), "--runs", "moved"])
    assert len(calls) == before and [row["value"] for row in read(Path("moved"))] == [row["value"] for row in rows[2:]]


def validated(folder):
    lines = csv.DictReader((Path(folder) / "metrics.csv").open())
    return [line for line in lines if line["val/accuracy"]]


def check_table(printed, rows):
    """The table's means and its difference again, from the rows of the file."""
    head, _, *body = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| ")]
    lines = [dict(zip(head, line, strict=True)) for line in body]
    assert [line["norm"] for line in lines] == ["`bn`", "`swbn-fro`"]
    values = {norm: [100 * float(r["value"]) for r in rows if r["norm"] == norm] for norm in ("bn", "swbn-fro")}
    for line, own in zip(lines, values.values(), strict=True):
        assert line["mean ± std over seeds, %"] == f"{np.mean(own):.2f} ± {np.std(own, ddof=1):.2f}"
    difference = np.subtract(values["swbn-fro"], values["bn"])
    half = 12.706204736 * difference.std(ddof=1) / np.sqrt(2)  # t of one degree of freedom
    assert lines[1]["to `bn`, 95% over seeds"].strip("*") == f"{difference.mean():+.2f} ± {half:.2f}"
    assert "epochs to 20 % (val)" in head and "whiteness distance, start → end" in head


@pytest.mark.slow
def test_a_few_shot_study(in_process, tiny_cifar100, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = [str(CIFAR_FS), "--norms", "bn", "swbn-fro", "--shots", "1", "5", "--root", str(tiny_cifar100)]
    main([*given, "--set", *TINY_FEW_SHOT])
    assert [command for command, _ in in_process] == ["fit", "test", "test"] * 2  # one training for both shots
    rows = {(row["norm"], row["setting"]): row for row in read(Path("runs"))}
    assert list(rows) == [("bn", "5W1S"), ("bn", "5W5S"), ("swbn-fro", "5W1S"), ("swbn-fro", "5W5S")]
    # The paper's table of few-shot results, prototypical network on CIFAR-FS.
    paper = {key: float(row["paper"]) for key, row in rows.items()}
    assert list(paper.values()) == [0.5573, 0.7347, 0.5738, 0.7502]
    assert {row["method"] for row in rows.values()} == {"PN"} and {row["tested"] for row in rows.values()} == {"30"}
    printed = capsys.readouterr().out
    assert "to `bn`, 95% over episodes" in printed
    assert "| `resnet20` | 5W5S | `swbn-fro` | 1 |" in printed and "75.02" in printed
    calls = len(in_process)
    # More test episodes are another test, not another training.
    more = [word if word != "data.test.episodes=30" else "data.test.episodes=40" for word in TINY_FEW_SHOT]
    main([*given[:3], "--root", str(tiny_cifar100), "--set", *more])  # of bn alone
    assert [command for command, _ in in_process[calls:]] == ["test"]
    assert [row["tested"] for row in read(Path("runs"))] == ["40"]


def test_a_failed_run_is_told_and_the_others_go_on(in_process, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    norms = ["swbn-kl:num_groups=3", "swbn-fro", "swbn-fro:step_size=0.01"]
    with pytest.raises(SystemExit) as stopped:
        main([str(GLYPHS), "--norms", *norms, "--set", *TINY, "trainer.max_epochs=1"])
    assert stopped.value.code == 1
    printed = capsys.readouterr()
    assert "- glyphs · resnet20 · swbn-kl:num_groups=3 · seed 0: ended with 2" in printed.out
    assert "num_groups=3 does not divide" in printed.err
    rows = read(Path("runs"))
    # The last two are the same run by two names: the configuration's own step size.
    assert [row["norm"] for row in rows] == norms[1:] and rows[0]["run"] == rows[1]["run"]
    assert [cell.norm.label for _, cell in in_process] == ["swbn-kl:num_groups=3", "swbn-fro", "swbn-fro"]


@pytest.mark.slow
def test_killed_half_way(in_process, tmp_path, monkeypatch, capsys):
    """SIGKILL for a real training in the midst of its second epoch, and later for what is left of it."""
    monkeypatch.chdir(tmp_path)
    given = [str(GLYPHS), "--norms", "bn", "swbn-fro", "--reach", "0.2", "--set", *TINY]
    short = study_runs.run_command

    def killed(cell, command, arguments, lock):
        if command != "fit" or cell.norm.name == "bn":
            return short(cell, command, arguments, lock)
        slow = ["--trainer.callbacks=tests.study.test_whole_studies.Sleep"]
        process = start_command(cell, [*arguments, *slow], lock)
        last = cell.folder / "version_0" / "checkpoints" / "last.ckpt"
        wait_until(lambda: last.is_file() or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
        raise study_runs.RunFailed(f"swbn fit ended with {process.wait()}")

    monkeypatch.setattr(study_runs, "run_command", killed)
    with pytest.raises(SystemExit):
        main(given)
    assert "swbn-fro · seed 0: swbn fit ended with -9" in capsys.readouterr().out
    assert [row["norm"] for row in read(Path("runs"))] == ["bn"]
    (folder,) = Path("runs").glob("glyphs/resnet20/swbn-fro/*/version_0")
    assert not (folder / "results.json").exists() and (folder / "checkpoints" / "last.ckpt").is_file()

    monkeypatch.setattr(study_runs, "run_command", short)
    calls = len(in_process)
    main(given)
    assert [(command, cell.norm.name) for command, cell in in_process[calls:]] == [
        ("fit", "swbn-fro"), ("test", "swbn-fro")
    ]  # fmt: skip
    row = read(Path("runs"))[1]
    assert row["continued"] == "1" and row["run"].endswith("version_1") and row["fit_seconds"] == ""
    assert [int(line["epoch"]) for line in validated(row["run"])] == [1]  # not the first one again

    # Killed after the last epoch's checkpoint and before its results: nothing is left to train, so it begins anew.
    Path(row["run"], "results.json").unlink()
    main(given)
    row = read(Path("runs"))[1]
    assert row["continued"] == "0" and row["run"].endswith("version_0")
    assert [int(line["epoch"]) for line in validated(row["run"])] == [0, 1]


class Sleep(pl.Callback):
    """Half a minute before the second epoch, so that a kill comes in time."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            time.sleep(30)


def start_command(cell, arguments, lock):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [*study_runs.COMMAND, "fit", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=[lock], env=environment,
    )  # fmt: skip


def wait_until(condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
