"""Files of other kinds that claim or unpack to absurd sizes, or hold names that are no text."""

import csv
import gzip
import os
import tracemalloc
import warnings

import numpy as np
import pytest
from PIL import Image

from swbn_lightning.data import idx, lists
from swbn_lightning.data.cache import ImageCache
from swbn_lightning.data.idx import read_idx
from swbn_lightning.data.listing import ImageListing, load_listing
from swbn_lightning.data.lists import Contained, list_images, read_class_list, read_image_list
from swbn_lightning.data.safe_pickle import load_pickle


def error(read, *arguments, most=20e6):
    """The message of the ValueError that ``read`` raises, having allocated no more than ``most`` bytes."""
    tracemalloc.start()
    with pytest.raises(ValueError) as caught:
        read(*arguments)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < most
    return str(caught.value)


def header(*shape):
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()


def test_idx_files_that_unpack_to_much_more_than_they_say(tmp_path):
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(header(10) + bytes(300_000_000), 1))
    assert "labels.gz is not whole: it should hold 10 values, but holds more" in error(read_idx, path)
    path.write_bytes(gzip.compress(header(10) + bytes(9)))
    assert "but holds 9" in error(read_idx, path)


def test_idx_headers_are_not_believed(tmp_path, monkeypatch):
    plain, packed = tmp_path / "images", tmp_path / "images.gz"
    for shape in ((2**32 - 1,) * 4, (60_000, 28, 28), (2**31,)):
        plain.write_bytes(header(*shape) + bytes(100))
        packed.write_bytes(gzip.compress(header(*shape) + bytes(100)))
        assert "cannot hold more than" in error(read_idx, plain) and "cannot hold more than" in error(read_idx, packed)
    plain.write_bytes(bytes([0, 0, 8, 255]) + bytes(2000))
    assert "is not an IDX file" in error(read_idx, plain)
    monkeypatch.setattr(idx, "MAX_VALUES", 99)
    plain.write_bytes(header(100) + bytes(100))
    assert "images is not whole: it should hold 100 values, but cannot hold more than 99" in error(read_idx, plain)


@pytest.mark.parametrize("read", [read_idx, read_image_list, read_class_list, load_pickle])
def test_pipes_are_not_waited_for(tmp_path, read):
    for name in ("pipe", "pipe.gz"):
        os.mkfifo(tmp_path / name)
        assert f"{name} cannot be read: it is a named pipe; give a regular file" in error(read, tmp_path / name)


def npy(shape, kind="|u1", padding=0):
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117 + padding) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def test_cache_headers_are_not_believed(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a" / "1.png")
    listing, cache = ImageListing({"a": [tmp_path / "a" / "1.png"]}, tmp_path), ImageCache(tmp_path / "cache")
    expected = load_listing(listing, "x", 8, cache=cache).images
    (file,) = cache.folder.iterdir()
    for content in (
        b"text",
        npy((10**6, 10**6)),
        npy((1, 3, 8, 8)) + bytes(191),
        npy((1, 3, 8, 8), "|O") + bytes(192 * 8),
        npy("(" * 4000, padding=8000),
        npy("-" * 8000 + "1", padding=8000),
        file.read_bytes() + bytes(10_000_000),
    ):
        file.write_bytes(content)
        tracemalloc.start()
        with pytest.warns(UserWarning, match="cache .* is broken .* and is made anew"):
            found = load_listing(listing, "x", 8, cache=cache).images
        assert tracemalloc.get_traced_memory()[1] < 20e6
        tracemalloc.stop()
        assert (found == expected).all()


def test_names_that_are_not_utf8_in_a_cache(tmp_path):
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / os.fsdecode(b"caf\xe9.png")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "plain.png")
    os.rename(tmp_path / "plain.png", file)  # noqa: PTH104
    cache = ImageCache(tmp_path / "cache")
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(load_listing(ImageListing({"a": [file]}, tmp_path), "x", 8, cache=cache).images) == 1


@pytest.mark.parametrize(("read", "first"), [(read_image_list, "filename,label\n"), (read_class_list, "")])
def test_lists_of_absurd_length(tmp_path, monkeypatch, read, first):
    path = tmp_path / "list"
    with path.open("w") as file:
        file.write(first + "a" * 50_000_000)
    number = 2 if first else 1
    assert f"list is no list: line {number} has more than 20000 characters" in error(read, path)
    path.write_text(first + "".join(f"a{number}.png,{number}\n" for number in range(2000)))
    assert len(read(path)) == 2000
    for limit, value in (("MAX_LINES", 1000), ("MAX_CHARACTERS", 1000)):
        with monkeypatch.context() as patch:
            patch.setattr(lists, limit, value)
            assert "list is too long for a list" in error(read, path)


@pytest.mark.parametrize("name", ["a\0b.png", "\x1b[2Ja.png", "a" * 300 + ".png", "a/" * 3000 + "b.png"])
def test_names_that_no_file_can_have(tmp_path, name):
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("filename", "label"), (name, "cat")])
    message = error(list_images, "mine", tmp_path, tmp_path / "train.csv", ["{filename}", "{label}/{filename}"])
    assert "train.csv names" in message and ("which cannot be a file" in message or "control characters" in message)
    assert message.isprintable() and error(Contained(tmp_path), name, tmp_path / "train.csv") == message


@pytest.mark.parametrize("read", [read_image_list, read_class_list])
def test_lists_that_are_not_utf8(tmp_path, read):
    for content in (
        b"filename,label\ncaf\xe9.png,a\n",
        "filename,label\n\ud800.png,a\n".encode("utf-8", "surrogatepass"),
    ):
        (tmp_path / "list").write_bytes(content)
        assert "list cannot be read as a list of" in error(read, tmp_path / "list")
