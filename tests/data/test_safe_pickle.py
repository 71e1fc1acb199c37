"""Pickles of data load; pickles that would run code do not."""

import collections
import os
import pickle

import numpy as np
import pytest

from swbn_lightning.data.safe_pickle import load_pickle


@pytest.mark.parametrize("protocol", range(2, 6))
def test_data_survive(tmp_path, protocol):
    content = {
        b"bytes": [1, 2.5, None, True, "name", b"\x00\xff", b""],
        "array": np.arange(12, dtype=np.uint8).reshape(3, 4),
        "floats": (np.float64(1.5), np.arange(3.0)),
    }
    path = tmp_path / "data"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    loaded = load_pickle(path)
    assert loaded[b"bytes"] == content[b"bytes"] and loaded["floats"][0] == 1.5
    np.testing.assert_array_equal(loaded["array"], content["array"])


def test_python_2_pickles(tmp_path):
    # {'fine_label_names': ['apple', '\xff']} as Python 2 wrote it: byte strings, protocol 2.
    path = tmp_path / "meta"
    path.write_bytes(b"\x80\x02}q\x00U\x10fine_label_namesq\x01]q\x02(U\x05appleq\x03U\x01\xffq\x04es.")
    assert load_pickle(path) == {"fine_label_names": ["apple", "\xff"]}


def test_bytes_cannot_ask_for_memory(tmp_path):
    # bytes(10**12) as protocol 2 writes a call.
    (tmp_path / "data").write_bytes(b"\x80\x02c__builtin__\nbytes\n\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85R.")
    with pytest.raises(ValueError, match="not a readable pickle"):
        load_pickle(tmp_path / "data")


class Hostile:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


@pytest.mark.parametrize(
    "hostile",
    [
        lambda marker: Hostile(os.system, f"touch {marker}"),
        lambda marker: Hostile(eval, f"open({str(marker)!r}, 'w')"),
        lambda marker: Hostile(exec, f"open({str(marker)!r}, 'w')"),
        lambda marker: Hostile(getattr, "", "upper"),
        lambda marker: collections.OrderedDict(a=1),
    ],
)
def test_code_does_not_run(tmp_path, hostile):
    marker, path = tmp_path / "ran", tmp_path / "data"
    path.write_bytes(pickle.dumps([1, hostile(marker)]))
    with pytest.raises(ValueError, match="may want to run code and was not loaded"):
        load_pickle(path)
    assert not marker.exists()


def test_files_that_are_no_pickles(tmp_path):
    path = tmp_path / "page"
    path.write_text("<html>Not found</html>")
    with pytest.raises(ValueError, match="page is not a readable pickle"):
        load_pickle(path)
    with pytest.raises(ValueError, match="cannot read .*missing"):
        load_pickle(tmp_path / "missing")
    path.write_bytes(pickle.dumps(np.zeros(1000))[:500])
    with pytest.raises(ValueError, match="not a readable pickle"):
        load_pickle(path)
