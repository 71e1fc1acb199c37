"""Decoded images on disk: the same pixels, made anew whenever the files are others, and never code."""

import os
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from swbn_lightning.data import cache as module
from swbn_lightning.data.cache import ImageCache
from swbn_lightning.data.listing import ImageListing, load_listing


@pytest.fixture
def listing(tmp_path):
    rng = np.random.default_rng(0)
    classes = {}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        classes[name] = [tmp_path / name / f"{number}.png" for number in range(3)]
        for file in classes[name]:
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(file)
    return ImageListing(classes, tmp_path)


@pytest.fixture
def decoded(monkeypatch):
    """How many images were decoded, time after time."""
    counts = []
    read = module.read_images
    monkeypatch.setattr(module, "read_images", lambda files, *rest: counts.append(len(files)) or read(files, *rest))
    return counts


def load(listing, cache, size=8, channels=3, name="letters/train"):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_listing(listing, name, size, channels, cache).images


def test_the_second_time_nothing_is_decoded(listing, decoded, tmp_path):
    cache = ImageCache(tmp_path / "kept" / "here")
    expected = load_listing(listing, "letters/train", 8).images
    assert decoded == []
    first, second = load(listing, cache), load(listing, cache)
    assert decoded == [6]
    assert torch.equal(first, expected) and torch.equal(second, expected) and second.dtype == torch.uint8
    (file,) = cache.folder.iterdir()  # no temporary file is left
    assert file.name.startswith("letters-train-8x3-") and file.suffix == ".npy"
    second[0] = 0  # the images are the run's own
    assert torch.equal(load(listing, cache), expected)
    load(listing, cache, size=4), load(listing, cache, channels=1), load(listing, cache, name="letters/val")
    assert decoded == [6, 6, 6, 6] and len(list(cache.folder.iterdir())) == 4


def another_picture(files):
    Image.new("RGB", (8, 8)).save(files[1])


def another_time(files):
    os.utime(files[1], (1, 1))


def another_name(files):
    files[1] = files[1].rename(files[1].with_name("9.png"))


@pytest.mark.parametrize("change", [another_picture, another_time, another_name, list.pop, list.reverse])
def test_a_stale_cache_is_made_anew_and_said(listing, decoded, tmp_path, change):
    cache = ImageCache(tmp_path / "cache")
    load(listing, cache)
    (old,) = cache.folder.iterdir()
    change(listing.classes["a"])
    expected = load_listing(listing, "letters/train", 8).images
    with pytest.warns(UserWarning, match=f"letters/train: the images are not those of the cache {old} any more"):
        found = load_listing(listing, "letters/train", 8, cache=cache).images
    assert torch.equal(found, expected) and decoded == [6, len(expected)]
    assert not old.exists() and len(list(cache.folder.iterdir())) == 1
    assert torch.equal(load(listing, cache), expected) and len(decoded) == 2


def test_what_cannot_be_written_is_said_and_the_run_goes_on(listing, decoded, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    expected = load_listing(listing, "letters/train", 8).images
    with pytest.warns(UserWarning, match=r"cannot be written to .*file/cache \(.+\): .*--data.cache_dir DIR"):
        found = load_listing(listing, "letters/train", 8, cache=ImageCache(tmp_path / "file" / "cache")).images
    assert torch.equal(found, expected)

    def full(file, *args, **options):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    cache = ImageCache(tmp_path / "cache")
    monkeypatch.setattr(np, "save", full)
    with pytest.warns(UserWarning, match="cannot be written to .*No space left on device"):
        assert torch.equal(load_listing(listing, "letters/train", 8, cache=cache).images, expected)
    assert not list(cache.folder.iterdir())  # nothing that a later run would take for a cache
