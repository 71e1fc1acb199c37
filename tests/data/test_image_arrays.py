"""Pickles of decoded images, as learn2learn, gidariss and MetaOptNet pass them on; and what is none."""

import os
import pickle

import numpy as np
import pytest

from swbn_lightning.data.arrays import load_class_arrays, load_labelled_arrays


def pixels(count, side=6, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), np.uint8)


def written(path, content, protocol=2):
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 5])
def test_labels_and_their_names(tmp_path, protocol):
    data = pixels(5)
    content = {"data": data, "labels": [70, 64, 70, 65, 64], "catname2label": {"n3": 64, "n1": 65, "n2": 70, "n9": 1}}
    image_set = load_labelled_arrays(written(tmp_path / "x", content, protocol), "mini/val", 6)
    assert image_set.class_names == ("n1", "n2", "n3") and image_set.labels.tolist() == [1, 2, 1, 0, 2]
    assert np.array_equal(image_set.images.numpy(), data.transpose(0, 3, 1, 2))
    assert image_set.name == "mini/val" and str(tmp_path / "x") in image_set.source
    image_set.images[0] = 7  # can be written to
    del content["catname2label"]
    unnamed = load_labelled_arrays(written(tmp_path / "x", content, protocol), "mini/val", 6)
    assert [unnamed.class_names[label] for label in unnamed.labels] == [f"label {k}" for k in content["labels"]]


@pytest.mark.parametrize("as_bytes", [False, True])
def test_classes_and_their_images(tmp_path, as_bytes):
    data = pixels(5)
    content = {"image_data": data, "class_dict": {"n2": [0, 2], "n1": np.array([4, 1, 3])}}
    if as_bytes:  # a Python 2 pickle loaded with encoding="bytes" and saved again
        content = {key.encode(): value for key, value in content.items()}
        content[b"class_dict"] = {key.encode(): value for key, value in content[b"class_dict"].items()}
    image_set = load_class_arrays(written(tmp_path / "x", content), "mini/val", 6)
    assert image_set.class_names == ("n1", "n2") and image_set.labels.tolist() == [1, 0, 1, 0, 0]
    assert np.array_equal(image_set.images.numpy(), data.transpose(0, 3, 1, 2))


def test_python_2_wrote_images_as_a_string(tmp_path):
    # {'data': <uint8 [1, 1, 1, 3] of 1, 200, 3>, 'labels': [5]} as Python 2's cPickle and numpy wrote it (protocol 2).
    content = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01(K\x01K\x01K\x01K\x03tcnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff"
        b"\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x03\x01\xc8\x03tbU\x06labelsq\x08]q\tK\x05au."
    )
    (tmp_path / "x").write_bytes(content)
    image_set = load_labelled_arrays(tmp_path / "x", "mini/val", 1)
    assert image_set.images.flatten().tolist() == [1, 200, 3] and image_set.class_names == ("label 5",)


GOOD = {"data": pixels(3), "labels": [0, 1, 1]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "holds a list, not a dict of images"),
        ({"labels": [0]}, r"should hold 'data', uint8 \[N, 6, 6, 3\]"),
        ({**GOOD, "data": pixels(3).astype(np.float32)}, r"but that is float32 \[3, 6, 6, 3\]"),
        ({**GOOD, "data": pixels(3, side=8)}, "holds decoded images of 8x8; got image_size=6. Only image files"),
        ({**GOOD, "labels": [0, 1]}, r"a whole number for each of 3 images, but has int64 \[2\]"),
        ({**GOOD, "labels": [0, 1, 0.5]}, "float64"),
        ({**GOOD, "catname2label": {"cat": 0}}, r"no name for the labels \[1\] in its 'catname2label'"),
        ({**GOOD, "catname2label": {"cat": 0, "dog": 1, "hound": 1}}, "two names for one label"),
        ({**GOOD, "catname2label": ["cat", "dog"]}, "'catname2label' that is no dict"),
    ],
)
def test_other_content_with_labels(tmp_path, content, words):
    with pytest.raises(ValueError, match=f"mini/val: .*x.pickle.*{words}"):
        load_labelled_arrays(written(tmp_path / "x.pickle", content), "mini/val", 6)


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (None, "has no 'class_dict'"),
        ({"a": [0, 1]}, "lists no class for 1 of its 3 images"),
        ({"a": [0, 1], "b": [1, 2]}, "lists an image of the class b twice"),
        ({"a": [0, 1], "b": [2, 3]}, "lists images 2 to 3 of 3"),
        ({"a": [0, 1, 2], "b": []}, "lists no image numbers for the class b"),
        ({"a": [0, 1, 2], "b": ["c"]}, "lists no image numbers for the class b"),
    ],
)
def test_other_content_with_classes(tmp_path, classes, words):
    path = written(tmp_path / "x.pkl", {"image_data": pixels(3), "class_dict": classes})
    with pytest.raises(ValueError, match=f"mini/val: .*x.pkl.*{words}"):
        load_class_arrays(path, "mini/val", 6)


class Hostile:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("load", [load_labelled_arrays, load_class_arrays])
def test_downloads_gone_wrong_say_where_a_good_file_goes(tmp_path, load):
    path = tmp_path / "mini.pkl"
    whole = pickle.dumps({**GOOD, "image_data": pixels(3), "class_dict": {"a": [0, 1, 2]}})
    hint = f"Download it with a browser and place it at {path}."
    for content, words in (
        (b"<!DOCTYPE html><html>Quota exceeded</html>", "but a web page: the download was refused"),
        (b"\xef\xbb\xbf\n <HTML>", "but a web page"),
        (b"", "is not a readable pickle"),
        (whole[:-50], "is not a readable pickle"),
        (whole[:20], "is not a readable pickle"),
        (pickle.dumps({**GOOD, "extra": Hostile(tmp_path / "ran")}), "may want to run code and was not loaded"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError) as caught:
            load(path, "mini/val", 6)
        assert words in str(caught.value) and str(caught.value).endswith(hint)
    assert not (tmp_path / "ran").exists()
