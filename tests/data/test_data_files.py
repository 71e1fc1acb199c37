"""Files of MNIST's and CIFAR's form, whole and broken."""

import gzip
import pickle
import struct

import numpy as np
import pytest
import torch

from swbn_lightning.data.cifar import cifar10_class_names, read_cifar10
from swbn_lightning.data.idx import read_idx, read_idx_images


def idx(values: np.ndarray) -> bytes:
    """The format written out: zeros, type, number of dimensions, dimensions, values."""
    return bytes([0, 0, 8, values.ndim]) + b"".join(struct.pack(">I", n) for n in values.shape) + values.tobytes()


@pytest.fixture
def digits(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, 28, 28), np.uint8), rng.integers(0, 10, 12, np.uint8)
    (tmp_path / "images").write_bytes(idx(images))
    (tmp_path / "labels.gz").write_bytes(gzip.compress(idx(labels)))
    return tmp_path, images, labels


def test_idx_plain_and_packed(digits):
    folder, images, labels = digits
    assert np.array_equal(read_idx(folder / "images"), images)
    found, classes = read_idx_images(folder / "images", folder / "labels.gz")
    assert found.dtype == torch.uint8 and found.shape == (12, 1, 28, 28) and classes.dtype == torch.int64
    assert np.array_equal(found[:, 0].numpy(), images) and classes.tolist() == labels.tolist()


def test_idx_files_that_are_broken(digits):
    folder, _, labels = digits
    whole, packed = (folder / "images").read_bytes(), (folder / "labels.gz").read_bytes()

    def error(name, content, read=read_idx):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError) as caught:
            read(folder / name)
        assert str(folder / name) in str(caught.value)
        return str(caught.value)

    assert "should hold 12x28x28 values, but cannot hold more than 9324" in error("a", whole[:-100])
    assert "but holds more" in error("a", whole + b"x")
    for content in (b"", whole[:10], b"<html>" + whole, bytes([0, 0, 13, 1]) + whole[4:], bytes([0, 0, 8, 0])):
        assert "is not an IDX file of unsigned bytes" in error("a", content)
    for content in (b"", packed[:-12], packed[:6], b"x" + packed, packed[:10] + b"\xff" + packed[11:]):
        assert ("cannot be read" if content else "is not an IDX file") in error("a.gz", content)
    with pytest.raises(ValueError, match="nowhere cannot be read: .*No such file"):
        read_idx(folder / "nowhere")

    def labelled(content):
        return error("labels", content, lambda path: read_idx_images(folder / "images", path))

    assert "should hold a label for each of 12 images, has [11]" in labelled(idx(labels[:11]))
    assert "holds the label 10; labels run from 0 to 9" in labelled(idx(np.full(12, 10, np.uint8)))
    for shape in ((12, 27, 28), (12, 784), (0, 28, 28)):
        message = error("b", idx(np.zeros(shape, np.uint8)), lambda path: read_idx_images(path, folder / "labels.gz"))
        assert f"should hold images of 28x28 pixels, but holds {list(shape)}" in message


def batch(count, key="labels", classes=10, seed=0):
    rng = np.random.default_rng(seed)
    data, labels = rng.integers(0, 256, (count, 3072), np.uint8), rng.integers(0, classes, count).tolist()
    return {"data": data, key: labels, "filenames": [""] * count}


def test_cifar10_is_its_five_batches_in_order(tmp_path):
    batches = [batch(count, seed=count) for count in (3, 1, 4, 2, 5)]
    for number, content in enumerate(batches, 1):
        (tmp_path / f"data_batch_{number}").write_bytes(pickle.dumps(content, protocol=2))
    (tmp_path / "test_batch").write_bytes(pickle.dumps(batch(6, seed=9)))
    images, labels = read_cifar10(tmp_path, "train")
    assert labels.tolist() == [label for content in batches for label in content["labels"]]
    pixels = np.concatenate([content["data"] for content in batches])
    # Red, green and blue plane after another, each row by row (Krizhevsky's description of the files).
    assert np.array_equal(images.numpy(), pixels.reshape(15, 3, 32, 32))
    assert read_cifar10(tmp_path, "test")[1].tolist() == batch(6, seed=9)["labels"]
    names = [f"class {number}" for number in range(10)]
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, protocol=2))
    assert cifar10_class_names(tmp_path) == tuple(names)
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": names[:9]}))
    with pytest.raises(ValueError, match="batches.meta is not CIFAR-10's: expected 10 'label_names'"):
        cifar10_class_names(tmp_path)
    (tmp_path / "data_batch_4").unlink()
    with pytest.raises(ValueError, match="cannot read .*data_batch_4"):
        read_cifar10(tmp_path, "train")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "no 'data' and 'labels'"),
        ({"data": np.zeros((2, 3072), np.int64), "labels": [0, 1]}, r"got int64 \[2, 3072\]"),
        ({"data": np.zeros((2, 3071), np.uint8), "labels": [0, 1]}, r"got uint8 \[2, 3071\]"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, r"int64 labels \[1\]"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": ["cat", "dog"]}, r"object labels \[\]"),
        ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, r"uint8 \[0, 3072\]"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 10]}, "labels run from 0 to 10, not from 0 to 9"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [-1, 0]}, "labels run from -1 to 0"),
    ],
)
def test_files_that_are_not_cifar10(tmp_path, content, words):
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=f"test_batch is not a CIFAR-10 file.*{words}"):
        read_cifar10(tmp_path, "test")
