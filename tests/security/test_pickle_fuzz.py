"""Pickles of data that were spoilt in every way give data or an InputError, and never a crash."""

import functools
import io
import pickle
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.security.pickle_child import Child

OPCODES = [getattr(pickle, name) for name in pickle.__all__ if name.isupper() and name not in ("TRUE", "FALSE")]
OPCODES = sorted({opcode for opcode in OPCODES if isinstance(opcode, bytes) and len(opcode) == 1})
NUMBERS = [
    struct.pack(form, number)
    for form, numbers in (("<I", (0, 2**31 - 1, 2**31, 2**32 - 1)), ("<Q", (2**31, 2**40, 2**63 - 1, 2**64 - 1)))
    for number in numbers
] + [b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"I" + b"9" * 30 + b"\n", b"N", b"G" + struct.pack(">d", float("nan"))]


class Python2(pickle._Pickler):
    """Writes text and bytes as Python 2 wrote its only strings."""

    dispatch = pickle._Pickler.dispatch.copy()

    def save_string(self, value):
        raw = value.encode("latin1") if isinstance(value, str) else value
        short = len(raw) < 256
        self.write(b"U" + bytes([len(raw)]) + raw if short else b"T" + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def python_2(content):
    file = io.BytesIO()
    Python2(file, 2).dump(content)
    return file.getvalue().replace(b"numpy._core", b"numpy.core")


WRITERS = {str(protocol): functools.partial(pickle.dumps, protocol=protocol) for protocol in (0, 2, 4, 5)}
WRITERS["python 2"] = python_2


def contents():
    """Of each form: the loader, the file's name, the content and its pixels (of 7 bits, the same in all protocols)."""
    rng = np.random.default_rng(0)
    rows, pixels = rng.integers(32, 127, (2, 3072), np.uint8), rng.integers(32, 127, (4, 2, 2, 3), np.uint8)
    png = rng.integers(32, 127, 70, np.uint8)
    names = [f"class {number}" for number in range(10)]
    return [
        ("cifar10", "test_batch", {"data": rows, "labels": [3, 9], "filenames": ["a.png", "b.png"]}, rows),
        ("cifar100", "test", {"data": rows, "fine_labels": [3, 99], "coarse_labels": [1, 2]}, rows),
        ("names", "batches.meta", {"label_names": names, "num_vis": 3072}, None),
        ("class_arrays", "l2l.pkl", {"image_data": pixels, "class_dict": {"n2": [0, 2], "n1": [1, 3]}}, pixels),
        ("class_arrays", "ren.pkl", {"image_data": pixels, "class_dict": {"n1": np.arange(4)}}, pixels),
        ("pickle", "tiered.pkl", {"images": [png, png[:50].copy()], "labels": [np.int64(2), "a"]}, png),
    ]


CASES = [(*case, protocol, WRITERS[protocol](case[2])) for case in contents() for protocol in WRITERS]


def places(content, whole):
    """Where in the pickle ``whole`` the pixels are, as a pair, (0, 0) if they are not there as they are."""
    raw = b"" if content is None else content.tobytes()
    start = whole.find(raw) if raw else -1
    return (start, start + len(raw)) if start >= 0 else (0, 0)


BIG = st.integers(0, 2**20)
CHANGES = st.one_of(
    st.tuples(st.just("flip"), BIG, st.integers(1, 255)),
    st.tuples(st.just("delete"), BIG, st.integers(1, 12)),
    st.tuples(st.just("insert"), BIG, st.binary(min_size=1, max_size=6)),
    st.tuples(st.just("replace"), BIG, st.sampled_from([*OPCODES, *NUMBERS])),
    st.tuples(st.just("insert"), BIG, st.sampled_from([*OPCODES, *NUMBERS])),
    st.tuples(st.just("duplicate"), BIG, st.integers(1, 60)),
    st.tuples(st.just("splice"), BIG, st.tuples(st.integers(0, len(CASES) - 1), BIG, st.integers(1, 80))),
)
MUTATIONS = st.tuples(st.integers(0, len(CASES) - 1), st.lists(CHANGES, min_size=1, max_size=4))


def changed(whole, change, first, last):
    kind, place, value = change
    place %= max(1, len(whole) - (last - first))  # pixels are left out: their bytes mean nothing
    place += (last - first) * (place >= first)
    before, after = whole[:place], whole[place:]
    if kind == "flip":
        return before + bytes([after[0] ^ value]) + after[1:] if after else whole
    if kind == "delete":
        return before + after[value:]
    if kind == "insert":
        return before + value + after
    if kind == "replace":
        return before + value + after[len(value) :]
    if kind == "duplicate":
        return before + after[:value] + after
    number, start, length = value
    other = CASES[number][-1]
    return before + other[start % len(other) :][:length] + after


@pytest.fixture(scope="module")
def child():
    process = Child()
    yield process
    process.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def check(child, folder, mutation):
    number, changes = mutation
    loader, name, _, pixels, _, content = CASES[number]
    for change in changes:
        content = changed(content, change, *places(pixels, content))
    (folder / name).write_bytes(content)
    child.load(loader, folder / name)


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(mutation=MUTATIONS)
def test_spoilt_pickles(child, folder, mutation):
    check(child, folder, mutation)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(mutation=MUTATIONS)
def test_many_spoilt_pickles(child, folder, mutation):
    check(child, folder, mutation)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_is_not_spoilt_loads(child, folder, number):
    loader, name, *_, content = CASES[number]
    for written, expected in ((content, None), (content + content, None), (content[:-1], "InputError")):
        (folder / name).write_bytes(written)
        assert child.load(loader, folder / name)["error"] == expected
