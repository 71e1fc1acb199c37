"""A network that is trained on one data set and tested on another."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cli import main
from fewshot import EpisodicDataModule
from swbn_lightning.data.folders import IMAGENET_MEAN, IMAGENET_STD

pytestmark = pytest.mark.usefixtures("small_things")
MODEL = [
    "--model=fewshot.PrototypicalNetwork", "--model.backbone=tiny", "--model.backbone_args={in_channels: 3}",
    "--data=fewshot.EpisodicDataModule", "--data.train={ways: 3, queries: 2, episodes: 4}",
    "--data.episodes_per_step=2", "--data.val={ways: 3, queries: 2, episodes: 20}",
    "--data.test={ways: 3, queries: 2, episodes: 20}",
    "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--whiteness.every_n_epochs=0", "--data.image_size=16",
]  # fmt: skip


def folders(root, seed):
    """Split folders whose classes, file names and numbers are the same for every seed, and whose pixels are not."""
    rng = np.random.default_rng(seed)
    for split, classes in (("train", "abcd"), ("val", "efg"), ("test", "hijk")):
        for number, name in enumerate(classes):
            (Path(root) / split / name).mkdir(parents=True)
            for image in range(4):
                pixels = 60 * number + rng.integers(0, 60, (16, 16, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(f"{root}/{split}/{name}/{image}.png")
    return f"--data.root={root}"


def run(kind, name, *arguments):
    main([kind, *MODEL, "--data.dataset=folders", f"--run.name={name}", *arguments])


def row(name, version):
    (found,) = json.loads(Path(f"runs/{name}/version_{version}/results.json").read_text())["results"]
    return found


def test_another_data_set_than_that_of_the_training(capsys, tmp_path):
    real, sketch = folders("real", 0), folders("sketch", 1)
    for seed in "ab":
        run("fit", seed, real)
        for root in (real, sketch):
            run("test", seed, root, f"--ckpt_path=runs/{seed}")
    printed = capsys.readouterr()
    assert re.search(r"│ data +│ +folders:sketch │\n│ trained on +│ +folders │", printed.out)
    own, other = row("a", 1), row("a", 2)
    assert own["data"] == "folders:real" and "trained_on" not in own
    assert (other["data"], other["trained_on"]) == ("folders:sketch", "folders")
    assert own["episodes_id"] != other["episodes_id"]
    assert b"sketch" not in b"".join(path.read_bytes() for path in Path("runs/a/version_0/checkpoints").iterdir())

    # Both tests of both runs, each data set in a table of its own.
    main(["compare", "runs/a", "runs/b"])
    titles = re.findall(r"test, \d-way .*? \d+ episodes", capsys.readouterr().out)
    common = "test, 3-way 1-shot, 2 queries, seed 0"
    assert titles == [f"{common}, 20 episodes", f"{common}, on folders:sketch, 20 episodes"]

    # Each tested on its own data: classes, numbers and names of the files are the same, and the images are not.
    run("fit", "c", sketch)
    run("test", "c", sketch, "--ckpt_path=runs/c")
    with pytest.raises(SystemExit):
        main(["compare", "A=runs/a/version_1", "C=runs/c"])
    assert "were tested on other episodes: their classes, images a class, image files" in capsys.readouterr().err
    # A copy elsewhere is the same data.
    shutil.copytree("real", "copies/real")
    run("test", "b", "--data.root=copies/real", "--ckpt_path=runs/b")
    assert "trained_on" not in row("b", 3) and row("b", 3)["episodes_id"] == own["episodes_id"]
    main(["compare", "A=runs/a/version_1", "B=runs/b/version_3"])


def test_images_of_another_size_or_normalisation_are_told(capsys):
    real = folders("real", 0)
    run("fit", "a", real)
    (Path("support") / "x").mkdir(parents=True)
    (Path("support") / "y").mkdir()
    for name in "xy":
        Image.new("RGB", (16, 16)).save(f"support/{name}/0.png")
    naming = ["--data.support=support", "--data.query=support/x"]
    same = ["--ckpt_path=runs/a", real]
    for kind, more in (("test", []), ("predict", naming)):
        capsys.readouterr()
        with pytest.warns(
            UserWarning, match=r"trained on images of 16 pixels a side, mean \[0.485.* given images of 20"
        ):
            run(kind, "a", *same, *more, "--data.image_size=20")
        with pytest.warns(UserWarning, match=r"given images of 16 pixels a side, mean \[0.5071"):
            run(kind, "a", *same, *more, "--data.normalize_as=cifar-fs")
    main(["test", *MODEL, "--data.dataset=folders", *same, "--run.name=a", "--data.normalize_as=mini-imagenet"])


@pytest.mark.filterwarnings("error:the network was trained")
def test_the_same_images_are_not_warned_of():
    real = folders("real", 0)
    run("fit", "a", real)
    run("test", "a", real, "--ckpt_path=runs/a")
    assert row("a", 1)["data"] == "folders:real"


def test_what_has_to_match_is_one_sentence(capsys):
    run("fit", "a", folders("real", 0))

    def refused(*arguments):
        with pytest.raises(SystemExit):
            main(["test", *MODEL, "--ckpt_path=runs/a", *arguments])
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    assert "the images have 1 channel(s), but the backbone takes 3" in (said := refused("--data.dataset=shades"))
    assert "trained already takes data of 3 channel(s) only" in said
    words = "normalize_as='shades' is for images of 1 channel(s), but 'folders' has 3"
    assert words in refused("--data.dataset=folders", "--data.root=real", "--data.normalize_as=shades")


def test_normalize_as_is_the_other_data_sets():
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    found = EpisodicDataModule("cifar-fs", normalize_as="folders").normalize(images)
    torch.testing.assert_close(found, (images / 255 - mean) / std)
