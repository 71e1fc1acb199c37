"""On the real MNIST, CIFAR-10 and CIFAR-100, where they are there (see conftest.py)."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torchvision import datasets

from classification import CIFAR10DataModule, CIFAR100DataModule, MNISTDataModule


@pytest.fixture(scope="module")
def cifar(real_data, tmp_path_factory):
    """Both CIFAR sets in torchvision's layout (pixels from a JPEG copy)."""
    root = tmp_path_factory.mktemp("cifar_both")
    for name in ("cifar10", "cifar100"):
        subprocess.run([sys.executable, str(real_data / "unpack_cifar.py"), name, "pickle", str(root)], check=True)
    return root


def statistics(data):
    """Mean and deviation of all training pixels, per channel, in double precision."""
    pixels = data.image_set("train").images
    counts = torch.stack([torch.bincount(pixels[:, c].flatten(), minlength=256) for c in range(data.channels)]).double()
    values = torch.arange(256).double() / 255
    mean = counts @ values / counts.sum(1)
    return mean, (counts @ values.square() / counts.sum(1) - mean.square()).sqrt()


def test_mnist(real_data):
    data = MNISTDataModule(root=str(real_data / "mnist"), val_share=0)  # packed, and right in the root
    data.setup("fit"), data.setup("test")
    assert len(data.image_set("train")) == 60_000 and len(data.image_set("test")) == 10_000
    for measured, named in zip(statistics(data), (data.mean, data.std), strict=True):
        assert measured.tolist() == pytest.approx(named, abs=5e-5)
    # The first five labels, as on the data set's page; and how often each digit occurs in the test set.
    assert data.image_set("train").labels[:5].tolist() == [5, 0, 4, 1, 9]
    counts = data.image_set("test").labels.bincount().tolist()
    assert counts == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.parametrize(
    ("module", "reader", "classes"),
    [(CIFAR10DataModule, datasets.CIFAR10, 10), (CIFAR100DataModule, datasets.CIFAR100, 100)],
)
def test_cifar(cifar, module, reader, classes):
    data = module(root=str(cifar), val_share=0)
    data.setup("fit"), data.setup("test")
    for split, count in (("train", 50_000), ("test", 10_000)):
        assert data.image_set(split).labels.bincount().tolist() == [count // classes] * classes
    for measured, named in zip(statistics(data), (data.mean, data.std), strict=True):
        assert measured.tolist() == pytest.approx(named, abs=1e-3)  # of the original images; these are a lossy copy

    # The same images and labels as torchvision reads, its MD5 sums left out.
    unchecked = {
        "train_list": [[name, None] for name, _ in reader.train_list],
        "test_list": [[name, None] for name, _ in reader.test_list],
        "meta": {**reader.meta, "md5": None},
    }
    read = type("Unchecked", (reader,), unchecked)
    for split in ("train", "test"):
        expected = read(str(cifar), train=split == "train")
        found = data.image_set(split)
        assert np.array_equal(found.images.permute(0, 2, 3, 1).numpy(), expected.data)
        assert found.labels.tolist() == expected.targets and list(found.class_names) == expected.classes
