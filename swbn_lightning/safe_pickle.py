"""Reading the pickles that data sets come as, without letting them run code.

CIFAR and the few-shot benchmarks are distributed as pickles, and ``pickle.load`` runs whatever a pickle
names. Here nothing is admitted but arrays, numbers, strings, bytes and containers of them.
"""

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from swbn_lightning.errors import InputError


def load_pickle(path: str | Path) -> Any:
    """The content of a pickle of arrays, lists, dicts, strings and numbers; Python 2's too.

    Raises:
        InputError: the file cannot be read, is a web page, is not a pickle or is cut short, or names anything else
            (which is not called).
    """
    try:
        with Path(path).open("rb") as file:
            return _Unpickler(file, encoding="latin1").load()
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # a broken pickle raises almost anything
        if _is_web_page(path):
            raise InputError(f"{path} is not a readable pickle but a web page: the download was refused.") from error
        raise InputError(f"{path} is not a readable pickle ({type(error).__name__}: {error}).") from error


def _is_web_page(path: str | Path) -> bool:
    with Path(path).open("rb") as file:
        start = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().lower()
    return start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head"))


def _encode_latin1(text: str, encoding: str) -> bytes:
    # How Python 3 writes bytes in pickles of protocol 2.
    if encoding != "latin1":
        raise InputError(f"a pickle asks for the codec {encoding!r}; only latin1 is admitted.")
    return codecs.encode(text, "latin1")


def _empty_bytes() -> bytes:
    # How Python 3 writes b"" in pickles of protocol 2: as a call of bytes, which given a number would ask for memory.
    return b""


_ADMITTED: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _encode_latin1,
    ("__builtin__", "bytes"): _empty_bytes,
}
# What arrays and numpy's numbers are rebuilt by; numpy 2 renamed the package that holds it.
_ARRAY = np.zeros(1)
_REBUILD = {
    ("multiarray", "_reconstruct"): _ARRAY.__reduce__()[0],
    ("multiarray", "scalar"): np.float64(0).__reduce__()[0],
    ("numeric", "_frombuffer"): _ARRAY.__reduce_ex__(5)[0],
}
for (_module, _name), _function in _REBUILD.items():
    for _package in ("numpy.core", "numpy._core"):
        _ADMITTED[f"{_package}.{_module}", _name] = _function
_ADMITTED["numpy", "ndarray"] = np.ndarray
_ADMITTED["numpy", "dtype"] = np.dtype


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise InputError(
                f"a data file names {module}.{name}, which is neither an array, a list nor a string: "
                "it may want to run code and was not loaded."
            ) from None
