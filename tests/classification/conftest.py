"""Tiny data sets in the real ones' files."""

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(struct.pack(">I", n) for n in values.shape)
    content = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture(scope="session")
def tiny_mnist(tmp_path_factory) -> Path:
    """A root with ``MNIST/raw`` and ``FashionMNIST/raw``: 200 + 41 images, each filled with its own number."""
    root = tmp_path_factory.mktemp("digits")
    for name, suffix in (("MNIST", ".gz"), ("FashionMNIST", "")):
        folder = root / name / "raw"
        folder.mkdir(parents=True)
        for part, count in (("train", 200), ("t10k", 41)):
            numbers = np.arange(count)
            images = np.broadcast_to(numbers[:, None, None], (count, 28, 28))
            write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", images)
            write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", numbers * 7 % 10)
    return root


@pytest.fixture(scope="session")
def tiny_cifar10(tmp_path_factory) -> Path:
    """A root with ``cifar-10-batches-py``: 5 x 20 + 30 images of noise."""
    root = tmp_path_factory.mktemp("photographs")
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, count in (*((f"data_batch_{number}", 20) for number in range(1, 6)), ("test_batch", 30)):
        content = {"data": rng.integers(0, 256, (count, 3072), np.uint8), "labels": (np.arange(count) % 10).tolist()}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"class {n}" for n in range(10)]}))
    return root
