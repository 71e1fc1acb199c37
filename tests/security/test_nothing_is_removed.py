"""Whatever a checkpoint remembers of files, nothing is removed but checkpoints of the run that is under way."""

from collections import Counter, OrderedDict

import pytest
import torch

from cli import main
from swbn_lightning.runs.checkpoint_io import WholeCheckpointIO


class Hidden:
    """An OrderedDict that looks empty to whoever asks for its items."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return OrderedDict, (), {"items": set}, None, iter(list(self.value.items()))


def remembering(victim, kind):
    """The state of a ModelCheckpoint that would remove the victim as soon as there is a better one."""
    worst = torch.tensor(-1.0)
    state = {
        "best_model_path": victim, "kth_best_model_path": victim, "best_k_models": {victim: worst}, "kth_value": worst,
        "best_model_score": worst, "last_model_path": victim,
    }  # fmt: skip
    if kind == "counter":  # which has every key
        del state["best_model_path"]
        return Counter(state)
    return state


def resume_from(path, victim, kind, trained, *more):
    """Go on for an epoch from a checkpoint that remembers the victim as its worst file."""
    content = torch.load(trained[0], weights_only=True)
    for key in content["callbacks"]:
        if "ModelCheckpoint" in key or "LastCheckpoint" in key:
            content["callbacks"][key] = remembering(victim, kind)
    if kind == "hidden":
        content["callbacks"] = Hidden(content["callbacks"])
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    main(["fit", *trained[1], "--trainer.max_epochs=2", "--ckpt_path", str(path), *more])


WAYS = ("up", "link", "address", "beside the checkpoint", "inside")


@pytest.mark.parametrize(
    ("way", "kind"), [*((way, "plain") for way in WAYS), ("inside", "counter"), ("inside", "hidden")]
)
def test_resuming_removes_nothing(way, kind, trained, tmp_path):
    folder, given = tmp_path / "run" / "checkpoints", tmp_path / "given"
    folder.mkdir(parents=True)
    victim = {"beside the checkpoint": given, "inside": folder}.get(way, tmp_path) / "precious"
    victim.mkdir(parents=True)
    (victim / "thesis.tex").write_text("three years")
    (folder / "link").symlink_to(tmp_path)
    remembered = {
        "up": f"{folder}/../../precious", "link": f"{folder}/link/precious/thesis.tex", "address": f"local://{victim}",
        "beside the checkpoint": f"{folder}/../../given/precious/thesis.tex", "inside": str(victim / "thesis.tex"),
    }[way]  # fmt: skip
    resume_from(given / "evil.ckpt", remembered, kind, trained, f"--checkpoint.dirpath={folder}")
    assert (victim / "thesis.tex").read_text() == "three years"
    assert any(path.name.startswith("step000002") for path in folder.iterdir())  # the run kept its own best


def test_a_run_that_goes_on_in_its_own_folder_replaces_its_own_best_only(trained, tmp_path):
    given = [*trained[1], f"--checkpoint.dirpath={tmp_path / 'kept'}", "--checkpoint.monitor=epoch"]
    main(["fit", *given])
    (first,) = (path for path in (tmp_path / "kept").iterdir() if path.name.startswith("step000001"))
    main(["fit", *given, "--trainer.max_epochs=3", "--ckpt_path", str(first)])
    kept = sorted(path.name[:10] for path in (tmp_path / "kept").iterdir() if path.name.startswith("step"))
    assert kept == ["step000001", "step000003"]


def test_what_is_removed_is_what_was_saved_here(tmp_path):
    io = WholeCheckpointIO()
    for name in ("plain", "sharded"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("")
    (tmp_path / "sharded" / ".metadata").write_text("")
    io.save_checkpoint({"state_dict": {}}, tmp_path / "a.ckpt")
    for name in ("a.ckpt", "sharded"):
        io.remove_checkpoint(str(tmp_path / name))
    (tmp_path / "other.ckpt").write_text("")
    for name in ("plain", "other.ckpt"):
        with pytest.warns(UserWarning, match=f"{name} was not saved by this process, and is left as it is"):
            io.remove_checkpoint(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.ckpt", "plain"]
