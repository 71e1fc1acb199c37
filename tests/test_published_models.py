"""A published model: written by `swbn export`, read wherever a checkpoint is, refused where it was changed."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from cli import main
from fewshot import PrototypicalNetwork
from swbn_lightning.files.writing import replacing
from swbn_lightning.runs.card import card_of
from swbn_lightning.runs.checkpoints import find_checkpoint, read_checkpoint
from swbn_lightning.runs.export import export
from swbn_lightning.runs.exported import write_exported
from swbn_lightning.runs.folders import run_folder_of
from tests.conftest import REPOSITORY


@pytest.fixture(scope="module")
def published(trained, tmp_path_factory):
    """A run of its own with a test, its best checkpoint, its export, and the command's arguments."""
    root = tmp_path_factory.mktemp("published")
    arguments = [*trained[1], f"--run.root={root}"]
    main(["fit", *arguments, "--data.train.episodes=3"])
    checkpoint = find_checkpoint(root / "quickstart")
    main(["test", *arguments, f"--ckpt_path={checkpoint}", "--data.test.episodes=40"])
    main(["export", str(root / "quickstart" / "version_0"), "--output", str(root / "export")])
    return checkpoint, root / "export", arguments


@pytest.fixture
def copy(published, tmp_path):
    """The export, to be changed: ``copy(change)`` lets the settings be changed and signs them again."""

    def changed(change=None, weights=None):
        folder = tmp_path / "copy"
        folder.mkdir(exist_ok=True)
        for file in published[1].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        settings = json.loads((folder / "config.json").read_text())
        settings.pop("sha256")
        if change is not None:
            change(settings)
        if weights is not None:
            (folder / "model.safetensors").write_bytes(weights)
        text = json.dumps(settings, sort_keys=True)
        sums = {"model.safetensors": (folder / "model.safetensors").read_bytes(), "config.json": text.encode()}
        settings["sha256"] = {name: hashlib.sha256(content).hexdigest() for name, content in sums.items()}
        (folder / "config.json").write_text(json.dumps(settings))
        return folder

    return changed


def test_it_is_a_checkpoint_in_every_place(published, tmp_path, capsys):
    checkpoint, folder, arguments = published
    expected, found = read_checkpoint(checkpoint), read_checkpoint(folder / "model.safetensors")
    assert {file.name for file in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert expected["state_dict"].keys() == found["state_dict"].keys()
    for name, value in expected["state_dict"].items():
        assert torch.equal(value, found["state_dict"][name]) and value.dtype == found["state_dict"][name].dtype
    assert found["hyper_parameters"] == expected["hyper_parameters"] and found["run"] == expected["run"]
    rows = []
    for path in (checkpoint, folder, folder / "model.safetensors"):
        main(["test", *arguments, f"--run.root={tmp_path}", f"--ckpt_path={path}", "--data.test.episodes=40"])
        newest = max(tmp_path.glob("quickstart/version_*"), key=lambda run: int(run.name[8:]))
        (row,) = json.loads((newest / "results.json").read_text())["results"]
        told = json.loads((newest / "run.json").read_text())["trained"]
        rows.append([told["id"], {k: row[k] for k in ("accuracy", "ci95", "loss", "episodes_id")}])
    assert rows[0] == rows[1] == rows[2]
    model = PrototypicalNetwork.load_from_checkpoint(folder)
    started = PrototypicalNetwork(
        backbone="mlp", backbone_args={"hidden": [8]}, norm="swbn-fro", backbone_checkpoint=str(folder)
    )
    for name, value in model.backbone.state_dict().items():
        assert torch.equal(value, started.backbone.state_dict()[name])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:  # there is nothing to go on from
        main(["fit", *arguments, f"--run.root={tmp_path}", f"--ckpt_path={folder}", "--trainer.max_epochs=2"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "holds no loops" in said and "--model.backbone_checkpoint" in said


def test_plain_pytorch_loads_it_as_its_card_says(published, tmp_path):
    checkpoint, folder, _ = published
    (code, whole) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    statements = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(statements) == 5
    images = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    torch.save(images, tmp_path / "images.pt")
    code += "import sys, torch\nassert not {'pytorch_lightning', 'fewshot', 'classification'} & set(sys.modules)\n"
    code += f"torch.save(backbone(torch.load({str(tmp_path / 'images.pt')!r})), {str(tmp_path / 'features.pt')!r})\n"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    model = PrototypicalNetwork.load_from_checkpoint(checkpoint).eval()
    torch.testing.assert_close(torch.load(tmp_path / "features.pt"), model.embed(images))
    exec(whole.replace("FOLDER", str(folder)), names := {})
    assert torch.equal(names["model"].eval().embed(images), model.embed(images))


def test_the_card_says_what_it_is(published):
    checkpoint, folder, _ = published
    beside, card = checkpoint.with_name("card.md").read_text(), (folder / "README.md").read_text()
    results = json.loads((checkpoint.parents[1] / "results.json").read_text())["results"][0]
    validated = f"| 126 | 3,024 | 5 | {100 * results['accuracy']:.2f} ± {100 * results['ci95']:.2f} |"
    tested = json.loads((checkpoint.parents[2] / "version_1" / "results.json").read_text())["results"][0]
    row = "| test, 5-way 1-shot, 15 queries, seed 0 | 158 | 3,792 | 40 | "
    row += f"{100 * tested['accuracy']:.2f} ± {100 * tested['ci95']:.2f} |"
    assert validated in beside and validated in card and row in card and row not in beside
    assert "No test of it is known" in beside and "No test of it is known" not in card
    for text in (beside, card):
        assert text.startswith("---\nlicense:\n") and "## Licence\n\nTo be filled in" in text
        for words in (
            "12,144 images of 506 classes: E",
            "model.init_args.norm_args.step_size",
            "| seed_everything | 0",
        ):
            assert words in text
        assert str(checkpoint.parents[3]) not in text and "torch" in text.partition("Trained on ")[2]
    assert f'load_from_checkpoint("{checkpoint.name}")' in beside


def test_a_card_has_the_tests_of_its_own_training_only(published):
    """Of another one the checkpoint may have the same name."""
    runs = published[0].parents[2]
    (runs / "version_9").mkdir()
    told, results = (json.loads((runs / "version_1" / f"{name}.json").read_text()) for name in ("run", "results"))
    results["results"][0]["shots"] = 3
    (runs / "version_9" / "results.json").write_text(json.dumps(results))
    for origin, shown in (("0" * 16, False), (told["from"], True)):
        (runs / "version_9" / "run.json").write_text(json.dumps({**told, "id": "1" * 16, "from": origin}))
        assert ("5-way 3-shot" in card_of(published[0], exported=True)) is shown
    # The newest by when it was, wherever it was.
    results["results"][0] |= {"shots": 1, "accuracy": 0.125}
    (runs / "version_9" / "results.json").write_text(json.dumps(results))
    later = datetime.fromisoformat(told["started"]) + timedelta(hours=1)
    for started in (later.astimezone(timezone(timedelta(hours=hours))).isoformat() for hours in (-12, 12)):
        (runs / "version_9" / "run.json").write_text(json.dumps({**told, "id": "1" * 16, "started": started}))
        assert "| 12.50 ±" in card_of(published[0], exported=True)
    shutil.rmtree(runs / "version_9")


def test_what_a_card_shows_of_anybody_is_text(published, copy, tmp_path):
    evil = "[x](http://evil) <script> `a` | \x1b[2J"

    def change(settings):
        settings["data"]["splits"]["train"] |= {"classes": [evil], "name": evil}
        settings["run"]["settings"]["model.x"] = evil
        settings["hyper_parameters"]["norm"] = evil
        settings["model_class"] = "os; import evil"

    card = card_of(copy(change) / "model.safetensors", exported=True)
    assert "<script>" not in card and "\x1b" not in card and "[x](http" not in card and "import evil" not in card
    assert r"\[x\](http://evil) &lt;script&gt; \`a\` \| \x1b\[2J" in card


def refusal(folder, arguments, capsys):
    """What the command says of it, in one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["test", *arguments, f"--ckpt_path={folder}"])
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("swbn: error:")]
    assert stopped.value.code == 2
    with pytest.raises((ValueError, RuntimeError)):  # the latter is torch's, of weights of another network
        PrototypicalNetwork.load_from_checkpoint(folder)
    return said


def test_altered_and_foreign_files_are_refused_in_one_sentence(published, copy, capsys):
    arguments = published[2]
    folder = copy()
    PrototypicalNetwork.load_from_checkpoint(folder)  # unchanged it is taken
    weights, settings = folder / "model.safetensors", folder / "config.json"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "model.safetensors is not as it was exported" in refusal(folder, arguments, capsys)
    copy()
    settings.write_text(settings.read_text().replace('"average_channels": true', '"average_channels": false'))
    assert "config.json is not as it was exported" in refusal(folder, arguments, capsys)
    for text, words in (
        ('{"architectures": ["Bert"]}', "is not an export of this version: the 'format' in config.json is 'None'"),
        ("[]", "config.json cannot be read: it holds a list"),
        ('{"format": "swbn_lightning export 1"', "config.json cannot be read"),
        ('{"format": "swbn_lightning export 1", "sha256": 5}', "model.safetensors is not as it was exported"),
    ):
        settings.write_text(text)
        assert words in refusal(folder, arguments, capsys)
    settings.unlink()
    assert "config.json cannot be read: No such file" in refusal(folder, arguments, capsys)
    copy()
    weights.unlink()
    os.mkfifo(weights)
    assert "named pipe" in refusal(folder, arguments, capsys)


def test_right_checksums_do_not_let_anything_run(published, trained, copy, tmp_path, capsys):
    arguments, pickled = published[2], tmp_path / "pickled"
    torch.save({"state_dict": {}}, pickled)
    for weights in (pickled.read_bytes(), b"", b"\xff" * 100):
        assert "holds no weights that can be read" in refusal(copy(weights=weights), arguments, capsys)
    other = save({"backbone.layers.1.weight": torch.zeros(3)})
    assert "state_dict" in refusal(copy(weights=other), arguments, capsys)
    for name, value, words in (
        ("norm_args", {"class_path": "os.system", "init_args": {"command": "true"}}, "imported or called"),
        ("optimizer", "os.system", "'optimizer' is refused"),
        ("norm", "a: {b: c}", "'norm' is refused"),
        ("backbone_checkpoint", "runs/x", "'backbone_checkpoint' is refused"),
    ):
        folder = copy(lambda settings, name=name, value=value: settings["hyper_parameters"].update({name: value}))
        assert words in refusal(folder, arguments, capsys)
    assert "not this" not in refusal(copy(lambda s: s.update(model_class="evil.Model")), arguments, capsys)
    assert "'hyper_parameters' is a list" in refusal(copy(lambda s: s.update(hyper_parameters=[])), arguments, capsys)


def test_links_of_a_hubs_cache_are_followed(published, tmp_path):
    (tmp_path / "linked").mkdir()
    for file in published[1].iterdir():
        (tmp_path / "linked" / file.name).symlink_to(file)
    assert find_checkpoint(tmp_path / "linked").name == "model.safetensors"


def test_where_it_may_be_written(published, tmp_path, capsys):
    checkpoint, folder, _ = published
    assert export(checkpoint) == checkpoint.parents[1] / "export" == export(checkpoint.parents[1])  # twice: replaced
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for run, output, words in (
        (checkpoint, tmp_path / "mine", "holds thesis.tex"),
        (checkpoint, tmp_path / "file", "is a file; give a folder"),
        (folder, tmp_path / "new", "is an export already"),
        (tmp_path, None, "holds no best checkpoint"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["export", str(run), *(["--output", str(output)] if output else [])])
        assert stopped.value.code == 2 and words in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"settings cannot be written as JSON"):
        write_exported({"state_dict": {}, "hyper_parameters": {"x": torch.zeros(1)}}, "", tmp_path / "new")
    with pytest.raises(ValueError, match=r"extra of the state is no tensor"):
        write_exported({"state_dict": {"extra": 1}}, "", tmp_path / "new")


def test_a_checkpoint_by_itself_is_exported_here_and_without_a_class_to_import(published, tmp_path, monkeypatch):
    content = torch.load(published[0], weights_only=True)
    del content["model_class"]  # as of a LightningModule of the user's own
    deep = tmp_path / "sub" / "deep"
    deep.mkdir(parents=True)
    torch.save(content, deep / "mine.ckpt")
    monkeypatch.chdir(deep)
    assert export("mine.ckpt") == deep / "export"
    monkeypatch.chdir(tmp_path)
    assert export("sub/deep/mine.ckpt") == tmp_path / "export"
    for card in ((tmp_path / "export" / "README.md").read_text(), card_of(deep / "mine.ckpt")):
        assert "import Model" not in card and "## Figures" in card
    monkeypatch.chdir(published[0].parent)
    assert run_folder_of(Path(published[0].name)) == published[0].parents[1]


def test_weights_in_any_layout_and_sharing_memory_are_whole(tmp_path):
    shared = torch.arange(12.0).reshape(3, 4)
    state = {"a": shared, "b": shared[:2], "c": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)}
    state |= {"d": torch.ones(2, dtype=torch.bfloat16), "e": torch.tensor(3)}
    write_exported({"state_dict": state}, "", tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == state.keys() and all(torch.equal(found[name], value) for name, value in state.items())


def test_a_full_disk_costs_the_card_only(trained, tmp_path, monkeypatch):
    def full(path):
        if path.name == "card.md":
            raise OSError(28, "No space left on device")
        return replacing(path)

    monkeypatch.setattr("swbn_lightning.files.writing.replacing", full)
    with pytest.warns(UserWarning, match="the model's card could not be written: .*No space left"):
        main(["fit", *trained[1], f"--run.root={tmp_path}"])
    assert find_checkpoint(tmp_path / "quickstart").is_file()
    assert not list(tmp_path.rglob("card.md"))
