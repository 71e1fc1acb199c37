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


def test_both_forms_hold_the_same_photographs(cifar100, lossless):
    """Each lossless image has its re-encoded copy in the same class: about 40 dB away, others far."""
    folders, files = load_cifar_fs("val", str(lossless)), load_cifar_fs("val", str(cifar100))
    assert folders.class_names == files.class_names and len(folders) == 16 * 25
    for label in (0, 9):
        a = folders.images[folders.labels == label].flatten(1).float()
        b = files.images[files.labels == label].flatten(1).float()
        nearest = torch.cdist(a, b).min(dim=1).values / 3072**0.5
        assert nearest.max() < 255 / 10 ** (34 / 20)


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
