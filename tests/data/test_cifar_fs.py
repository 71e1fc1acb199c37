"""CIFAR-FS from CIFAR-100's files and from folders; roots that are something else."""

import csv
import pickle
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot.datasets.cifar_fs import FC100, cifar_fs_classes, load_cifar_fs, load_fc100
from fewshot.datasets.forms import classes_of
from swbn_lightning.data.cifar import cifar100_class_names, read_cifar100

SIZES = {"train": 64, "val": 16, "test": 20}


def test_class_lists():
    lists = {split: cifar_fs_classes(split) for split in SIZES}
    assert {split: len(classes) for split, classes in lists.items()} == SIZES
    assert len(set().union(*lists.values())) == 100


def test_class_lists_are_the_published_ones(real_data):
    for split in SIZES:
        published = (real_data / "cifar100" / "cifar_fs_splits" / f"{split}.txt").read_text().split()
        assert sorted(published) == list(cifar_fs_classes(split))


@pytest.mark.parametrize("nested", [True, False])
def test_from_cifar100_files(tiny_cifar100, nested):
    root = tiny_cifar100 if nested else tiny_cifar100 / "cifar-100-python"
    names = cifar100_class_names(tiny_cifar100 / "cifar-100-python")
    images, fine = zip(*(read_cifar100(tiny_cifar100 / "cifar-100-python", p) for p in ("train", "test")), strict=True)
    for split, classes in SIZES.items():
        image_set = load_cifar_fs(split, str(root))
        assert image_set.num_classes == classes and len(image_set) == classes * 24
        assert image_set.images.shape[1:] == (3, 32, 32)
        # Every image of a class, from both files, and under its own name.
        for label, name in list(enumerate(image_set.class_names))[:3]:
            expected = torch.cat(images)[torch.cat(fine) == names.index(name)]
            assert torch.equal(image_set.images[image_set.labels == label], expected)


@pytest.fixture
def class_folders(tmp_path):
    rng = np.random.default_rng(0)
    for split in SIZES:
        for name in cifar_fs_classes(split):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(2):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path


def test_from_class_folders(class_folders):
    image_set = load_cifar_fs("val", str(class_folders))
    name = image_set.class_names[3]
    pixels = np.asarray(Image.open(class_folders / "val" / name / "1.png")).transpose(2, 0, 1)
    assert torch.equal(image_set.images[image_set.labels == 3][1], torch.from_numpy(pixels.copy()))
    assert load_cifar_fs("val", str(class_folders), image_size=40).images.shape[2:] == (40, 40)


def test_folder_errors(class_folders):
    (class_folders / "val" / "notes.txt").write_text("x")
    (class_folders / "val" / "__MACOSX").mkdir()
    hidden = class_folders / "val" / cifar_fs_classes("val")[0] / ".hidden.png"
    hidden.write_bytes(b"not an image")
    with pytest.warns(
        UserWarning, match=r"cifar-fs/val: passed over 3 that are neither.*__MACOSX, notes.txt, .*\.hidden"
    ):
        assert len(load_cifar_fs("val", str(class_folders))) == 32  # foreign and hidden files are passed over

    name = cifar_fs_classes("val")[2]
    file = class_folders / "val" / name / "0.png"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match=f"{name}/0.png cannot be read as an image"):
        load_cifar_fs("val", str(class_folders))
    for path in (class_folders / "val" / name).iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=f"{name} holds no images"):
        load_cifar_fs("val", str(class_folders))
    file.write_bytes((class_folders / "val" / cifar_fs_classes("val")[3] / "0.png").read_bytes())
    (class_folders / "val" / name).rename(class_folders / "val" / "dragon")
    with pytest.raises(ValueError, match=rf"missing {name} \(1\), foreign dragon \(1\)"):
        load_cifar_fs("val", str(class_folders))


def test_roots_of_another_kind(tmp_path, tiny_cifar100):
    def error(root, **options):
        with pytest.raises(ValueError) as caught:
            load_cifar_fs("train", root, **options)
        return str(caught.value)

    assert "give a root" in error(None)
    assert "does not exist" in error(str(tmp_path / "nowhere"))
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file, not a folder" in error(str(file))
    empty = tmp_path / "empty"
    empty.mkdir()
    message = error(str(empty))
    assert "it holds nothing" in message and "Looked for" in message and "cifar-100-python" in message
    (empty / "data_batch_1").write_text("")
    assert "it holds data_batch_1" in error(str(empty))
    assert "32x32; got image_size=64" in error(str(tiny_cifar100), image_size=64)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"data": np.zeros((2, 3072), np.uint8)}, "no 'data' and 'fine_labels'"),
        ({"data": np.zeros((2, 100), np.uint8), "fine_labels": [0, 1]}, r"got uint8 \[2, 100\]"),
        ({"data": np.zeros((2, 3072), np.uint8), "fine_labels": [0]}, r"labels \[1\]"),
    ],
)
def test_files_that_are_not_cifar100(tmp_path, content, words):
    (tmp_path / "train").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=words):
        read_cifar100(tmp_path, "train")
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": ["a"]}))
    with pytest.raises(ValueError, match="expected 100"):
        cifar100_class_names(tmp_path)


def meta_opt_net(classes, each=2, seed=0):
    """MetaOptNet's form: images as they are shown, labels of CIFAR-100's numbering."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.sort(rng.permutation(100)[:classes]), each)
    return {"data": rng.integers(0, 256, (len(labels), 32, 32, 3), np.uint8), "labels": labels.tolist()}


@pytest.mark.parametrize(
    ("load", "prefix", "sizes"),
    [(load_cifar_fs, "CIFAR_FS", (64, 16, 20)), (load_fc100, "FC100", (60, 20, 20))],
)
def test_from_metaoptnets_pickles(tmp_path, load, prefix, sizes):
    for split, classes in zip(SIZES, sizes, strict=True):
        content = meta_opt_net(classes)
        (tmp_path / f"{prefix}_{split}.pickle").write_bytes(pickle.dumps(content, protocol=2))
        image_set = load(split, str(tmp_path))
        assert image_set.num_classes == classes and image_set.images.shape == (2 * classes, 3, 32, 32)
        for row in (0, 5, 17):
            assert np.array_equal(image_set.images[row].numpy(), content["data"][row].transpose(2, 0, 1))
            assert image_set.class_names[image_set.labels[row]] == f"label {content['labels'][row]}"
    (tmp_path / f"{prefix}_val.pickle").write_bytes(pickle.dumps(meta_opt_net(15)))
    with pytest.raises(ValueError, match=f"holds 15 classes, but the val split of .* has {sizes[1]}"):
        load("val", str(tmp_path))
    with pytest.raises(ValueError, match="32x32; got image_size=84"):
        load("val", str(tmp_path), image_size=84)
    (tmp_path / f"{prefix}_val.pickle").unlink()
    with pytest.raises(ValueError, match=f"nothing usable .*Looked for .*{prefix}_{{train,val,test}}.pickle"):
        load("val", str(tmp_path))
    with pytest.raises(ValueError, match="no split 'validation'; there are train, val, test"):
        load("validation", str(tmp_path))


def test_fc100_divides_superclasses(real_data, tiny_cifar100):
    rows = csv.DictReader((real_data / "cifar100" / "classes.csv").open())
    superclass = {row["fine_name"]: row["coarse_name"] for row in rows}
    lists = {split: classes_of(FC100.classes, split) for split in SIZES}
    assert {split: len(classes) for split, classes in lists.items()} == {"train": 60, "val": 20, "test": 20}
    assert len({superclass[name] for split in SIZES for name in lists[split]}) == 20
    assert sum(len({superclass[name] for name in classes}) for classes in lists.values()) == 20
    for split, classes in lists.items():
        published = (real_data / "cifar100" / "fc100_splits" / f"{split}.txt").read_text().split()
        assert sorted(published) == list(classes)
        image_set = load_fc100(split, str(tiny_cifar100))
        assert image_set.class_names == classes and len(image_set) == 24 * len(classes)
        assert "training and test images" in image_set.source


def test_a_class_in_two_splits_is_found_by_whichever_is_read(class_folders):
    name = cifar_fs_classes("val")[0]
    shutil.copytree(class_folders / "val" / name, class_folders / "test" / name)
    for split in SIZES:
        with pytest.raises(ValueError, match=f"the class '{name}' is in both val and test"):
            load_cifar_fs(split, str(class_folders))
