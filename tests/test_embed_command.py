"""`swbn embed`: the features that a network gives, with labels and names, and nothing of a file that is run."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from cli import main
from fewshot import EpisodicDataModule, PrototypicalNetwork
from swbn_lightning.runs.export import export


def embed(*arguments):
    main(["embed", *map(str, arguments)])


def features(checkpoint, images):
    model = PrototypicalNetwork.load_from_checkpoint(checkpoint).eval()
    with torch.no_grad():
        return model.embed(EpisodicDataModule("glyphs").normalize(images)).numpy()


@pytest.mark.parametrize("kind", ["run", "checkpoint", "export"])
def test_a_split(kind, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    checkpoint = trained[0]
    run = {"run": checkpoint.parents[2], "checkpoint": checkpoint, "export": tmp_path / "export"}[kind]
    if kind == "export":
        export(checkpoint, run)
    embed(run, "--split", "val", "--output", "found.npz")
    letters = EpisodicDataModule("glyphs").image_set("val")
    found = np.load("found.npz")
    assert set(found) == {"features", "labels", "class_names", "numbers"} and found["features"].dtype == np.float32
    assert np.array_equal(found["labels"], letters.labels) and tuple(found["class_names"]) == letters.class_names
    np.testing.assert_allclose(found["features"], features(checkpoint, letters.images), rtol=1e-4, atol=1e-5)
    assert np.array_equal(found["numbers"], np.arange(len(letters)))
    assert capsys.readouterr().out.endswith(f"{len(letters)} x 8 features: found.npz\n")


def test_images_of_ones_own(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), np.uint8)
    for name, image in zip(("cat/1.png", "cat/2.png", "dog/1.png"), pixels, strict=True):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "mine" / name)
    expected = features(trained[0], torch.from_numpy(pixels)[:, None])
    embed(trained[0], "--images", "mine", "--output", "folder.npz")
    found = np.load("folder.npz")
    assert found["files"].tolist() == ["cat/1.png", "cat/2.png", "dog/1.png"]
    assert found["labels"].tolist() == [0, 0, 1] and found["class_names"].tolist() == ["cat", "dog"]
    np.testing.assert_allclose(found["features"], expected, rtol=1e-4, atol=1e-5)
    for path, number in (("mine/cat", 2), ("mine/dog/1.png", 1)):
        embed(trained[0], "--images", path, "--output", "some.npz")
        some = np.load("some.npz")
        assert set(some) == {"features", "files"} and len(some["features"]) == number
    np.testing.assert_allclose(some["features"], expected[2:], rtol=1e-4, atol=1e-5)


def test_parquet_has_a_row_an_image(trained, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    embed(trained[0], "--split", "val", "--output", tmp_path / "found.parquet")
    embed(trained[0], "--split", "val", "--output", tmp_path / "found.npz")
    table, found = pandas.read_parquet(tmp_path / "found.parquet"), np.load(tmp_path / "found.npz")
    assert list(table) == ["number", "label", "class", *(f"feature_{number}" for number in range(8))]
    assert np.array_equal(table.iloc[:, 3:].to_numpy(), found["features"])
    assert table["class"].tolist() == found["class_names"][found["labels"]].tolist()


def test_parquet_without_pyarrow_is_one_sentence(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("swbn_lightning.command.embed.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        embed(trained[0], "--output", tmp_path / "found.parquet")
    assert stopped.value.code == 2 and "Parquet needs pyarrow: pip install pyarrow" in capsys.readouterr().err


def changed(trained, folder, **settings):
    content = torch.load(trained[0], weights_only=True)
    content["run"]["settings"] |= settings
    torch.save(content, folder / "changed.ckpt")
    return folder / "changed.ckpt"


@pytest.mark.parametrize(("settings", "words"), [
    ({"data.class_path": "os.system"}, "does not say with which data of this package it was trained, but os.system"),
    ({"data.class_path": "evil_module.Data"}, "evil_module.Data; --imports MODULE makes yours known"),
    ({"data.class_path": 5}, "but 5"),
    ({"data.init_args.dataset": "nothing"}, "unknown dataset 'nothing'"),
    ({"data.init_args.val.class_path": "os.system"}, "no EpisodicDataModule can be made as it says"),
    ({"data.init_args.image_size": "large"}, "image_size must be an integer of at least 1, got 'large'"),
    ({"data.init_args.future": 1}, "no EpisodicDataModule can be made as it says: .*future"),
    ({"data.init_args.dataset.more": 1}, "says? data.init_args.dataset.more twice"),
    ({"data.init_args.cache": True, "data.init_args.cache_dir": "x"}, "cache: true is for images read from files"),
])  # fmt: skip
def test_what_a_checkpoint_says_of_its_data_runs_nothing(settings, words, trained, tmp_path, monkeypatch, capsys):
    marker = tmp_path / "ran"
    (tmp_path / "evil_module.py").write_text(f"open({str(marker)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        embed(changed(trained, tmp_path, **settings), "--output", tmp_path / "x.npz")
    assert stopped.value.code == 2
    assert re.search(words, capsys.readouterr().err) and not marker.exists()


def test_what_cannot_work_is_said(trained, tmp_path, capsys):
    for arguments, words in (
        (["--output", "x.csv"], "features are written as .npz or .parquet"),
        (["--split", "held_out"], "EpisodicDataModule has no split held_out"),
        (["--images", tmp_path / "nothing"], "do not exist; give a folder of images"),
        (["--images", tmp_path], "holds no images"),
        (["--output", tmp_path], "is a folder; give the file for the features"),
        (["--imports", "no_such_module"], "there is no module 'no_such_module'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            embed(trained[0], *arguments)
        assert stopped.value.code == 2 and words in capsys.readouterr().err
    content = torch.load(trained[0], weights_only=True)
    content["model_class"] = "mine.Network"
    torch.save(content, tmp_path / "mine.ckpt")
    with pytest.raises(SystemExit):
        embed(tmp_path / "mine.ckpt")
    assert "is a checkpoint of mine.Network, which is no model of this package" in capsys.readouterr().err
