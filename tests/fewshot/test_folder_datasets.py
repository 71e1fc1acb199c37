"""Any class folders and lists; tiered-ImageNet and CUB, which are such folders with known numbers of classes."""

import pytest
import torch
from PIL import Image

from fewshot.datasets import get_dataset
from fewshot.datasets.folders import CUB, TIERED_IMAGENET, load_folders


def draw(folder, classes, each=3, size=(10, 8), suffix=".png"):
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for image in range(each):
            Image.new("RGB", size, (10 * number, image, 0)).save(folder / name / f"{image}{suffix}")


CLASSES = {"train": ("ant", "bee", "cow"), "val": ("dog", "elk"), "test": ("fox", "gnu")}


@pytest.fixture
def flat(tmp_path):
    draw(tmp_path, [name for names in CLASSES.values() for name in names])
    return tmp_path


def check(root, split, name="folders"):
    image_set = get_dataset(name).load(split, str(root), 8)
    assert image_set.class_names == CLASSES[split] and image_set.name == f"{name}/{split}"
    assert image_set.images.shape[1:] == (3, 8, 8)
    assert torch.bincount(image_set.labels).tolist() == [3] * len(CLASSES[split])
    assert image_set.images[image_set.labels == 1][:, 1, 4, 4].tolist() == [0, 1, 2]
    return image_set


@pytest.mark.parametrize("inner", ["", "images"])
def test_split_folders(tmp_path, inner):
    for split, names in CLASSES.items():
        draw(tmp_path / inner / split, names)
    for split in CLASSES:
        assert "class folders of" in check(tmp_path, split).source


@pytest.mark.parametrize(("inner", "lists"), [("", "splits"), ("images", "csv"), ("images", "")])
def test_class_lists_beside_one_folder(tmp_path, inner, lists):
    draw(tmp_path / inner, [name for names in CLASSES.values() for name in names])
    (tmp_path / lists).mkdir(exist_ok=True)
    files = dict(zip(CLASSES, ("training", "valid", "test"), strict=True))
    for split, name in files.items():
        (tmp_path / lists / f"{name}.txt").write_text("\n".join(reversed(CLASSES[split])))
    for split, name in files.items():
        assert f"{name}.txt" in check(tmp_path, split).source


def test_image_lists_beside_one_folder(flat):
    for split, names in CLASSES.items():
        rows = [f"{image}.png,{name}" for name in names for image in range(3)]
        (flat / f"{split}.csv").write_text("\n".join(["filename,label", *rows]))
    for split in CLASSES:
        check(flat, split)
    with (flat / "val.csv").open("a") as file:
        file.write("\n../../etc/passwd,dog\n")
    for split in CLASSES:  # whichever is read
        with pytest.raises(ValueError, match=r"val.csv names '../../etc/passwd': names must be relative"):
            load_folders(split, str(flat), 8)


def test_lists_of_classes_that_are_not_there(flat):
    (flat / "train.txt").write_text("ant\nyak\n")
    with pytest.raises(ValueError, match=r"train.txt names the class yak, but there is no folder .*yak \(.* holds ant"):
        load_folders("train", str(flat), 8)
    with pytest.raises(ValueError, match=r"train.txt found, but no val.txt beside"):
        load_folders("val", str(flat), 8)
    (flat / "train.txt").write_text("../elsewhere\n")
    with pytest.raises(ValueError, match="must be relative"):
        load_folders("train", str(flat), 8)
    (flat / "zoo").mkdir()
    (flat / "train.txt").write_text("zoo\n")
    with pytest.raises(ValueError, match="zoo, which .*train.txt names, holds no images"):
        load_folders("train", str(flat), 8)
    for name in ("val.txt", "dev.txt"):
        (flat / name).write_text("dog\n")
    with pytest.raises(ValueError, match=r"dev.txt and val.txt are both lists of val"):
        load_folders("val", str(flat), 8)
    (flat / "dev.txt").unlink()
    for split in ("train", "val"):
        (flat / f"{split}.txt").write_text("ant\n")
    with pytest.raises(ValueError, match="'ant' is in both train and val"):
        load_folders("val", str(flat), 8)


@pytest.mark.parametrize(("name", "counts"), [("cub", CUB), ("tiered-imagenet", TIERED_IMAGENET)])
def test_published_divisions_have_their_number_of_classes(tmp_path, name, counts):
    (tmp_path / "train.zip").write_text("")
    with pytest.raises(ValueError, match=rf"{name}: nothing usable in .* \(it holds train.zip\). Looked for lists"):
        get_dataset(name).load("train", str(tmp_path), 2)
    for split, count in counts.items():
        draw(tmp_path / split, [f"{split}{number}" for number in range(count)], each=1, size=(2, 2), suffix=".bmp")
        assert get_dataset(name).load(split, str(tmp_path), 2).num_classes == count
    (tmp_path / "val" / "more").mkdir()
    Image.new("L", (2, 2)).save(tmp_path / "val" / "more" / "1.png")
    with pytest.raises(
        ValueError, match=rf"holds {counts['val'] + 1} classes, but the val split of {name} has {counts['val']}"
    ):
        get_dataset(name).load("val", str(tmp_path), 2)
