"""Where the files of a data set lie below a root; errors that say where they should."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from swbn_lightning.errors import InputError


def checked_root(name: str, root: str | Path | None, expected: Callable[[Path], str]) -> Path:
    """``root`` (``~`` is the home folder) as a folder that is there.

    Raises:
        InputError: no root, nothing there, or a file, with the sentence that ``expected`` gives: what it should hold.
    """
    if root is None:
        raise InputError(f"{name}: give a root, as `--data.root DIR`. {expected(Path('DIR'))}")
    folder = Path(root).expanduser()
    if not folder.exists():
        raise InputError(f"{name}: root {folder} does not exist. {expected(folder)}")
    if not folder.is_dir():
        raise InputError(f"{name}: root {folder} is a file, not a folder. {expected(folder)}")
    return folder


def shown_content(folder: Path) -> str:
    """The first names in a folder, for messages."""
    found = sorted(p.name for p in folder.iterdir())
    return ", ".join(found[:6]) + (", ..." if len(found) > 6 else "") or "nothing"


def open_regular(path: str | Path) -> BinaryIO:
    """``path``, opened to read bytes, if it is a regular file or a link to one; errors as :func:`require_regular`."""
    require_regular(path)
    return Path(path).open("rb")


def require_regular(path: str | Path) -> None:
    """Raise :class:`InputError` for a folder, and for a pipe, a socket or a device, which may wait for ever."""
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode):
        tests = {"folder": stat.S_ISDIR, "named pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK}
        kind = next((kind for kind, test in tests.items() if test(mode)), "device")
        raise InputError(f"{path} cannot be read: it is a {kind}; give a regular file.")
