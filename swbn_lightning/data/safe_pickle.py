"""Reading the pickles that data sets come as, without letting them run code.

CIFAR and the few-shot benchmarks are distributed as pickles, and ``pickle.load`` runs whatever a pickle names. Here
nothing is admitted but arrays, numbers, strings, bytes and containers of them.
"""

import codecs
import pickle
from pathlib import Path
from typing import Any

from swbn_lightning.data.files import open_regular
from swbn_lightning.data.unpickler import DataUnpickler
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable


def load_pickle(path: str | Path) -> Any:
    """The content of a pickle of arrays, lists, dicts, strings and numbers; Python 2's too.

    Arrays may be read-only.

    Raises:
        InputError: the file cannot be read, is no regular file, is a web page, is not a pickle or is cut short, or
            holds anything else (which is not called).
    """
    try:
        with open_regular(path) as file:
            return DataUnpickler(file, path).load()
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except Exception as error:  # a broken pickle raises almost anything, of memory and recursion too
        if _is_web_page(path):
            raise InputError(f"{path} is not a readable pickle but a web page: the download was refused.") from error
        reason = printable(str(error)[:200])
        if not isinstance(error, pickle.UnpicklingError):
            reason = f"{type(error).__name__}: {reason}"
        raise InputError(f"{path} is not a readable pickle ({reason}).") from error


def _is_web_page(path: str | Path) -> bool:
    with Path(path).open("rb") as file:
        start = file.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().lower()
    return start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head"))
