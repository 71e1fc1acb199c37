"""Pickles of decoded images, as learn2learn, gidariss and MetaOptNet pass them on; and what is none."""

import pickle

import numpy as np
import pytest

from swbn_lightning.data.arrays import load_class_arrays


def pixels(count, side=6):
    return np.random.default_rng(0).integers(0, 256, (count, side, side, 3), np.uint8)


def written(path, content, protocol=2):
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 5])
def test_classes_and_their_images(tmp_path, protocol):
    data = pixels(5)
    content = {"image_data": data, "class_dict": {"n2": [0, 2], "n1": np.array([4, 1, 3], ">u8")}, 7: "passed over"}
    image_set = load_class_arrays(written(tmp_path / "x", content, protocol), "mini/val", 6)
    assert image_set.class_names == ("n1", "n2") and image_set.labels.tolist() == [1, 0, 1, 0, 0]
    assert np.array_equal(image_set.images.numpy(), data.transpose(0, 3, 1, 2))
    assert image_set.name == "mini/val" and str(tmp_path / "x") in image_set.source
    image_set.images[0] = 7  # can be written to


def test_python_2_wrote_images_as_a_string(tmp_path):
    # {'image_data': <uint8 [1, 1, 1, 3] of 1, 200, 3>, 'class_dict': {'a': [0]}} as Python 2's cPickle wrote it.
    content = (
        b"\x80\x02}q\x01(U\x0aimage_dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"U\x01b\x87Rq\x05(K\x01(K\x01K\x01K\x01K\x03tcnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ"
        b"\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x03\x01\xc8\x03tbU\x0aclass_dictq\x08}q\x09U\x01a]q\x0aK\x00asu."
    )
    (tmp_path / "x").write_bytes(content)
    image_set = load_class_arrays(tmp_path / "x", "mini/val", 1)
    assert image_set.images.flatten().tolist() == [1, 200, 3] and image_set.class_names == ("a",)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ([1, 2], "holds a list, not a dict of images"),
        ({"data": pixels(3), "labels": [1, 2]}, "should hold 'labels', a whole number for each of 3 images"),
        ({"image_data": None}, r"should hold 'image_data', uint8 \[N, 6, 6, 3\]"),
        ({"image_data": pixels(3).astype(np.float32)}, r"but that is float32 \[3, 6, 6, 3\]"),
        ({"image_data": pixels(3, side=8)}, "holds decoded images of 8x8; got image_size=6. Only image files"),
        ({"class_dict": None}, "has no 'class_dict'"),
        ({"class_dict": {"a": [0, 1]}}, "lists no class for 1 of its 3 images"),
        ({"class_dict": {"a": [0, 1], "b": [1, 2]}}, "lists an image of the class b twice"),
        ({"class_dict": {"a": [0, 1], "b": [2, 3]}}, "lists images 2 to 3 of 3"),
        ({"class_dict": {"a": [0, 1, 2], "b": ["c"]}}, "lists no image numbers for the class b"),
    ],
)
def test_other_content(tmp_path, change, words):
    good = {"image_data": pixels(3), "class_dict": {"a": [0, 1, 2]}}
    path = written(tmp_path / "x.pkl", good | change if isinstance(change, dict) else change)
    with pytest.raises(ValueError, match=f"mini/val: .*x.pkl.*{words}"):
        load_class_arrays(path, "mini/val", 6)


@pytest.mark.parametrize("content", [b"<!DOCTYPE html><html>Quota exceeded</html>", b"\xef\xbb\xbf\n <HTML>", b""])
def test_downloads_gone_wrong_say_where_a_good_file_goes(tmp_path, content):
    path = tmp_path / "mini.pkl"
    path.write_bytes(content)
    words = "but a web page: the download was refused" if content else "is not a readable pickle"
    with pytest.raises(ValueError, match=rf"{words}.*Download it with a browser and place it at {path}\."):
        load_class_arrays(path, "mini/val", 6)
