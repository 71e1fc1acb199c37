"""A disk that is full at any checkpoint costs nothing of what was there before."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from cli import main
from swbn_lightning.files.writing import replacing
from swbn_lightning.runs.checkpoints import best_checkpoint, find_checkpoint


@pytest.fixture
def fails_at(monkeypatch):
    """The disk has no room for checkpoints whose names begin like this."""

    def arm(start):
        save = torch.save

        def full(content, file):
            if Path(file.name).name.startswith(f".{start}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            save(content, file)

        monkeypatch.setattr(torch, "save", full)

    return arm


def fit(trained, folder, *more):
    given = [*trained[1], f"--run.root={folder}", "--trainer.max_epochs=3", "--checkpoint.monitor=epoch", *more]
    with pytest.raises(SystemExit) as stopped:
        main(["fit", *given])
    assert stopped.value.code == 2
    return folder / "quickstart" / "version_0"


def test_a_new_best_that_does_not_fit(trained, tmp_path, fails_at, capsys):
    fails_at("step000003")
    folder = fit(trained, tmp_path, "--checkpoint.save_top_k=2")
    assert "step000003" in (said := capsys.readouterr().err) and "No space left on device" in said
    results = json.loads((folder / "results.json").read_text())
    assert results["best_checkpoint"].startswith("checkpoints/step000002") and not results["completed"]
    assert [row["split"] for row in results["results"]] == ["val (best, epoch 2)", "val (last, epoch 3)"]
    for prefer in ("best", "last"):
        assert torch.load(find_checkpoint(tmp_path / "quickstart", prefer), weights_only=True)["epoch"] == 1


def test_no_checkpoint_at_all(trained, tmp_path, fails_at, capsys):
    fails_at("")
    folder = fit(trained, tmp_path)
    results = json.loads((folder / "results.json").read_text())
    assert results["best_checkpoint"] is None and results["results"][0]["split"] == "val (last, epoch 1)"
    with pytest.raises(ValueError, match="holds no best checkpoint"):
        find_checkpoint(folder)


@pytest.mark.parametrize("name", ["results.json", "episodes.csv"])
def test_results_that_do_not_fit_are_shown_at_least(name, trained, tmp_path, monkeypatch, capsys):
    def full(path):
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replacing(path)

    monkeypatch.setattr("swbn_lightning.files.writing.replacing", full)
    with pytest.raises(SystemExit) as stopped:
        main(["test", *trained[1], f"--run.root={tmp_path}", "--ckpt_path", str(trained[0])])
    said = capsys.readouterr()
    assert stopped.value.code == 2 and "accuracy ± 95%" in said.out
    assert f"{name} cannot be written: No space left on device" in said.err and "Traceback" not in said.err
    assert (tmp_path / "quickstart/version_0/results.json").exists() is (name != "results.json")


def test_the_best_of_a_killed_run_is_known_by_its_own_score(trained, tmp_path):
    """Not by its time, which a copy changes."""
    given = [*trained[1], f"--run.root={tmp_path}", "--trainer.max_epochs=3", "--checkpoint.monitor=epoch"]
    main(["fit", *given, "--checkpoint.mode=min", "--checkpoint.save_top_k=3"])
    folder = tmp_path / "quickstart" / "version_0"
    assert len(list((folder / "checkpoints").glob("step*"))) == 3
    (folder / "results.json").unlink()
    moved = folder.rename(tmp_path / "moved")
    assert find_checkpoint(moved).name.startswith("step000001") and find_checkpoint(moved, "last").name == "last.ckpt"
    (moved / "checkpoints" / "last.ckpt").unlink()
    assert find_checkpoint(moved, "last").name.startswith("step000003")
    assert best_checkpoint(tmp_path) is None
