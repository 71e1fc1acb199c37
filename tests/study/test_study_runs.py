"""Which checkpoint of a run in one or several parts is tested, and who may work on a cell."""

import json
import sys
from unittest.mock import Mock

import pytest
import torch

from swbn_lightning.runs.read import Run, Training
from swbn_lightning.runs.study import command
from swbn_lightning.runs.study import running as study_runs
from swbn_lightning.runs.study.command import Study, main
from swbn_lightning.runs.study.observations import quantities
from tests.made_runs import identify
from tests.study.tiny import GLYPHS, cells_of


def make_run(folder, *, best=None, mode="max", kept=(), done=True, source=None):
    """A run's folder as the command leaves it; ``kept`` has the score of each epoch with a checkpoint."""
    (folder / "checkpoints").mkdir(parents=True)
    identify(folder, "fit", source=source)
    for epoch, score in dict(kept).items():
        file = folder / "checkpoints" / f"epoch{epoch}.ckpt"
        callback = {"best_k_models": {f"/elsewhere/{file.name}": torch.tensor(score)}}
        state = {"callbacks": {f"ModelCheckpoint{{'mode': '{mode}'}}": callback}}
        torch.save({"epoch": epoch, "state_dict": {}, **state}, file)
    torch.save({"epoch": max([0, *kept]), "state_dict": {}}, folder / "checkpoints" / "last.ckpt")
    if done:
        results = {"results": [{}], "completed": True, "best_checkpoint": f"checkpoints/{best}.ckpt" if best else None}
        (folder / "results.json").write_text(json.dumps(results))
    return folder


def chosen(cell):
    return study_runs.chosen_checkpoint(study_runs.finished_training(cell))


@pytest.mark.parametrize(("mode", "first", "version"), [
    ("max", 0.5, "version_1"), ("max", 0.7, "version_0"), ("min", 0.5, "version_0"), ("max", 0.6, "version_0"),
])  # fmt: skip
def test_the_best_is_the_best_of_all_parts_of_a_training(mode, first, version, tmp_path):
    (cell,) = cells_of(GLYPHS, runs=tmp_path)
    one = make_run(cell.folder / "version_0", mode=mode, kept={1: first}, done=False)
    make_run(cell.folder / "version_1", mode=mode, kept={2: 0.6}, best="epoch2", source=one)
    assert chosen(cell).parts[-3] == version


def test_without_validation_the_last_epoch_is_tested_and_half_a_checkpoint_is_passed_over(tmp_path):
    for number, best in enumerate((None, "last")):  # a run without validation may name it, or nothing
        (cell,) = cells_of(GLYPHS, runs=tmp_path, seeds=[number])
        make_run(cell.folder / "version_0", best=best)
        assert chosen(cell) == cell.folder / "version_0" / "checkpoints" / "last.ckpt"
    (cell,) = cells_of(GLYPHS, runs=tmp_path, seeds=[2])
    one = make_run(cell.folder / "version_0", kept={0: 0.9}, done=False)
    half = cell.folder / "version_0" / "checkpoints" / "epoch0.ckpt"
    half.write_bytes(half.read_bytes()[:-100])
    make_run(cell.folder / "version_1", kept={1: 0.5}, best="epoch1", source=one)
    assert chosen(cell).parts[-3] == "version_1"


def test_what_was_logged_is_read_across_the_parts(tmp_path):
    texts = {
        "a": "epoch,step,val/accuracy\n0,1,0.25\n,1,\n1,2,0.5\n2,3,0.6\n3,4,0.", "b": "",
        "c": "val/accuracy,epoch\n0.7,2\n0.8,3\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(text)
    found = quantities(Training([Run(tmp_path / name) for name in (*texts, "missing")]))
    assert found == {"val/accuracy": {1: 0.25, 2: 0.5, 3: 0.7, 4: 0.8}}


def test_a_command_that_fails_says_its_last_words(tmp_path, monkeypatch):
    (cell,) = cells_of(GLYPHS, runs=tmp_path)
    cell.folder.mkdir(parents=True)
    # It is given the code to end with, and a file that it must have been left: the lock.
    script = "import os, sys; os.fstat(int(sys.argv[3])); print(*'abcd', sep='\\n'); sys.exit(int(sys.argv[2]))"
    (tmp_path / "swbn.py").write_text(script)
    monkeypatch.setattr(study_runs, "COMMAND", (sys.executable, str(tmp_path / "swbn.py")))
    with study_runs._locked(cell.folder, wait=False) as lock:
        with pytest.raises(study_runs.Busy), study_runs._locked(cell.folder, wait=False):
            pass
        study_runs.run_command(cell, "fit", ["0", str(lock)], lock)
        with pytest.raises(study_runs.RunFailed) as failed:
            study_runs.run_command(cell, "fit", ["3", str(lock)], lock)
    output = cell.folder / "output.txt"
    assert str(failed.value).splitlines() == [f"swbn fit ended with 3; see {output}", "b", "c", "d"]
    assert output.read_text().count("$ swbn fit") == 2


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("swbn_lightning.runs.study.command.complete", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as stopped:
        main([str(GLYPHS), "--runs", str(tmp_path)])
    assert stopped.value.code == 130 and "the same command goes on from here" in capsys.readouterr().err


def test_cells_at_which_others_are_at_work_come_last(tmp_path, monkeypatch):
    cells = cells_of(GLYPHS, norms=["bn", "swbn-fro", "swbn-kl"], runs=tmp_path)
    asked = []

    def complete(cell, wait):
        asked.append((cell.norm.name, wait))
        if cell.norm.name != "swbn-fro" and not wait:
            raise study_runs.Busy
        return 0

    monkeypatch.setattr("swbn_lightning.runs.study.command.complete", complete)
    Study(cells, None, tmp_path, []).run()
    assert asked == [("bn", False), ("swbn-fro", False), ("swbn-kl", False), ("bn", True), ("swbn-kl", True)]


def test_a_cell_that_was_renamed_is_found_by_its_settings(tmp_path):
    cells = cells_of(GLYPHS, norms=["bn", "swbn-fro"], runs=tmp_path)
    for cell in cells:
        make_run(cell.folder / "version_0", best="epoch0", kept={0: 0.5})
        (cell.folder / "settings.json").write_text(json.dumps({"settings": cell.identity}, default=str))
    cells[0].folder.rename(tmp_path / "renamed")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "settings.json").write_text("{")
    first, second = cells_of(GLYPHS, norms=["bn", "swbn-fro"], runs=tmp_path)
    assert first.folder == tmp_path / "renamed" and "--run.name=renamed" in first.arguments()
    assert second.folder == cells[1].folder and study_runs.finished_training(first) is not None


def test_the_table_has_what_another_process_has_done(tmp_path, monkeypatch):
    cells = cells_of(GLYPHS, runs=tmp_path, seeds=[0, 1])
    study = Study(cells, None, tmp_path, [])

    def complete(cell, wait):
        if cell.seed == 0 and not wait:
            raise study_runs.Busy
        return 1

    row = {"config": "a.yaml", "dataset": "glyphs", "method": "", "network": "vgg", "norm": "bn", "metric": "accuracy",
           "setting": "", "loss": 1.0, "value": 0.5, "episodes": (), "episode_set": "", "environment": ""}  # fmt: skip
    monkeypatch.setattr(command, "complete", complete)
    monkeypatch.setattr(command, "observe", lambda cell, reach: [{**row, "seed": cell.seed}])
    study._complete(0, wait=False)
    study._complete(1, wait=False)
    assert len((tmp_path / "study.csv").read_text().splitlines()) == 3
