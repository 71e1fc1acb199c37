"""Files of ``torch.save``, read without running any code of theirs."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable


def read_torch_file(path: str | Path, mmap: bool = True) -> Any:
    """What a file holds: tensors (on the CPU), plain values and containers of them.

    With ``mmap``, tensors are read when they are needed; until then the file must not change.

    Raises:
        InputError: not a regular file, not one of ``torch.save`` as it writes since PyTorch 1.6, packed (it could
            unpack to any size), or one that names code.
    """
    try:
        if not Path(path).is_file():
            raise OSError("it is not a regular file")
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise OSError("its parts are compressed, which torch.save does not do")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # a foreign file raises almost anything
        raise InputError(f"{path} is not a readable checkpoint ({_reason(error)}).") from error


def _reason(error: Exception) -> str:
    """One line. PyTorch's own of a pickle that it refuses advises to load it with all that it may run."""
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"GLOBAL (\S+)", str(error))
        return f"it names code: {printable(named[1])}" if named else "it holds more than tensors and plain values"
    if isinstance(error, zipfile.BadZipFile):
        return f"{error}, as torch.save makes it since PyTorch 1.6: if it is older, save it once more"
    return (str(error).splitlines() or [type(error).__name__])[0]
