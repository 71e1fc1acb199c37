"""Few-shot data from image files through the data module: what is said, checked and kept."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from fewshot import EpisodeSettings, EpisodicDataModule, PrototypicalNetwork
from swbn_lightning.data import decode

SMALL = EpisodeSettings(ways=2, shots=1, queries=2, episodes=4)
CLASSES = {"train": ("ant", "bee", "cow"), "val": ("dog", "elk"), "test": ("fox", "gnu")}


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    for split, names in CLASSES.items():
        for name in names:
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(4):
                pixels = rng.integers(0, 256, (12, 12, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.png")
    return tmp_path


def folders(root, **options):
    settings = {"train": SMALL, "val": SMALL, "test": SMALL, "episodes_per_step": 1}
    return EpisodicDataModule(dataset="folders", root=str(root), image_size=12, **{**settings, **options})


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr("fewshot.datamodule.rank_zero_info", lines.append)
    return lines


def test_every_run_says_split_classes_images_and_where_they_are_from(root, said):
    data = folders(root)
    data.setup("fit")
    assert said == [
        f"folders/train: 3 classes, 12 images, from class folders of {root}/train",
        f"folders/val: 2 classes, 8 images, from class folders of {root}/val",
    ]
    data.setup("test")
    assert said[2:] == [f"folders/test: 2 classes, 8 images, from class folders of {root}/test"]
    data.setup("validate")
    assert len(said) == 3  # what is in memory is not read again


def test_what_is_wrong_is_said_before_training(root, monkeypatch):
    monkeypatch.setattr(PrototypicalNetwork, "training_step", lambda *args: pytest.fail("it trains"))

    def error(**options):
        trainer = pl.Trainer(
            max_epochs=1, logger=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        with pytest.raises(ValueError) as caught:
            trainer.fit(PrototypicalNetwork(backbone="resnet20"), datamodule=folders(root, **options))
        return str(caught.value)

    needs_more = EpisodeSettings(ways=2, shots=2, queries=3, episodes=4)
    assert "class 'ant' has 4 images, but 2 shots + 3 queries need 5 (3 of 3" in error(train=needs_more)
    assert "class 'dog' has 4 images" in error(val=needs_more)
    assert "4 ways asked of 3 classes" in error(train=EpisodeSettings(ways=4, queries=2, episodes=4))
    file = root / "val" / "elk" / "3.png"
    file.write_bytes(file.read_bytes()[:60])
    assert f"{file} cannot be read as an image" in error()
    file.unlink()
    (root / "test" / "hen").mkdir()
    assert "hen holds no images" in error()  # of whichever split
    (root / "test" / "hen" / "1.png").symlink_to(root / "train" / "ant" / "1.png")
    assert "are one and the same file" in error()


def test_the_cache_is_beside_the_data_or_where_one_says(root, tmp_path_factory, monkeypatch):
    plain = folders(root).image_set("train").images
    assert not (root / ".swbn_cache").exists()
    elsewhere = tmp_path_factory.mktemp("cache")
    for options, folder in (({}, root / ".swbn_cache"), ({"cache_dir": str(elsewhere / "a")}, elsewhere / "a")):
        assert torch.equal(folders(root, cache=True, **options).image_set("train").images, plain)
        (file,) = folder.iterdir()
        assert file.name.startswith("folders-train-12x3-")
        with monkeypatch.context() as patch:
            patch.setattr(decode, "read_image", lambda *args: pytest.fail("it decodes"))
            again = folders(root, cache=True, **options)
            assert torch.equal(again.image_set("train").images, plain)
    assert again.image_set("train").class_names == CLASSES["train"]


def test_caches_that_would_do_nothing(root):
    with pytest.raises(ValueError, match="cache_dir='x' is for cache: true"):
        folders(root, cache_dir="x")
    with pytest.raises(ValueError, match="read from files, which 'glyphs' does not"):
        EpisodicDataModule(cache=True)
    with pytest.raises(ValueError, match="folders: give a root"):
        EpisodicDataModule(dataset="folders", cache=True).setup("fit")
