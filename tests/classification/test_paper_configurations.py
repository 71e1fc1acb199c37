"""Every configuration of the paper's many-shot experiments takes a step through the command."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from cli import main

REPOSITORY = Path(__file__).parents[2]
PAPER = REPOSITORY / "configs" / "paper"
CONFIGS = sorted(path for path in PAPER.rglob("*.yaml") if "class_path: fewshot." not in path.read_text())


def _is_large(path):
    return any(word in str(path.relative_to(PAPER)) for word in ("imagenet", "wrn", "epoch_time", "cifar100/resnetv2"))


@pytest.fixture(scope="session")
def tiny_imagenet(tmp_path_factory) -> Path:
    """A root with ``train`` and ``val``: two classes of four and two images."""
    root, rng = tmp_path_factory.mktemp("imagenet"), np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (70, 80, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


@pytest.mark.parametrize(
    "config",
    [pytest.param(path, marks=[pytest.mark.slow] * _is_large(path)) for path in CONFIGS],
    ids=lambda path: str(path.relative_to(PAPER)),
)
def test_it_takes_a_step(config, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = yaml.safe_load(config.read_text())["data"]["class_path"].removeprefix("classification.")
    fixture = {
        "MNISTDataModule": "tiny_mnist", "CIFAR10DataModule": "tiny_cifar10", "CIFAR100DataModule": "tiny_cifar100",
        "ImageNetDataModule": "tiny_imagenet",
    }[data]  # fmt: skip
    arguments = ["--config", str(config), "--trainer.fast_dev_run=true", "--trainer.accelerator=cpu"]
    arguments += [
        "--data.root",
        str(request.getfixturevalue(fixture)),
        "--data.batch_size=4",
        "--data.eval_batch_size=4",
        "--whiteness.num_images=8",
    ]
    if data == "ImageNetDataModule":
        arguments += ["--model.num_classes=2", "--data.image_size=64", "--data.eval_resize=64", "--data.num_workers=0"]
    main(["fit", *arguments])


def test_the_schedules_are_the_papers():
    # Section 4.1.1: 100 epochs, halved every 30; 4.1.2: 150, a tenth every 30; appendix E: MNIST 100, halved every 20.
    expected = {
        "step_size/vgg.yaml": (100, {"step_size": 30, "gamma": 0.5}),
        "batch_size/vgg.yaml": (150, {"step_size": 30, "gamma": 0.1}),
        "mnist/mlp.yaml": (100, {"step_size": 20, "gamma": 0.5}),
        "curves/vgg.yaml": (150, {"step_size": 30, "gamma": 0.5}),
        "curves/resnet32.yaml": (150, {"step_size": 30, "gamma": 0.5}),
    }
    for name, (epochs, schedule) in expected.items():
        content = yaml.safe_load((PAPER / name).read_text())
        assert content["trainer"]["max_epochs"] == epochs, name
        arguments = content["model"]["init_args"]
        assert arguments["lr_scheduler"]["init_args"] == schedule, name
        assert arguments["optimizer"]["init_args"] == {"lr": 0.1, "momentum": 0.9}, name  # no weight decay
        # Nothing held out, no augmentation; the figures are of the test loss by epoch.
        assert content["data"]["init_args"] == {"val_share": 0, "curve_split": "test", "batch_size": 128}, name
