"""Any class folders, in memory and read one by one."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from classification import ImageFolderDataModule, ImageNetDataModule
from classification.datamodules.folders import IMAGENET_MEAN, IMAGENET_STD


def write_images(folder, classes, count, size=(40, 30), suffix=".png", seed=0):
    rng = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = rng.integers(0, 256, (size[1], size[0], 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}{suffix}")


@pytest.fixture
def whole(tmp_path):
    write_images(tmp_path / "whole", "abc", 20)
    return tmp_path / "whole"


@pytest.fixture
def divided(tmp_path):
    for seed, (split, count) in enumerate((("train", 20), ("val", 6), ("test", 4))):
        write_images(tmp_path / "divided" / split, "abc", count, seed=seed)
    return tmp_path / "divided"


def sizes(data):
    return {split: torch.bincount(data.image_set(split).labels).tolist() for split in ("train", "val", "test")}


def test_one_folder_is_divided_class_by_class(whole):
    data = ImageFolderDataModule(root=str(whole), image_size=8)
    assert data.num_classes == 3 and data.channels == 3 and data.has_validation
    gray = ImageFolderDataModule(root=str(whole), image_size=8, mean=(0.5,), std=(0.25,))
    assert gray.channels == 1 and gray.image_set("train").images.shape[1:] == (1, 8, 8)
    assert sizes(data) == {"train": [14] * 3, "val": [2] * 3, "test": [4] * 3}
    images = torch.cat([data.image_set(split).images for split in ("train", "val", "test")]).flatten(1)
    assert len(images.unique(dim=0)) == 60  # none is in two parts
    again = ImageFolderDataModule(root=str(whole), image_size=8)
    assert torch.equal(again.image_set("test").images, data.image_set("test").images)  # whichever is asked for first
    other = ImageFolderDataModule(root=str(whole), image_size=8, split_seed=1)
    assert not torch.equal(other.image_set("test").images, data.image_set("test").images)
    given = ImageFolderDataModule(root=str(whole), image_size=8, val_share=0, test_share=0.5, batch_size=4)
    given.setup("fit")
    assert not given.has_validation and sizes_of(given, "train", "test") == [30, 30]
    with pytest.raises(ValueError, match="has no val/ folder, and no image is held out for val"):
        given.image_set("val")


def sizes_of(data, *splits):
    return [len(data.image_set(split)) for split in splits]


def test_folders_of_splits_are_taken_as_they_are(divided):
    data = ImageFolderDataModule(root=str(divided), image_size=8)
    for stage in ("fit", "validate", "test"):
        data.batch_size = 8
        data.setup(stage)
    assert sizes(data) == {"train": [20] * 3, "val": [6] * 3, "test": [4] * 3}
    assert data.image_set("val").class_names == ("a", "b", "c")
    pixels = Image.open(divided / "val" / "b" / "3.png").resize((8, 8), Image.Resampling.BILINEAR)
    expected = torch.from_numpy(np.asarray(pixels).transpose(2, 0, 1).copy())
    assert torch.equal(data.image_set("val").images[6 + 3], expected)

    for split in ("val", "test"):
        (divided / split).rename(divided.parent / split)
    data = ImageFolderDataModule(root=str(divided), image_size=8)
    assert sizes_of(data, "train", "val") == [54, 6]  # a tenth of each class
    with pytest.raises(ValueError, match="has no test/ folder, and no image is held out for test"):
        data.setup("test")


def test_roots_and_options_that_cannot_work(tmp_path, whole, divided):
    def error(**options):
        with pytest.raises(ValueError) as caught:
            ImageFolderDataModule(**options, image_size=8, batch_size=4).setup("fit")
        return str(caught.value)

    assert "give a root" in error() and "Expected DIR/<class>/<image>, or DIR/train/" in error()
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty holds no folders. Expected" in error(root=str(tmp_path / "empty"))
    assert "val_share=0.2 does not apply" in error(root=str(divided), val_share=0.2)
    assert "has folders of its own for train and test" in error(root=str(divided), test_share=0.2)
    (divided / "test").rename(tmp_path / "test")
    assert "has a train/ folder, of which no test images are taken" in error(root=str(divided), test_share=0.2)
    (divided / "val" / "b").rename(divided / "val" / "x")
    message = error(root=str(divided))
    assert f"{divided}/val does not hold the 3 classes of {divided}/train: missing b (1), foreign x (1)" in message
    (divided / "train").rename(tmp_path / "train")
    assert f"{divided} holds val, but no train" in error(root=str(divided))
    (whole / "b" / "4.png").write_bytes((whole / "b" / "4.png").read_bytes()[:100])
    assert "b/4.png cannot be read as an image" in error(root=str(whole))
    for options, words in (
        ({"mean": (0.5, 0.5)}, "one value or three"),
        ({"std": (0.2, 0.0, 0.2)}, "std above 0"),
        ({"image_size": 0}, "image_size must be"),
        ({"test_share": -0.1}, "test_share must be"),
    ):
        with pytest.raises(ValueError, match=words):
            ImageFolderDataModule(root=str(whole), **options)


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    root = tmp_path_factory.mktemp("imagenet")
    write_images(root / "train", ("n01", "n02"), 10, size=(50, 40), suffix=".JPEG")
    write_images(root / "val", ("n01", "n02"), 3, size=(90, 60), suffix=".JPEG", seed=1)
    return root


def small(root, **options):
    options = {"num_workers": 0, "val_share": 0.2, "batch_size": 4, "eval_batch_size": 4, **options}
    return ImageNetDataModule(root=str(root), image_size=16, eval_resize=20, **options)


def test_imagenet_evaluates_the_centre_of_its_val_folder(imagenet):
    data = small(imagenet)
    for stage in ("fit", "validate", "test"):
        data.setup(stage)
    assert data.num_classes == 2
    batches = [data.on_after_batch_transfer(batch, 0) for batch in data.test_dataloader()]
    assert torch.cat([batch.labels for batch in batches]).tolist() == [0, 0, 0, 1, 1, 1]
    image = Image.open(imagenet / "val" / "n02" / "0.JPEG")  # 90x60: the shorter side becomes 20
    pixels = np.asarray(image.resize((30, 20), Image.Resampling.BILINEAR), np.float64)[2:18, 7:23] / 255
    expected = torch.from_numpy(((pixels - IMAGENET_MEAN) / IMAGENET_STD).transpose(2, 0, 1)).float()
    torch.testing.assert_close(torch.cat([batch.images for batch in batches])[3], expected, rtol=1e-5, atol=1e-5)


def test_imagenet_validates_on_images_held_out_of_train(imagenet):
    data = small(imagenet)
    train, val = data.training_dataset(), data.evaluation_dataset("val")
    assert sorted(train.numbers.tolist() + val.numbers.tolist()) == list(range(20))
    assert train.files.root == val.files.root == imagenet / "train"
    assert val.files.labels[val.numbers].bincount().tolist() == [2, 2]
    held_out = data.normalize(val.__getitems__([0, 1, 2, 3]).images)
    assert all((image == held_out).flatten(1).all(1).any() for image in data.sample_images(3))
    everything = small(imagenet, val_share=0.0)
    everything.setup("fit")
    assert len(everything.training_dataset()) == 20 and everything.val_dataloader() == []
    assert len(everything.sample_images(50)) == 20
    with pytest.raises(ValueError, match="val_share is 0"):
        everything.evaluation_dataset("val")


def test_imagenet_training_images_are_a_function_of_seed_epoch_and_image(imagenet):
    def run(epochs=2, **options):
        data = small(imagenet, **{"seed": 1, **options})
        loader = data.train_dataloader()
        found = []
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            found += [batch.images for batch in loader]
        return found

    first = run()
    assert [tuple(images.shape) for images in first] == [(4, 3, 16, 16)] * 8 and first[0].dtype == torch.uint8
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    for other in (run(), run(num_workers=2)):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(run(epochs=1, seed=2)[0], first[0])
    data = small(imagenet).training_dataset()
    state = torch.get_rng_state()
    looks = []
    for epoch in range(30):
        data.set_epoch(epoch)
        looks.append(data.__getitems__([0]).images)
    assert len(torch.cat(looks).unique(dim=0)) == 30
    assert torch.equal(torch.get_rng_state(), state)  # the process's own stream goes on undisturbed


def test_imagenet_roots_and_options_that_cannot_work(imagenet, tmp_path):
    def error(root, **options):
        with pytest.raises(ValueError) as caught:
            small(root, **options).setup(options.get("stage", "fit"))
        return str(caught.value)

    assert "does not exist. Expected" in error(tmp_path / "nowhere") and "image-net.org" in error(tmp_path / "nowhere")
    (tmp_path / "ILSVRC").mkdir()
    assert f"{tmp_path} has no train/ (it holds ILSVRC)" in error(tmp_path)
    write_images(tmp_path / "train", ("n01", "n02"), 3)
    data = small(tmp_path, val_share=0)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"has no val/ \(it holds ILSVRC, train\)"):
        data.setup("test")
    write_images(tmp_path / "val", ("n01", "n04"), 1)
    assert "missing n02 (1), foreign n04 (1)" in error(tmp_path)
    (tmp_path / "train" / "n01" / "0.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"n01/0.png cannot be read as an image"):
        data.training_dataset().__getitems__(list(range(6)))
    assert "batch_size=50 is more than the 16" in error(imagenet, batch_size=50)
    with pytest.raises(ValueError, match="eval_resize=200 is less than image_size=224"):
        ImageNetDataModule(eval_resize=200)
    with pytest.raises(TypeError, match="crop_padding"):  # no option that would do nothing
        ImageNetDataModule(crop_padding=4)


def test_usual_other_names_of_splits_are_read(tmp_path):
    for folder, count in (("training", 20), ("Validation", 6), ("testing", 4)):
        write_images(tmp_path / folder, "abc", count)
    data = ImageFolderDataModule(root=str(tmp_path), image_size=8, batch_size=8)
    for stage in ("fit", "test"):
        data.setup(stage)
    assert data.has_validation and sizes(data) == {"train": [20] * 3, "val": [6] * 3, "test": [4] * 3}
    large = small(tmp_path, val_share=0, batch_size=8)
    for stage in ("fit", "test"):
        large.setup(stage)
    assert len(large.training_dataset()) == 60 and len(large.evaluation_dataset("test")) == 18


def test_a_folder_beside_the_splits_is_never_dropped_in_silence(divided):
    def error():
        with pytest.raises(ValueError) as caught:
            ImageFolderDataModule(root=str(divided), image_size=8, batch_size=4).setup("fit")
        return str(caught.value)

    (divided / "val").rename(divided / "holdout")
    message = error()
    assert f"{divided} holds test/, train/, which are names of splits, and beside them holdout, which" in message
    assert "val or valid or validation or dev" in message and f"into {divided}/train/, or give it another" in message
    (divided / "holdout").rename(divided / "val")
    write_images(divided / "valid", "abc", 1)
    assert f"{divided} holds val/ and valid/, both of val; keep one" in error()
    (divided / "valid").rename(divided / ".valid")  # hidden: not meant
    ImageFolderDataModule(root=str(divided), image_size=8, batch_size=4).setup("fit")
