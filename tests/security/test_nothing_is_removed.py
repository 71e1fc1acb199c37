"""Whatever a checkpoint remembers of files, nothing is removed but checkpoints of the run that is under way."""

from pathlib import Path

import pytest
import torch

from cli import main
from swbn_lightning.checkpoint_io import WholeCheckpointIO


def resume_from(folder, remembered, trained, *more):
    """Go on for an epoch from a checkpoint that remembers a best file, worse than any to come."""
    content = torch.load(trained[0], weights_only=True)
    for key, state in content["callbacks"].items():
        if "'monitor': 'val/accuracy'" in key:
            worst = torch.tensor(-1.0)
            state.update(
                best_model_path=remembered, kth_best_model_path=remembered, best_k_models={remembered: worst},
                kth_value=worst, best_model_score=worst, dirpath=str(folder),
            )  # fmt: skip
    path = folder.parent / "given" / "evil.ckpt"
    path.parent.mkdir(parents=True)
    torch.save(content, path)
    main(
        [
            "fit",
            *trained[1],
            f"--checkpoint.dirpath={folder}",
            "--trainer.max_epochs=2",
            "--ckpt_path",
            str(path),
            *more,
        ]
    )


@pytest.mark.parametrize("way", ["up", "link", "absolute", "a folder inside"])
def test_resuming_removes_no_other_folder(way, trained, tmp_path):
    folder, victim = tmp_path / "run" / "checkpoints", tmp_path / "precious"
    folder.mkdir(parents=True)
    if way == "a folder inside":
        victim = folder / "precious"
    victim.mkdir()
    (victim / "thesis.tex").write_text("three years")
    if way == "link":
        (folder / "link").symlink_to(tmp_path)
    remembered = {
        "up": folder / ".." / ".." / "precious",
        "link": folder / "link" / "precious",
        "absolute": victim,
        "a folder inside": victim,
    }[way]
    resume_from(folder, str(remembered), trained)
    assert (victim / "thesis.tex").read_text() == "three years"
    assert any(path.name.startswith("epoch001") for path in folder.iterdir())  # the run kept its own best


def test_a_run_that_goes_on_in_its_own_folder_still_replaces_its_best(trained, tmp_path):
    given = [*trained[1], f"--checkpoint.dirpath={tmp_path / 'kept'}", "--checkpoint.monitor=epoch"]
    main(["fit", *given])
    (first,) = (path for path in (tmp_path / "kept").iterdir() if path.name.startswith("epoch000"))
    main(["fit", *given, "--trainer.max_epochs=2", "--ckpt_path", str(first)])
    kept = sorted(path.name[:8] for path in (tmp_path / "kept").iterdir() if path.name.startswith("epoch"))
    assert kept == ["epoch000", "epoch001"]  # Lightning keeps the file that a run went on from
    main(["fit", *given, "--trainer.max_epochs=4", "--ckpt_path", str(next((tmp_path / "kept").glob("epoch001*")))])
    kept = sorted(path.name[:8] for path in (tmp_path / "kept").iterdir() if path.name.startswith("epoch"))
    assert kept == ["epoch000", "epoch001", "epoch003"]


def test_what_is_removed_is_a_file_or_a_sharded_checkpoint(tmp_path):
    io = WholeCheckpointIO()
    for name in ("plain", "sharded"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("")
    (tmp_path / "sharded" / ".metadata").write_text("")
    io.save_checkpoint({"state_dict": {}}, tmp_path / "a.ckpt")
    (tmp_path / "link.ckpt").symlink_to(tmp_path / "plain")
    for name in ("a.ckpt", "sharded", "link.ckpt", "missing.ckpt"):
        io.remove_checkpoint(str(tmp_path / name))
    with pytest.warns(UserWarning, match="plain is a folder without a sharded checkpoint in it"):
        io.remove_checkpoint(tmp_path / "plain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain"] and (Path(tmp_path) / "plain/data").exists()
