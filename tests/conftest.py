"""Shared by the tests: real data where it is there, and tiny generated data everywhere."""

import dataclasses
import functools
import gzip
import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)
# Lightning 2.6 uses calls of jsonargparse 4 that version 5, outside our range, removes.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

REPOSITORY = Path(__file__).parents[1]
# Real images are not part of the project; they may lie beside a checkout, or where this variable says.
REAL_DATA = Path(os.environ.get("SWBN_TEST_DATA", REPOSITORY.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real images; skips, saying so, where there is none, but fails where one was named."""
    if not REAL_DATA.is_dir():
        message = f"no real images at {REAL_DATA}; set SWBN_TEST_DATA to their folder"
        if "SWBN_TEST_DATA" in os.environ:
            pytest.fail(message)
        pytest.skip(message)
    return REAL_DATA


@pytest.fixture(autouse=True)
def _own_random_stream():
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session", autouse=True)
def _letters_are_drawn_once():
    """Drawing the letters takes seconds, and hundreds of tests train on the same ones."""
    from classification.datamodules import glyphs as classified
    from fewshot.datasets import registry
    from swbn_lightning.data.glyphs import glyphs

    drawn = functools.lru_cache(maxsize=None)(glyphs)

    def copied(*args, **kwargs):
        images = drawn(*args, **kwargs)
        return dataclasses.replace(images, images=images.images.clone(), labels=images.labels.clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "glyphs", copied)
        patch.setattr(classified, "glyphs", copied)
        yield


@pytest.fixture(scope="session")
def tiny_cifar100(tmp_path_factory) -> Path:
    """A root that holds ``cifar-100-python`` with all 100 classes, 20 + 4 noise images of each."""
    from fewshot.datasets.cifar_fs import CIFAR_FS_CLASSES
    from fewshot.datasets.forms import classes_of

    root = tmp_path_factory.mktemp("cifar")
    folder = root / "cifar-100-python"
    folder.mkdir()
    names = sorted(name for split in ("train", "val", "test") for name in classes_of(CIFAR_FS_CLASSES, split))
    rng = np.random.default_rng(0)
    for part, each in (("train", 20), ("test", 4)):
        labels = np.repeat(np.arange(100), each)
        # One hue a class and noise, so that there is something to learn.
        hue = rng.integers(0, 200, (100, 3, 1))[labels]
        noise = rng.integers(0, 56, (len(labels), 3, 1024))
        data = (hue + noise).astype(np.uint8).reshape(-1, 3072)
        content = {"data": data, "fine_labels": labels.tolist(), "filenames": [""] * len(labels)}
        (folder / part).write_bytes(pickle.dumps(content, protocol=2))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))
    return root


@pytest.fixture(scope="session")
def tiny_mini_imagenet(tmp_path_factory) -> Path:
    """A root with learn2learn's pickles of mini-ImageNet: 16 noise images of 21x21 of each of the 100 classes."""
    from fewshot.datasets.folders import MINI_IMAGENET_CLASSES
    from fewshot.datasets.forms import classes_of

    root = tmp_path_factory.mktemp("mini_imagenet")
    rng = np.random.default_rng(0)
    for split, file in (("train", "train"), ("val", "validation"), ("test", "test")):
        names = classes_of(MINI_IMAGENET_CLASSES, split)
        numbers = {name: list(range(16 * place, 16 * place + 16)) for place, name in enumerate(names)}
        data = rng.integers(0, 256, (16 * len(names), 21, 21, 3), np.uint8)
        content = {"image_data": data, "class_dict": numbers}
        (root / f"mini-imagenet-cache-{file}.pkl").write_bytes(pickle.dumps(content, protocol=2))
    return root


@pytest.fixture(scope="session")
def tiny_data(tiny_cifar100, tiny_mini_imagenet) -> Callable[[Path], list[str]]:
    """Of a configuration that needs files: the arguments that give it tiny ones."""

    def arguments(config: Path) -> list[str]:
        text = config.read_text()
        if "backbone_checkpoint:" in text:  # of a run that is not there
            return [*arguments_of_data(text), "--model.backbone_checkpoint=null"]
        return arguments_of_data(text)

    def arguments_of_data(text: str) -> list[str]:
        if "dataset: mini-imagenet" in text:
            # Covariances of 512 channels take longer than the step.
            quick = ["--data.image_size=21", "--whiteness.layers=backbone.blocks.0.*"]
            return ["--data.root", str(tiny_mini_imagenet), *quick]
        return ["--data.root", str(tiny_cifar100)] if "dataset: cifar-fs" in text else []

    return arguments


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
def trained(tmp_path_factory):
    """The last checkpoint of a training of one step, and the command's arguments for it."""
    from cli import main
    from swbn_lightning.runs.checkpoints import find_checkpoint

    root = tmp_path_factory.mktemp("runs")
    arguments = [
        "--config", str(REPOSITORY / "configs" / "quickstart.yaml"), f"--run.root={root}", "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false", "--trainer.max_epochs=1", "--data.train.episodes=1",
        "--data.episodes_per_step=1", "--data.val.episodes=5", "--data.test.episodes=5", "--whiteness.every_n_epochs=0",
        "--model.backbone=mlp", "--model.backbone_args={hidden: [8]}",
    ]  # fmt: skip
    main(["fit", *arguments])
    return find_checkpoint(root / "quickstart", "last"), arguments


@pytest.fixture
def quick_pictures(request, monkeypatch):
    """Figures are made and not drawn, which takes a second each; but where a test asks for ``drawn``."""
    if "drawn" not in request.fixturenames:
        pixel = io.BytesIO()
        Image.new("RGB", (1, 1)).save(pixel, format="png")
        monkeypatch.setattr("swbn_lightning.runs.page.render.to_png", lambda figure: pixel.getvalue())


@pytest.fixture
def drawn():
    """Pictures are drawn, as they are outside of tests."""
