"""An interpreter of pickles that knows numbers, text, arrays and containers of them, and never calls anything.

Names become marks; arrays are put together here from a plain data type, a shape and bytes, whose number must fit.
(numpy's own functions read foreign memory, given a data type or strides of a pickle's choice.)

The interpreter is Python's own in pure Python, with the opcodes that data need: the one in C asks for gigabytes
when a pickle stores something under a high number. Time and memory stay in proportion to the size of the file.
"""

import math
import pickle
import secrets
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from types import NoneType
from typing import Any, BinaryIO, ClassVar

import numpy as np

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable

MAX_STEPS = 40_000_000
"""Opcodes in a pickle; 450,000 images, each an array of its own, take ten million. One takes at most some 100 bytes."""

MAX_TUPLES = 10
"""How deep tuples may be nested: hash() follows them without a limit."""

MAX_NUMERIC_KEYS = 10_000  # in a dict; numbers can be chosen so that each takes as long as all before it

MAX_DIMENSIONS = 32  # of an array; numpy 1 has no more

_OTHER_ARRAY = "it holds an array of another kind than plain numbers"
_WHOLE_NUMBERS = range(-(2**63), 2**64)


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
LEAVES = frozenset({np.ndarray, *KEYS})


class _Unfinished:
    """An array or a data type that was named and is filled in by the next BUILD."""

    def __init__(self, dtype: np.dtype | None = None) -> None:
        self.dtype = dtype  # None: it will be an array
        self.value: np.ndarray | np.dtype | None = None


class _Memo(dict[int, Any]):
    """What a pickle stores, under numbers that nobody can choose so that they collide."""

    _secret = secrets.randbits(60)

    def __setitem__(self, number: int, value: Any) -> None:
        if not 0 <= number < 2**32:
            raise UnpicklingError("it stores something under a number of more than 32 bits")
        super().__setitem__(number ^ self._secret, value)

    def __getitem__(self, number: int) -> Any:
        value = super().__getitem__(number ^ self._secret)
        if isinstance(value, _Unfinished):  # it was stored before it was built
            if value.value is None:
                raise UnpicklingError("it uses an array that is not finished")
            return value.value
        return value


class DataUnpickler(pickle._Unpickler):
    """Python's, without everything that calls, and with bounds.

    Raises:
        InputError: from ``load``, of a name that is not admitted.
        UnpicklingError: of other opcodes, or of data that are not as they should be.
        Exception: almost any other, where the pickle is broken.
    """

    stack: list[Any]
    metastack: list[list[Any]]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {}

    def __init__(self, file: BinaryIO, path: str | Path) -> None:
        super().__init__(file, encoding="latin1")
        self._file, self._path, self._size = file, path, file.seek(0, 2)
        file.seek(0)
        self.readline = file.readline
        self.metastack, self.stack = [], []
        self.append = self.stack.append
        self._spent = {"arrays": 0, "encoded text": 0}  # bytes
        self._numeric_keys, self.memo = 0, _Memo()
        self._depths: dict[int, tuple[int, tuple]] = {}  # of tuples that hold tuples; held, so that an id stays theirs

    def load(self) -> Any:
        read, dispatch = self._file.read, self.dispatch
        for _ in range(MAX_STEPS):
            opcode = read(1)
            if not opcode:
                raise UnpicklingError("it is cut short")
            if opcode == pickle.STOP:
                return self._checked(self.stack.pop())
            if opcode[0] not in dispatch:
                names = (name for name in pickle.__all__ if name.isupper() and getattr(pickle, name) == opcode)
                raise UnpicklingError(f"it has the opcode {next(names, repr(opcode))}, which data do not need")
            dispatch[opcode[0]](self)
        raise UnpicklingError(f"it has more than {MAX_STEPS} opcodes")

    def read(self, count: int) -> bytes:
        """``count`` bytes. Not more than are there is asked for: the bytes of an absurd length would be allocated."""
        left = self._size - self._file.tell() if count > 255 else count
        if count > left:
            raise UnpicklingError(f"it is cut short, or says that {count} bytes follow where there are {left}")
        if len(content := self._file.read(count)) < count:
            raise UnpicklingError("it is cut short")
        return content

    def find_class(self, module: str, name: str) -> Name:
        try:
            return NAMES[module, name]
        except KeyError:
            named = printable(f"{module}.{name}"[:100])
            raise InputError(
                f"{self._path} names {named}, which is neither an array, a list nor a string: it may want to run code "
                "and was not loaded."
            ) from None

    def load_frame(self) -> None:
        self.read(8)  # a frame says how much to read ahead, which the file does by itself

    def load_bytearray8(self) -> None:
        self.append(self.read(int.from_bytes(self.read(8), "little")))

    def load_tuple(self) -> None:
        items = self.pop_mark()  # first: it puts another stack in place
        self.append(self._tuple(items))

    def _load_short_tuple(self, length: int) -> None:
        self.stack[-length:] = [self._tuple(self._top(length))]

    def load_dict(self) -> None:
        pairs = self.pop_mark()
        self.append({})
        self._set(pairs)

    def load_setitem(self) -> None:
        pair = self._top(2)
        del self.stack[-2:]
        self._set(pair)

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._made(self.stack[-1], arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if not isinstance(target, _Unfinished):
            raise UnpicklingError("it sets the state of something that is no array")
        target.value = self._built_array(state) if target.dtype is None else self._built_dtype(target.dtype, state)
        self.stack[-1] = target.value
        self._depths.pop(id(state), None)  # its bytes need not be held

    def _encoded(self, text: str) -> bytes:
        self._spend("encoded text", len(text))
        return text.encode("latin1")

    def _spend(self, what: str, count: int) -> None:
        # Many arrays could share the same few bytes, and many byte strings the same text.
        self._spent[what] += count
        if self._spent[what] > self._size:
            raise UnpicklingError(f"its {what} would take more bytes than the file's {self._size}")

    def _top(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        if len(items) < count:
            raise UnpicklingError("it takes more than is there")
        return items

    def _tuple(self, items: list[Any]) -> tuple:
        depths = [self._depths.get(id(item), (1, ()))[0] for item in items if type(item) is tuple]
        depth = 1 + max(depths, default=0)
        if depth > MAX_TUPLES:
            raise UnpicklingError(f"it nests tuples more than {MAX_TUPLES} deep")
        made = tuple(items)
        if depth > 1:
            self._depths[id(made)] = depth, made
        return made

    def _set(self, pairs: list[Any]) -> None:
        target, keys, values = self.stack[-1], pairs[::2], pairs[1::2]
        if type(target) is not dict or len(keys) != len(values):
            raise UnpicklingError("it sets items of something that is no dict, or a key without a value")
        if foreign := [key for key in keys if type(key) not in KEYS]:
            raise UnpicklingError(f"a {type(foreign[0]).__name__} is the key of a dict; only text and numbers can be")
        if numbers := sum(type(key) in NUMBERS for key in keys):
            self._numeric_keys, in_all = self._numeric_keys + numbers, 10 * MAX_NUMERIC_KEYS
            if len(target) + len(keys) > MAX_NUMERIC_KEYS or self._numeric_keys > in_all:
                raise UnpicklingError(
                    f"it has more than {MAX_NUMERIC_KEYS} numbers as keys of a dict, or {in_all} in all"
                )
        target.update(zip(keys, values, strict=True))

    def _made(self, name: Any, arguments: Any) -> Any:
        if isinstance(name, Name) and type(arguments) is tuple:
            match name, arguments:
                case Name.RECONSTRUCT, (Name.NDARRAY, (0,), b"b" | "b"):
                    return _Unfinished()
                case Name.DTYPE, (str() as code, 0, 1) if code in DTYPES:
                    return _Unfinished(DTYPES[code])
                case Name.SCALAR, (np.dtype() as dtype, raw):
                    return self._array((), dtype, "C", raw)[()]
                case Name.FROMBUFFER, (raw, np.dtype() as dtype, shape, "C" | "F" as order):
                    return self._array(shape, dtype, order, raw)
                case Name.ENCODE, (str() as text, "latin1"):
                    return self._encoded(text)
                case Name.EMPTY_BYTES, ():
                    return b""
        raise UnpicklingError("it calls something, or makes an array of another kind than plain numbers")

    def _built_dtype(self, dtype: np.dtype, state: Any) -> np.dtype:
        whole = type(state) is tuple and len(state) == 8
        plain = whole and all(type(item) in (int, str, NoneType) for item in state)
        orders = "<>=" if dtype.itemsize > 1 else "|<>="
        # After the byte order: fields and their names, a subarray, flags.
        if not plain or state[:1] + state[2:] != (3, None, None, None, -1, -1, 0) or state[1] not in tuple(orders):
            raise UnpicklingError(_OTHER_ARRAY)
        return np.dtype(state[1] + dtype.str[1:])

    def _built_array(self, state: Any) -> np.ndarray:
        match state:
            case (1, shape, np.dtype() as dtype, (0 | 1) as fortran, raw) if type(state) is tuple:
                return self._array(shape, dtype, "F" if fortran else "C", raw)
        raise UnpicklingError(_OTHER_ARRAY)

    def _array(self, shape: Any, dtype: np.dtype, order: Any, raw: Any) -> np.ndarray:
        known = type(shape) is tuple and len(shape) <= MAX_DIMENSIONS
        if not known or not all(type(length) is int and length >= 0 for length in shape):
            raise UnpicklingError("it holds an array whose shape is no tuple of a few whole numbers")
        if isinstance(raw, str):  # Python 2's bytes
            raw = self._encoded(raw)
        if type(raw) is not bytes or len(raw) != math.prod(shape) * dtype.itemsize:
            raise UnpicklingError("it holds an array whose bytes are not as many as its shape says")
        self._spend("arrays", len(raw))
        if dtype.kind == "b" and raw.translate(None, b"\0\1"):
            raise UnpicklingError("it holds truth values that are neither 0 nor 1")
        values = np.frombuffer(raw, dtype) if raw else np.empty(0, dtype)
        return values.reshape(shape, order=order).astype(dtype.newbyteorder("="), copy=False)  # as numpy loads them

    def _checked(self, content: Any) -> Any:
        """``content``, if nothing is in it but data: no mark of a name, no array that was never built."""
        pending, seen = [content], set()
        while pending:
            value = pending.pop()
            if type(value) in (list, tuple, dict):
                if id(value) not in seen:
                    seen.add(id(value))
                    pending.extend(value.values() if type(value) is dict else value)
            elif type(value) not in LEAVES:
                raise UnpicklingError("it holds something that is neither a number, text nor a finished array")
        return content


def _of_64_bits(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """``load`` of a whole number; of a larger one each product, as of a shape, and each hash would take long."""

    def checked(unpickler: DataUnpickler) -> None:
        load(unpickler)
        if unpickler.stack[-1] not in _WHOLE_NUMBERS:
            raise UnpicklingError("it holds a whole number of more than 64 bits")

    return checked


# Python's own methods where there is none above; they read through `read` and `readline` above, and store in a _Memo.
# Those that append take whatever has that method; of what can be on the stack, that is a list only.
for _name in (
    "PROTO", "FRAME", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2",
    "LONG", "LONG1", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8", "TUPLE", "EMPTY_TUPLE",
    "LIST", "EMPTY_LIST", "DICT", "EMPTY_DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "PUT", "BINPUT",
    "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
):  # fmt: skip
    _code = getattr(pickle, _name)[0]
    _method = vars(DataUnpickler).get(f"load_{_name.lower()}", pickle._Unpickler.dispatch[_code])
    DataUnpickler.dispatch[_code] = _of_64_bits(_method) if _name in ("INT", "LONG", "LONG1") else _method
for _length, _opcode in enumerate((pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3), start=1):
    DataUnpickler.dispatch[_opcode[0]] = partial(DataUnpickler._load_short_tuple, length=_length)
