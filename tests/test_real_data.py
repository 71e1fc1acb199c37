"""On real photographs, where they are there (see conftest.py)."""

import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from cli import main
from fewshot.datasets.cifar_fs import load_cifar_fs
from fewshot.datasets.folders import load_mini_imagenet
from swbn_lightning.data.cache import ImageCache
from swbn_lightning.data.folders import IMAGENET_MEAN, IMAGENET_STD

CONFIG = Path(__file__).parents[1] / "configs" / "fewshot" / "cifar_fs_prototypical.yaml"


@pytest.fixture(scope="module")
def lossless(real_data, tmp_path_factory):
    """25 original images of each CIFAR-FS class, as class folders."""
    root = tmp_path_factory.mktemp("lossless")
    zipfile.ZipFile(real_data / "cifar100" / "cifar_fs_lossless_sample.zip").extractall(root)
    return root


@pytest.fixture(scope="module")
def cifar100(real_data, tmp_path_factory):
    """All of CIFAR-100 in torchvision's layout (pixels from a JPEG copy)."""
    root = tmp_path_factory.mktemp("cifar100")
    subprocess.run([sys.executable, str(real_data / "unpack_cifar.py"), "cifar100", "pickle", str(root)], check=True)
    return root


def test_cifar_fs_is_whole(cifar100):
    for split, classes in (("train", 64), ("val", 16), ("test", 20)):
        image_set = load_cifar_fs(split, str(cifar100))
        assert torch.bincount(image_set.labels).tolist() == [600] * classes
    # Labels are right: the class names of the file of labels are those of the names of the files.
    content = pickle.loads((cifar100 / "cifar-100-python" / "test").read_bytes())
    names = pickle.loads((cifar100 / "cifar-100-python" / "meta").read_bytes())["fine_label_names"]
    test = load_cifar_fs("test", str(cifar100))
    which = test.class_names[7]
    rows = [i for i, label in enumerate(content["fine_labels"]) if names[label] == which]
    expected = torch.from_numpy(content["data"][rows]).view(-1, 3, 32, 32)
    assert torch.equal(test.images[test.labels == 7][500:], expected)


@pytest.mark.slow
def test_training_on_photographs_beats_chance_and_tests_the_same_twice(lossless, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "--config", str(CONFIG), "--data.root", str(lossless), "--trainer.accelerator=cpu",
        "--trainer.max_epochs=1", "--data.train.episodes=20", "--model.lr_scheduler=null", "--model.warmup_steps=5",
        "--data.val.queries=10", "--data.test.queries=10", "--data.test.episodes=1000",
    ]  # fmt: skip
    main(["fit", *arguments])
    results = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "cli", "test", *arguments, "--ckpt_path", "runs/cifar_fs_prototypical"],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(CONFIG.parents[2])},
        )  # fmt: skip
        folder = next(line for line in done.stdout.splitlines() if line.startswith("run folder: "))[12:]
        results.append(json.loads((Path(folder) / "results.json").read_text())["results"])
    assert results[0] == results[1]
    (row,) = results[0]
    assert row["accuracy"] - row["ci95"] > 0.22  # chance is 0.20


@pytest.fixture(scope="module")
def mini_imagenet(real_data, tmp_path_factory):
    """90 images of each of mini-ImageNet's classes: lists, and split folders of JPEG files."""
    root = tmp_path_factory.mktemp("mini")
    zipfile.ZipFile(real_data / "mini_imagenet" / "mini_imagenet_90.zip").extractall(root)
    return root


def test_mini_imagenet_by_its_lists_and_by_its_folders(mini_imagenet, tmp_path):
    """The same photographs under the same labels; and a cache of them."""
    (tmp_path / "folders").mkdir()
    for split in ("train", "val", "test"):
        (tmp_path / "folders" / split).symlink_to(mini_imagenet / split)
    for split, classes in (("val", 16), ("test", 20)):
        listed = load_mini_imagenet(split, str(mini_imagenet))
        cache = ImageCache(tmp_path / "cache")
        folders = load_mini_imagenet(split, str(tmp_path / "folders"), cache=cache)
        assert f"{split}.csv" in listed.source and "class folders" in folders.source
        assert listed.class_names == folders.class_names and torch.equal(listed.labels, folders.labels)
        assert torch.equal(listed.images, folders.images) and listed.images.shape[1:] == (3, 84, 84)
        assert torch.bincount(listed.labels).tolist() == [90] * classes
        again = load_mini_imagenet(split, str(tmp_path / "folders"), cache=cache)
        assert torch.equal(again.images, folders.images)
    # Normalised by ImageNet's mean and deviation, these photographs are near 0 and 1.
    pixels = listed.images.double() / 255
    assert (pixels.mean((0, 2, 3)) - torch.tensor(IMAGENET_MEAN)).abs().max() < 0.05
    assert (pixels.std((0, 2, 3)) / torch.tensor(IMAGENET_STD) - 1).abs().max() < 0.3
