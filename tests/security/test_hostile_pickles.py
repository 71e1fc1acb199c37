"""Pickles written by hand to crash, to run code or to fill the memory: each is refused, for the right reason."""

import collections
import os
import pickle
import struct

import numpy as np
import pytest

from swbn_lightning.data.arrays import MAX_NAME, load_class_arrays
from swbn_lightning.data.cifar import cifar10_class_names, read_cifar10
from swbn_lightning.data.safe_pickle import load_pickle
from tests.security.pickle_child import Child


@pytest.fixture(scope="module")
def child():
    process = Child()
    yield process
    process.close()


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def raw_bytes(value):
    return b"B" + struct.pack("<I", len(value)) + value


def name(module, attribute):
    return f"c{module}\n{attribute}\n".encode()


PLAIN_STATE = b"(K\x03" + text("|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00t"


def dtype(code="u1", state=PLAIN_STATE):
    return name("numpy", "dtype") + b"(" + text(code) + b"\x89\x88tR" + state + b"b"


NEW = name("numpy.core.multiarray", "_reconstruct") + b"(" + name("numpy", "ndarray") + b"K\x00\x85" + text("b") + b"tR"


def array(shape=b"K\x04\x85", kind=None, content=None, fortran=b"\x89"):
    content = raw_bytes(b"abcd") if content is None else content
    return NEW + b"(K\x01" + shape + (kind or dtype()) + fortran + content + b"tb"


def state(*items):
    """The state of a data type: protocol 2's pickle of a tuple without its header and end."""
    return pickle.dumps(items, 2)[2:-1]


SCALAR = name("numpy.core.multiarray", "scalar")
MARKED = dtype() + b"q\x01" + raw_bytes(bytes(1000)) + b"q\x02" + b"0" * 2  # a type and bytes, in the memo
SHARED = NEW + b"(K\x01M\xe8\x03\x85h\x01\x89h\x02tb"  # an array of those bytes
ENCODED = name("_codecs", "encode") + b"(h\x01" + text("latin1") + b"tR"
HUGE = b"I0x" + b"f" * 1_000_000 + b"\nq\x01"  # in the memo, too

OTHER = "holds an array of another kind than plain numbers|makes an array of another kind than plain numbers"
HOSTILE = {
    "a plain type with fields": (
        array(kind=dtype("u1", state(3, "|", None, ("a",), {"a": ("u1", 2**40)}, 1, 1, 0))),
        OTHER,
    ),
    "a plain type with flags of objects": (array(kind=dtype("u1", state(3, "|", None, None, None, -1, -1, 63))), OTHER),
    "a plain type with a subarray": (
        array(kind=dtype("u1", state(3, "|", ("u1", (2**40,)), None, None, -1, -1, 0))),
        OTHER,
    ),
    "an absurd byte order": (array(kind=dtype("u1", state(3, "x", None, None, None, -1, -1, 0))), OTHER),
    "a type of objects": (array(kind=dtype("O8"), content=raw_bytes(b"A" * 32)), OTHER),
    "truth values of 0x61": (array(kind=dtype("b1")), "truth values that are neither"),
    "ndarray called": (
        name("numpy", "ndarray") + b"(K\x08\x85" + dtype() + raw_bytes(b"ab") + b"K\x00M\xff\xff\x85tR",
        OTHER,
    ),
    "scalar with few bytes": (
        SCALAR + b"(" + dtype("f8", PLAIN_STATE.replace(b"|", b"<")) + raw_bytes(b"a") + b"tR",
        "not as many",
    ),
    "scalar of objects": (SCALAR + b"(" + dtype("O8") + raw_bytes(b"a" * 8) + b"tR", OTHER),
    "too few bytes": (array(shape=b"K\x05\x85"), "not as many as its shape"),
    "a negative shape": (array(shape=b"J\xff\xff\xff\xffJ\xfc\xff\xff\xff\x86"), "no tuple of a few whole numbers"),
    "a shape that overflows": (array(shape=b"K\x04" + b"\x8a\x08" + bytes(7) + b"\x40" + b"K\x04\x87"), "not as many"),
    "a list of objects for bytes": (array(content=b"](K\x01K\x02K\x03K\x04e"), "not as many as its shape"),
    "an array that is never built": (b"]" + NEW + b"a", "finished array"),
    "an array that is used before it is built": (NEW + b"q\x01h\x01", "an array that is not finished"),
    "a name that is data": (b"]" + name("numpy", "dtype") + b"a", "finished array"),
    "a data type that is data": (b"]" + dtype() + b"a", "finished array"),
    "state for a list": (b"]N" + b"b", "something that is no array"),
    "a memo of four thousand million": (
        b"Nr\xff\xff\xff\xff" + b"Np" + b"9" * 30 + b"\n0",
        "a number of more than 32 bits",
    ),
    "deep tuples": (b"N" + b"\x85" * 200_000, "nests tuples more than 10 deep"),
    "deep tuples as a key": (b"}N" + b"\x85" * 200_000 + b"Ns", "nests tuples more than 10 deep"),
    "a tuple as a key": (b"}N\x85Ns", "a tuple is the key of a dict"),
    "an array as a key": (b"}" + array() + b"Ns", "a ndarray is the key of a dict"),
    "a key without a value": (b"}(Nu", "a key without a value"),
    "many arrays of the same bytes": (
        MARKED + b"](" + SHARED * 1000 + b"e",
        "its arrays would take more bytes than the file",
    ),
    "many bytes of the same text": (
        text("a" * 5000) + b"q\x010](" + ENCODED * 500 + b"e",
        "its encoded text would take more",
    ),
    "bytes of an absurd length": (b"\x8e" + struct.pack("<Q", 2**62), "says that 4611686018427387904 bytes follow"),
    "a bytearray of an absurd length": (b"\x96" + struct.pack("<Q", 2**40), "says that 1099511627776 bytes follow"),
    "text of an absurd length": (b"\x8d" + struct.pack("<Q", 2**40), "says that 1099511627776 bytes follow"),
    "a negative string": (b"T" + b"\xff" * 4, "negative byte count"),
    "a huge whole number": (b"\x8a\xff" + b"\xff" * 254 + b"\x7f", "more than 64 bits"),
    "a huge number of hexadecimal digits": (b"I0x" + b"f" * 100_000 + b"\n", "more than 64 bits"),
    "a huge LONG": (b"L0x" + b"f" * 100_000 + b"L\n", "more than 64 bits"),
    # Their product would take hours, and so would hashing a key again and again.
    "huge lengths of an array": (array(shape=b"(" + HUGE + b"h\x01" * 31 + b"t"), "more than 64 bits"),
    "a huge number as a key": (b"}" + HUGE + b"N" + b"sh\x01N" * 9000 + b"s", "more than 64 bits"),
    "an append to a number": (b"K\x01Na", "has no attribute 'append'"),
    "appends to a tuple": (b")(NNe", "has no attribute 'append'"),
    "appends to an array": (array() + b"(NNe", "has no attribute 'append'"),
    "appends to a name": (name("numpy", "dtype") + b"(NNe", "has no attribute 'append'"),
    "a number that nothing is stored under": (b"h\x07", "not found at index 7"),
    "the opcode LONG4": (b"\x8b\x00\x00\x00\x01", "opcode LONG4"),
    "another codec": (name("_codecs", "encode") + b"(" + text("a") + text("zlib_codec") + b"tR", "calls something"),
    "NEWOBJ": (name("numpy", "ndarray") + b"K\x04\x85\x85\x81", "opcode NEWOBJ"),
    "OBJ": (b"(" + name("numpy", "dtype") + text("O") + b"o", "opcode OBJ"),
    "PERSID": (b"Pname\n", "opcode PERSID"),
    "NEXT_BUFFER": (b"\x97", "opcode NEXT_BUFFER"),
    "no opcode": (b"\xff", "opcode b'.xff'"),
    "numpy.load": (name("numpy", "load") + b"(" + text("x") + b"tR", "names numpy.load, which is neither an array"),
    "a name that steers the terminal": (name("\x1b[2Jos", "system"), r"names \\x1b\[2Jos.system"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_refused(child, tmp_path, what):
    content, words = HOSTILE[what]
    path = tmp_path / "x.pkl"
    path.write_bytes(b"\x80\x04" + content + b".")
    found = child.load("pickle", path)
    assert found["error"] == "InputError" and found["message"].startswith(str(path)), found
    with pytest.raises(ValueError, match=f"(?s)x.pkl .*({words})"):
        raise ValueError(found["message"])


class Hostile:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def test_code_does_not_run(tmp_path):
    marker, path = tmp_path / "ran", tmp_path / "test_batch"
    for hostile in (
        Hostile(os.system, f"touch {marker}"),
        Hostile(eval, f"open({str(marker)!r}, 'w')"),
        Hostile(getattr, "", "upper"),
        collections.OrderedDict(a=1),
    ):
        path.write_bytes(pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [1], "more": [hostile]}))
        for load in (lambda: read_cifar10(tmp_path, "test"), lambda: load_class_arrays(path, "mini/val", 2)):
            with pytest.raises(ValueError, match="may want to run code and was not loaded"):
                load()
    assert not marker.exists()


def test_python_2_pickles(tmp_path):
    # {'fine_label_names': ['apple', '\xff']} as Python 2 wrote it: byte strings, protocol 2.
    path = tmp_path / "meta"
    path.write_bytes(b"\x80\x02}q\x00U\x10fine_label_namesq\x01]q\x02(U\x05appleq\x03U\x01\xffq\x04es.")
    assert load_pickle(path) == {"fine_label_names": ["apple", "\xff"]}
    with pytest.raises(ValueError, match="cannot read .*missing"):
        load_pickle(tmp_path / "missing")


@pytest.mark.parametrize("protocol", range(6))
def test_data_of_every_kind_survive(tmp_path, protocol):
    rng = np.random.default_rng(0)
    kinds = [np.dtype(order + code) for code in ("i2", "i8", "u4", "f2", "f4", "f8") for order in "<>"]
    arrays = [rng.integers(0, 100, (2, 3, 4)).astype(kind) for kind in [*kinds, np.dtype("u1"), np.dtype("?")]]
    arrays += [np.asfortranarray(arrays[0]), np.array(3), np.zeros((0, 5)), arrays[2][::2]]
    large = rng.integers(0, 256, 3_000_000, np.uint8)
    content = {
        "arrays": arrays, "again": [arrays[0], arrays[0]], "large": large, "numbers": (np.float32(1.5), np.bool_(True)),
        "plain": [1, -1, 2**40, -(2**63), 2**64 - 1, 1.5, float("inf"), True, None, "ä\n'", b"\x00\xff'\n", b"", ((),)],
        3: {b"key": {1.5: "value"}},
    }  # fmt: skip
    path = tmp_path / "data"
    path.write_bytes(pickle.dumps(content, protocol))
    loaded = load_pickle(path)
    for one, other in zip(loaded["arrays"], arrays, strict=True):
        assert one.dtype == other.dtype.newbyteorder("=") and one.flags.f_contiguous == other.flags.f_contiguous
        assert one.shape == other.shape and np.array_equal(one, other)
    assert loaded["again"][0] is loaded["again"][1] is loaded["arrays"][0]  # stored, then built
    assert np.array_equal(loaded["large"], large)
    assert loaded["plain"] == content["plain"] and loaded[3] == content[3]
    assert [type(number) for number in loaded["numbers"]] == [np.float32, np.bool_]


def bomb():
    nested = [1]
    for _ in range(12):
        nested = [nested] * 10
    return nested


def endless():
    loop = []
    loop.append(loop)
    return loop


PIXELS = np.zeros((3, 2, 2, 3), np.uint8)
ODD_LISTS = {
    "an alias bomb": bomb(), "a list in itself": endless(), "text": ["a"], "nothing": [], "arrays": [PIXELS[0]],
    "truth": [True, False], "None": None, "a dict": {1: 2},
}  # fmt: skip


@pytest.mark.parametrize("what", ODD_LISTS)
def test_lists_do_not_expand(tmp_path, what):
    (tmp_path / "test_batch").write_bytes(pickle.dumps({"data": ODD_LISTS[what], "labels": ODD_LISTS[what]}))
    with pytest.raises(ValueError, match="test_batch is not a CIFAR-10 file: .* with object labels"):
        read_cifar10(tmp_path, "test")


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ({"a": [0, 1], 7: [2]}, "holds a int where a name should be"),
        ({"a": [0, 1], "\ud800": [2]}, "no valid text"),
        ({"a": np.array([2**63, 0], np.uint64), "b": [1]}, "lists images 0 to 9223372036854775808 of 3"),
        ({"a": np.array([[0, 1, 2]])}, "lists no image numbers"),
        ({"a": endless()}, "lists no image numbers"),
        (
            dict(zip(map(str, range(10**5)), [list(range(3))] * 10**5, strict=True)),
            "lists an image of the class .* twice",
        ),
    ],
)
def test_odd_classes(tmp_path, classes, words):
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps({"image_data": PIXELS, "class_dict": classes}))
    with pytest.raises(ValueError, match=rf"x.pkl .*{words}"):
        load_class_arrays(path, "mini/val", 2)


@pytest.mark.parametrize("odd", [7, None, ["a"], PIXELS, b"bytes", "\udcff", "x" * (MAX_NAME + 1)])
def test_odd_class_names_of_cifar(tmp_path, odd):
    names = [f"class {number}" for number in range(9)]
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": [*names, odd]}))
    with pytest.raises(ValueError, match="batches.meta holds (a|the) .*name"):
        cifar10_class_names(tmp_path)
