"""mini-ImageNet in each of the forms that people have: the same images from all."""

import csv
import pickle
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot.datasets.folders import MINI_IMAGENET_CLASSES as CLASSES
from fewshot.datasets.folders import load_mini_imagenet
from fewshot.datasets.forms import classes_of

SIZES = {"train": 64, "val": 16, "test": 20}
EACH, SIDE = 3, 12


@pytest.fixture(scope="module")
def pixels():
    """Every split's classes with their images."""
    rng = np.random.default_rng(0)
    return {
        split: {name: rng.integers(0, 256, (EACH, SIDE, SIDE, 3), np.uint8) for name in classes_of(CLASSES, split)}
        for split in SIZES
    }


def file_names(name):
    return [f"{name}{number:08}.png" for number in range(EACH)]


def write_images(pixels, folder_of):
    for split, classes in pixels.items():
        for name, images in classes.items():
            folder = folder_of(split, name)
            folder.mkdir(parents=True, exist_ok=True)
            for file, image in zip(file_names(name), images, strict=True):
                Image.fromarray(image).save(folder / file, compress_level=1)


def write_lists(pixels, folder):
    folder.mkdir(parents=True, exist_ok=True)
    for split, classes in pixels.items():
        with (folder / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["filename", "label"])
            writer.writerows((image, name) for name in classes for image in file_names(name))


def write_learn2learn(pixels, root, val):
    for split, classes in pixels.items():
        name = {"val": val}.get(split, split)
        numbers = {c: list(range(i * EACH, (i + 1) * EACH)) for i, c in enumerate(classes)}
        content = {"image_data": np.concatenate(list(classes.values())), "class_dict": numbers}
        (root / f"mini-imagenet-cache-{name}.pkl").write_bytes(pickle.dumps(content, protocol=2))


def write_gidariss(pixels, root, protocol):
    for split, classes in pixels.items():
        labels = np.repeat(np.arange(len(classes)), EACH).tolist()
        content = {"data": np.concatenate(list(classes.values())), "labels": labels}
        part = "train_phase_train" if split == "train" else split
        path = root / f"miniImageNet_category_split_{part}.pickle"
        path.write_bytes(pickle.dumps(content, protocol=protocol))


FORMS = {
    "csv, images/": lambda p, r: (write_lists(p, r), write_images(p, lambda split, name: r / "images")),
    "splits/csv, split folders": lambda p, r: (
        write_lists(p, r / "splits"), write_images(p, lambda split, name: r / split / name)
    ),
    "learn2learn": lambda p, r: write_learn2learn(p, r, "validation"),
    "gidariss, protocol 2": lambda p, r: write_gidariss(p, r, 2),
    "gidariss, protocol 4": lambda p, r: write_gidariss(p, r, 4),
    "folders": lambda p, r: write_images(p, lambda split, name: r / split / name),
}  # fmt: skip
SOURCES = {"csv": "images listed in", "lea": "decoded", "gid": "decoded", "spl": "listed in"}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_images(pixels, tmp_path, form):
    FORMS[form](pixels, tmp_path)
    for split, classes in SIZES.items():
        image_set = load_mini_imagenet(split, str(tmp_path), image_size=SIDE)
        expected = np.concatenate(list(pixels[split].values())).transpose(0, 3, 1, 2)  # the classes are sorted
        order = torch.argsort(image_set.labels, stable=True)
        assert np.array_equal(image_set.images[order].numpy(), expected)
        assert torch.bincount(image_set.labels).tolist() == [EACH] * classes
        names = [f"label {k}" for k in range(classes)] if "gidariss" in form else pixels[split]
        assert image_set.class_names == tuple(names)
        assert image_set.name == f"mini-imagenet/{split}"
        assert SOURCES.get(form[:3], "class folders of") in image_set.source


def test_the_class_lists_are_ravi_and_larochelles(real_data):
    for split, classes in SIZES.items():
        rows = csv.DictReader((real_data / "mini_imagenet" / "splits_full" / f"{split}.csv").open())
        assert {row["label"] for row in rows} == set(classes_of(CLASSES, split))
        assert len(classes_of(CLASSES, split)) == classes


def error(root, split="val", **options):
    with pytest.raises(ValueError) as caught:
        load_mini_imagenet(split, root, **{"image_size": SIDE, **options})
    return str(caught.value)


def test_pickles_gone_wrong(pixels, tmp_path):
    write_learn2learn(pixels, tmp_path, "val")
    assert "decoded images of 12x12; got image_size=84" in error(str(tmp_path), image_size=84)
    path = tmp_path / "mini-imagenet-cache-val.pkl"
    shutil.copy(tmp_path / "mini-imagenet-cache-test.pkl", path)  # a split mistaken for another
    message = error(str(tmp_path))
    assert "does not hold the 16 classes of the val split" in message and "foreign" in message
    path.write_text("<html>Too many users have viewed or downloaded this file recently.</html>")
    message = error(str(tmp_path))
    assert "but a web page" in message and f"place it at {path}" in message
    path.unlink()
    message = error(str(tmp_path))
    for word in ("nothing usable", "{train,val,test}.csv", "mini-imagenet-cache-", "miniImageNet_", "<class>/<image>"):
        assert word in message


def test_lists_and_folders_gone_wrong(pixels, tmp_path):
    root = tmp_path / "a"
    FORMS["csv, images/"](pixels, root)
    name = next(iter(pixels["test"]))
    with (root / "test.csv").open("a") as file:
        file.write(f"{file_names(next(iter(pixels['val'])))[0]},{name}\n")
    assert "of val and" in error(str(root)) and "are one and the same file" in error(str(root), "train")
    shutil.copy(root / "test.csv", root / "val.csv")
    assert "is in both val and test" in error(str(root), "train")
    for split in ("val", "test"):
        (root / f"{split}.csv").unlink()
    assert "train.csv found, but no val.csv beside" in error(str(root))
    (root / "images" / file_names(next(iter(pixels["train"])))[1]).unlink()
    assert "names images that are not there" in error(str(root), "train")

    root = tmp_path / "b"
    FORMS["folders"]({"train": pixels["val"]}, root)
    assert "does not hold the 64 classes of the train split" in error(str(root), "train")
    assert f"{root} has no folder val/ (it holds train)" in error(str(root))
