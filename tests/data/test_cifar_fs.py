"""CIFAR-FS and FC100 from CIFAR-100's files, from pickles and from folders; roots that are something else."""

import csv
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from fewshot.datasets.cifar_fs import CIFAR_FS_CLASSES, FC100_CLASSES, load_cifar_fs, load_fc100
from fewshot.datasets.forms import classes_of
from swbn_lightning.data.cifar import cifar100_class_names, read_cifar100

SPLITS = ("train", "val", "test")
FORMS = [
    (load_cifar_fs, CIFAR_FS_CLASSES, "cifar_fs", (64, 16, 20)),
    (load_fc100, FC100_CLASSES, "fc100", (60, 20, 20)),
]


@pytest.mark.parametrize(("load", "file", "published", "sizes"), FORMS)
def test_class_lists_are_the_published_ones(real_data, load, file, published, sizes):
    lists = [classes_of(file, split) for split in SPLITS]
    assert tuple(map(len, lists)) == sizes and len(set().union(*lists)) == 100
    for split, names in zip(SPLITS, lists, strict=True):
        text = (real_data / "cifar100" / f"{published}_splits" / f"{split}.txt").read_text()
        assert sorted(text.split()) == list(names)
    rows = csv.DictReader((real_data / "cifar100" / "classes.csv").open())
    superclass = {row["fine_name"]: row["coarse_name"] for row in rows}
    if file == FC100_CLASSES:  # no superclass is in two splits
        assert sum(len({superclass[name] for name in names}) for names in lists) == 20


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("load", "sizes"), [(load, sizes) for load, *_, sizes in FORMS])
def test_from_cifar100_files(tiny_cifar100, nested, load, sizes):
    folder = tiny_cifar100 / "cifar-100-python"
    names = cifar100_class_names(folder)
    images, fine = zip(*(read_cifar100(folder, part) for part in ("train", "test")), strict=True)
    for split, classes in zip(SPLITS, sizes, strict=True):
        image_set = load(split, str(tiny_cifar100 if nested else folder))
        assert image_set.num_classes == classes and len(image_set) == classes * 24
        # Every image of a class, from both files, and under its own name.
        for label, name in list(enumerate(image_set.class_names))[:3]:
            expected = torch.cat(images)[torch.cat(fine) == names.index(name)]
            assert torch.equal(image_set.images[image_set.labels == label], expected)
    with pytest.raises(ValueError, match="32x32; got image_size=64"):
        load("train", str(folder), image_size=64)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(("load", "prefix", "sizes"), [(load, name.upper(), sizes) for load, _, name, sizes in FORMS])
def test_from_metaoptnets_pickles(tmp_path, load, prefix, sizes, protocol):
    rng = np.random.default_rng(0)
    for split, classes in zip(SPLITS, sizes, strict=True):
        labels = np.repeat(rng.permutation(100)[:classes], 2)
        content = {"data": rng.integers(0, 256, (2 * classes, 32, 32, 3), np.uint8), "labels": labels.tolist()}
        path = tmp_path / f"{prefix}_{split}.pickle"
        path.write_bytes(pickle.dumps(content, protocol=protocol))
        image_set = load(split, str(tmp_path))
        assert image_set.num_classes == classes
        assert np.array_equal(image_set.images.numpy(), content["data"].transpose(0, 3, 1, 2))
        assert [image_set.class_names[label] for label in image_set.labels] == [f"label {value}" for value in labels]
    path.rename(tmp_path / f"{prefix}_train.pickle")
    with pytest.raises(ValueError, match=f"holds 20 classes, but the train split of .* has {sizes[0]}"):
        load("train", str(tmp_path))
    with pytest.raises(ValueError, match=f"nothing usable .*Looked for .*{prefix}_{{train,val,test}}.pickle"):
        load("test", str(tmp_path))


def test_from_class_folders(tmp_path):
    rng = np.random.default_rng(0)
    names = classes_of(CIFAR_FS_CLASSES, "val")
    for name in names:
        (tmp_path / "val" / name).mkdir(parents=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(tmp_path / "val" / name / "1.png")
    image_set = load_cifar_fs("val", str(tmp_path))
    pixels = np.asarray(Image.open(tmp_path / "val" / names[3] / "1.png")).transpose(2, 0, 1)
    assert image_set.class_names == names and np.array_equal(image_set.images[3].numpy(), pixels)
    (tmp_path / "val" / names[2]).rename(tmp_path / "val" / "dragon")
    with pytest.raises(ValueError, match=rf"missing {names[2]} \(1\), foreign dragon \(1\)"):
        load_cifar_fs("val", str(tmp_path))


def test_roots_of_another_kind(tmp_path):
    (tmp_path / "data_batch_1").write_text("")
    with pytest.raises(ValueError, match="it holds data_batch_1.*Looked for .*cifar-100-python"):
        load_cifar_fs("train", str(tmp_path))
    with pytest.raises(ValueError, match="data_batch_1 is a file, not a folder"):
        load_cifar_fs("train", str(tmp_path / "data_batch_1"))
    with pytest.raises(ValueError, match="no split 'validation'; there are train, val, test"):
        load_cifar_fs("validation", str(tmp_path))
