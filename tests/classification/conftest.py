"""Tiny data sets in the real ones' files."""

import pickle
from pathlib import Path

import numpy as np
import pytest


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
