"""What pickles of data may name and hold."""

from enum import Enum
from types import NoneType

import numpy as np


class Name(Enum):
    """What a pickle of data may name. A mark each, which nobody can call."""

    RECONSTRUCT, SCALAR, FROMBUFFER, NDARRAY, DTYPE, ENCODE, EMPTY_BYTES = range(7)


NAMES = {
    ("numpy", "ndarray"): Name.NDARRAY,
    ("numpy", "dtype"): Name.DTYPE,
    # How Python 3 writes bytes in pickles of protocol 2, and how it writes b"".
    ("_codecs", "encode"): Name.ENCODE,
    ("__builtin__", "bytes"): Name.EMPTY_BYTES,
}
for _package in ("numpy.core", "numpy._core"):  # numpy 2 renamed it
    NAMES[f"{_package}.multiarray", "_reconstruct"] = Name.RECONSTRUCT
    NAMES[f"{_package}.multiarray", "scalar"] = Name.SCALAR
    NAMES[f"{_package}.numeric", "_frombuffer"] = Name.FROMBUFFER

DTYPES = {code: np.dtype(code) for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")}
NUMBERS = frozenset({bool, int, float, *(dtype.type for dtype in DTYPES.values())})
KEYS = frozenset({str, bytes, NoneType, *NUMBERS})
LEAVES = frozenset({bytearray, np.ndarray, *KEYS})
CONTAINERS = frozenset({list, tuple, dict})
