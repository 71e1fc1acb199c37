"""Which checkpoint of a run in one or several parts is tested, and who may work on a cell."""

import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.study import runs as study_runs
from benchmarks.study.__main__ import Study, main
from swbn_lightning.files.writing import write_whole
from swbn_lightning.runs.folders import write_results
from tests.study.tiny import GLYPHS, cells_of


def make_run(folder, *, best=None, monitor="val/accuracy", mode="max", scores=(), kept=(), done=True):
    """A run's folder as the command leaves it: ``scores`` and ``kept`` are epochs."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"checkpoint": {"monitor": monitor, "mode": mode}}))
    lines = [f"{epoch},{value}" for epoch, value in dict(scores).items()]
    (folder / "metrics.csv").write_text("\n".join(["epoch,val/accuracy", *lines, ""]))
    for epoch in kept:
        torch.save({"epoch": epoch, "state_dict": {}}, folder / "checkpoints" / f"epoch{epoch}.ckpt")
    torch.save({"epoch": max([0, *kept]), "state_dict": {}}, folder / "checkpoints" / "last.ckpt")
    if done:
        results = {"command": "fit", "completed": True, "best_checkpoint": f"checkpoints/{best}.ckpt" if best else None}
        write_results(folder, results)


@pytest.mark.parametrize(("mode", "first", "chosen"), [
    ("max", 0.5, "version_1"), ("max", 0.7, "version_0"), ("min", 0.5, "version_0"), ("max", 0.6, "version_0"),
])  # fmt: skip
def test_the_best_is_the_best_of_all_parts_of_a_training(mode, first, chosen, tmp_path):
    (cell,) = cells_of(GLYPHS, runs=tmp_path)
    make_run(cell.folder / "version_0", mode=mode, scores={0: 0.1, 1: first}, kept=[1], done=False)
    make_run(cell.folder / "version_1", mode=mode, scores={2: 0.6, 3: 0.6}, kept=[2], best="epoch2")
    assert study_runs.chosen_checkpoint(cell).parts[-3] == chosen


def test_without_validation_the_last_epoch_is_tested(tmp_path):
    for number, best in enumerate((None, "last")):  # a run without validation may name it, or nothing
        (cell,) = cells_of(GLYPHS, runs=tmp_path, seeds=[number])
        make_run(cell.folder / "version_0", best=best)
        assert study_runs.chosen_checkpoint(cell) == cell.folder / "version_0" / "checkpoints" / "last.ckpt"


def test_half_a_checkpoint_is_passed_over(tmp_path):
    (cell,) = cells_of(GLYPHS, runs=tmp_path)
    make_run(cell.folder / "version_0", scores={0: 0.9}, kept=[0], done=False)
    half = cell.folder / "version_0" / "checkpoints" / "epoch0.ckpt"
    half.write_bytes(half.read_bytes()[:-100])
    make_run(cell.folder / "version_1", scores={1: 0.5}, kept=[1], best="epoch1")
    assert study_runs.chosen_checkpoint(cell).parts[-3] == "version_1"


def test_what_was_logged_is_read_across_the_parts(tmp_path):
    for name, text in (("a", "epoch,step,val/accuracy\n0,1,0.25\n,1,\n1,2,0.5\n2,3,0.6\n3,4,0."), ("b", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(text)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "metrics.csv").write_text("val/accuracy,epoch\n0.7,2\n0.8,3\n")
    versions = [tmp_path / name for name in ("a", "b", "c", "missing")]
    assert study_runs.logged(versions, "val/accuracy") == {0: 0.25, 1: 0.5, 2: 0.7, 3: 0.8}
    assert study_runs.logged(versions, "train/accuracy") == {}


def test_a_command_that_fails_says_its_last_words(tmp_path, monkeypatch):
    (cell,) = cells_of(GLYPHS, runs=tmp_path)
    cell.folder.mkdir(parents=True)
    # It is given the code to end with, and a file that it must have been left: the lock.
    script = "import os, sys; os.fstat(int(sys.argv[3])); print(*'abcd', sep='\\n'); sys.exit(int(sys.argv[2]))"
    (tmp_path / "swbn.py").write_text(script)
    monkeypatch.setattr(study_runs, "CLI", tmp_path / "swbn.py")
    with study_runs._locked(cell.folder, wait=False) as lock:
        study_runs.run_command(cell, "fit", ["0", str(lock)], lock)
        with pytest.raises(study_runs.RunFailed) as failed:
            study_runs.run_command(cell, "fit", ["3", str(lock)], lock)
    output = cell.folder / "output.txt"
    assert str(failed.value).splitlines() == [f"swbn fit ended with 3; see {output}", "b", "c", "d"]
    assert output.read_text().count("$ swbn fit") == 2


def test_a_child_that_outlives_its_study_keeps_the_cell(tmp_path):
    with study_runs._locked(tmp_path, wait=False) as lock:
        child = subprocess.Popen(["sleep", "600"], pass_fds=[lock])
    # The study's own end of the lock is closed now, as the kernel does when it is killed.
    try:
        with pytest.raises(study_runs.Busy), study_runs._locked(tmp_path, wait=False):
            pass
    finally:
        child.kill()
        child.wait()
    with study_runs._locked(tmp_path, wait=False):
        pass


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    def interrupt(cell, wait):
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.study.__main__.complete", interrupt)
    with pytest.raises(SystemExit) as stopped:
        main([str(GLYPHS), "--runs", str(tmp_path)])
    assert stopped.value.code == 130 and "the same command goes on from here" in capsys.readouterr().err


def test_a_file_that_two_processes_write_is_whole(tmp_path, monkeypatch):
    path, replace = tmp_path / "study.csv", Path.replace

    def replace_after_the_other(self, target):
        monkeypatch.setattr(Path, "replace", replace)
        write_whole(path, "theirs")
        assert path.read_text() == "theirs"
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_after_the_other)
    assert write_whole(path, "ours").read_text() == "ours" and list(tmp_path.iterdir()) == [path]


def test_cells_at_which_others_are_at_work_come_last(tmp_path, monkeypatch):
    cells = cells_of(GLYPHS, norms=["bn", "swbn-fro", "swbn-kl"], runs=tmp_path)
    asked = []

    def complete(cell, wait):
        asked.append((cell.norm.name, wait))
        if cell.norm.name != "swbn-fro" and not wait:
            raise study_runs.Busy
        return 0

    monkeypatch.setattr("benchmarks.study.__main__.complete", complete)
    monkeypatch.setattr("benchmarks.study.__main__.read_environment", lambda cell: {})
    Study(cells, None, tmp_path, []).run()
    assert asked == [("bn", False), ("swbn-fro", False), ("swbn-kl", False), ("bn", True), ("swbn-kl", True)]
