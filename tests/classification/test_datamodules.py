"""Data sets in memory: what is held out, what a batch is, and what is said of files that cannot work."""

import shutil
import types
from urllib.error import URLError

import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from classification import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
)


def batches(data, epochs=1):
    """The training batches as they reach the model."""
    loader = data.train_dataloader()
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            yield data.on_after_batch_transfer(batch, 0)


def as_process(data, world, rank, device="cpu"):
    data.trainer = types.SimpleNamespace(
        world_size=world, global_rank=rank, strategy=types.SimpleNamespace(root_device=torch.device(device))
    )
    return data


@pytest.mark.parametrize(
    ("module", "name", "channels", "counts"),
    [
        (MNISTDataModule, "mnist", 1, (180, 20, 41)),
        (FashionMNISTDataModule, "fashion-mnist", 1, (180, 20, 41)),
        (CIFAR10DataModule, "cifar10", 3, (90, 10, 30)),
        (CIFAR100DataModule, "cifar100", 3, (1800, 200, 400)),
    ],
)
def test_splits(module, name, channels, counts, tiny_mnist, tiny_cifar10, tiny_cifar100):
    root = {"cifar10": tiny_cifar10, "cifar100": tiny_cifar100}.get(name, tiny_mnist)
    data = module(root=str(root), batch_size=32)
    for stage in ("fit", "validate", "test"):
        data.prepare_data()
        data.setup(stage)
    for split, count in zip(("train", "val", "test"), counts, strict=True):
        image_set = data.image_set(split)
        assert len(image_set) == count and image_set.images.shape[1] == data.channels == channels
        assert image_set.num_classes == len(image_set.class_names) == data.num_classes
        assert image_set.name == f"{name}/{split}"
        assert image_set.images.is_contiguous(memory_format=torch.channels_last)
    # The mixture of classes is the same in training and validation.
    ratio = counts[0] // counts[1]
    per_class = [torch.bincount(data.image_set(split).labels, minlength=data.num_classes) for split in ("train", "val")]
    assert torch.equal(per_class[0], ratio * per_class[1])


def test_held_out_images_are_no_training_images_and_have_their_labels(tiny_mnist):
    data = MNISTDataModule(root=str(tiny_mnist), val_share=0.2)
    numbers = {split: data.image_set(split).images[:, 0, 0, 0].long() for split in ("val", "train", "test")}
    assert sorted(numbers["train"].tolist() + numbers["val"].tolist()) == list(range(200))
    for split, which in numbers.items():
        assert torch.equal(data.image_set(split).labels, which * 7 % 10)
    # By the split seed alone.
    for options, same in (({"seed": 5}, True), ({"split_seed": 1}, False)):
        other = MNISTDataModule(root=str(tiny_mnist), val_share=0.2, **options).image_set("val")
        assert torch.equal(other.images, data.image_set("val").images) == same


def test_share_0_trains_on_everything(tiny_mnist):
    data = MNISTDataModule(root=str(tiny_mnist), val_share=0.0)
    data.setup("fit")
    assert not data.has_validation and data.val_dataloader() == []
    assert torch.equal(data.image_set("train").images[:, 0, 0, 0], torch.arange(200, dtype=torch.uint8))
    training = data.normalize(data.image_set("train").images)
    sample = data.sample_images(50)  # whiteness is measured on training images then
    assert len(sample) == 50 and all((image == training).flatten(1).all(1).any() for image in sample)
    for call in (lambda: data.setup("validate"), lambda: data.image_set("val")):
        with pytest.raises(ValueError, match="val_share"):
            call()


def test_a_batch_is_cropped_flipped_normalised_and_erased(tiny_cifar10):
    data = CIFAR10DataModule(root=str(tiny_cifar10), val_share=0, crop_padding=4, flip=True, erasing=0.5, batch_size=32)
    raw = next(iter(data.train_dataloader()))
    assert raw.images.dtype == torch.uint8
    batch = data.on_after_batch_transfer(raw, 0)
    assert len(batch) == 2 and torch.equal(batch.labels, raw.labels)
    erased_images = 0
    for image, crop, erased, found in zip(
        raw.images, raw.crops.tolist(), raw.erased.tolist(), batch.images, strict=True
    ):
        expected = tv.crop(tv.pad(image, [4]), *crop[:2], 32, 32)
        expected = tv.horizontal_flip(expected) if crop[2] else expected
        expected = tv.normalize(tv.to_dtype(expected, torch.float32, scale=True), *map(list, (data.mean, data.std)))
        expected = tv.erase(expected, *erased, torch.zeros(3, 1, 1)) if erased[2] else expected
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        erased_images += erased[2] > 0
    assert 5 < erased_images < 27
    plain = CIFAR10DataModule(root=str(tiny_cifar10), val_share=0, batch_size=32)
    raw = next(iter(plain.train_dataloader()))
    assert raw.crops is None and raw.erased is None
    assert torch.equal(plain.on_after_batch_transfer(raw, 0).images, plain.normalize(raw.images))


def test_normalisation_is_the_formula_in_every_layout(tiny_cifar10):
    data = CIFAR10DataModule(root=str(tiny_cifar10))
    images = torch.randint(256, (2, 5, 3, 4, 6), dtype=torch.uint8)
    narrow = images[0, ..., :2].contiguous()
    for given in (images, images[0], images[0].contiguous(memory_format=torch.channels_last), images[0, 0], narrow):
        expected = torch.stack([(given.select(-3, c) / 255 - data.mean[c]) / data.std[c] for c in range(3)], dim=-3)
        torch.testing.assert_close(data.normalize(given), expected, rtol=1e-6, atol=1e-6)
        assert data.normalize(given).stride() == given.stride()


def test_evaluation_does_not_augment_and_keeps_the_order(tiny_mnist):
    data = MNISTDataModule(root=str(tiny_mnist), crop_padding=4, erasing=1.0, eval_batch_size=16)
    for split, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        found = [data.on_after_batch_transfer(batch, 0) for batch in loader]
        image_set = data.image_set(split)
        assert torch.equal(torch.cat([batch.images for batch in found]), data.normalize(image_set.images))
        assert torch.equal(torch.cat([batch.labels for batch in found]), image_set.labels)
        assert [len(batch.labels) for batch in found][:-1] == [16] * (len(found) - 1)


def test_training_batches_are_whole_and_a_function_of_seed_and_epoch(tiny_cifar10):
    def run(epochs=2, **options):
        options = {"seed": 3, "num_workers": 0, "batch_size": 24, **options}
        data = CIFAR10DataModule(root=str(tiny_cifar10), val_share=0, crop_padding=4, flip=True, erasing=0.5, **options)
        return list(batches(data, epochs))

    first = run()
    assert [tuple(batch.images.shape) for batch in first] == [(24, 3, 32, 32)] * 8
    torch.manual_seed(99)
    for other in (run(), run(num_workers=2)):  # workers outlive the epoch and see the next one's number
        assert all(torch.equal(a.images, b.images) for a, b in zip(first, other, strict=True))
    assert not any(torch.equal(a.images, b.images) for a, b in zip(first[:4], first[4:], strict=True))
    assert not torch.equal(run(epochs=1, seed=4)[0].images, first[0].images)


def test_processes_take_other_images_in_training_and_every_image_once_in_evaluation(tiny_mnist):
    def numbers(loader):
        return [batch.images[:, 0, 0, 0].tolist() for batch in loader]

    parts, tests = [], []
    for rank in range(3):
        data = MNISTDataModule(root=str(tiny_mnist), val_share=0, batch_size=20, eval_batch_size=13)
        as_process(data, 3, rank).setup("fit")
        parts.append(numbers(data.train_dataloader()))
        tests.append(numbers(data.test_dataloader()))
    assert [[len(batch) for batch in part] for part in parts] == [[20, 20, 20]] * 3
    assert len({number for part in parts for batch in part for number in batch}) == 180
    # 41 images are 14, 14 and 13: with batches of 13 the last process would have one, the others two.
    assert sorted(number for part in tests for batch in part for number in batch) == list(range(41))
    assert len({len(part) for part in tests}) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size must be"),
        ({"seed": -1}, "must not be negative"),
        ({"split_seed": -1}, "split_seed must not be negative, got split_seed=-1"),
        ({"val_share": 1.0}, r"val_share must be in \[0, 1\), got 1.0"),
    ],
)
def test_options_that_cannot_work(options, words):
    with pytest.raises(ValueError, match=words):
        CIFAR10DataModule(**options)


def test_what_is_wrong_with_files_is_said_before_training(tmp_path, tiny_mnist, tiny_cifar10):
    def error(module, root, stage="fit", **options):
        data = module(root=None if root is None else str(root), batch_size=8, **options)
        data.prepare_data()
        with pytest.raises(ValueError) as caught:
            data.setup(stage)
        return str(caught.value)

    expected = f"Expected {tmp_path}/MNIST/raw/ with train-images-idx3-ubyte, train-labels-idx1-ubyte, "
    assert "give a root, as `--data.root DIR`" in error(MNISTDataModule, None)
    message = error(MNISTDataModule, tmp_path)
    assert expected in message and "`--data.download true` fetches them" in message and "it holds nothing" in message
    shutil.copytree(tiny_mnist, tmp_path, dirs_exist_ok=True)
    raw = tmp_path / "MNIST" / "raw"
    (raw / "t10k-labels-idx1-ubyte.gz").rename(tmp_path / "away")
    assert f"mnist: {raw} lacks t10k-labels-idx1-ubyte. {expected}" in error(MNISTDataModule, tmp_path)

    shutil.copytree(tiny_cifar10, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "cifar-10-batches-py"
    (folder / "data_batch_2").unlink()
    (folder / "batches.meta").unlink()
    for stage in ("fit", "test"):
        assert f"{folder} lacks data_batch_2, batches.meta." in error(CIFAR10DataModule, tmp_path, stage)

    assert "val_share=0.001 of 200 images in 10 classes holds out none" in error(
        MNISTDataModule, tiny_mnist, val_share=0.001
    )
    data = CIFAR10DataModule(root=str(tiny_cifar10), batch_size=128)
    with pytest.raises(ValueError, match="batch_size=128 is more than the 90 training images of each process"):
        data.setup("fit")
    data = as_process(CIFAR10DataModule(root=str(tiny_cifar10), batch_size=1), 50, 0)
    with pytest.raises(ValueError, match="the val split has 10 images, too few for 50 processes"):
        data.setup("fit")


def test_download_fetches_what_is_missing_through_torchvision(tmp_path, tiny_mnist, monkeypatch):
    asked = []

    def fetch(root, download):
        asked.append((root, download))
        if len(asked) == 1:
            raise URLError("no route")
        shutil.copytree(tiny_mnist, root, dirs_exist_ok=True)

    monkeypatch.setattr(MNISTDataModule, "torchvision_class", staticmethod(fetch))
    data = MNISTDataModule(root=str(tmp_path), download=True)
    with pytest.raises(ValueError, match=rf"Expected {tmp_path}/MNIST/raw/ with train.*The download failed: .*route"):
        data.prepare_data()
    data.prepare_data(), data.prepare_data()  # the last time they are there
    data.setup("fit")
    MNISTDataModule(root=str(tmp_path / "other")).prepare_data()  # not asked to
    assert asked == [(str(tmp_path), True)] * 2
