"""Where the files of a data set lie below a root; errors that say where they should."""

import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from swbn_lightning.errors import InputError


def checked_root(name: str, root: str | Path | None, expected: Callable[[Path], str]) -> Path:
    """``root`` as a folder that is there.

    Args:
        name: of the data set, for messages.
        root: as given by the user; ``~`` is the home folder.
        expected: gives a sentence that says what this root should hold.

    Raises:
        InputError: no root, nothing there, or a file.
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


def find_files(
    name: str, root: str | Path | None, folder: str, files: Sequence[str], packed: str = "", hint: str = ""
) -> dict[str, Path]:
    """The paths of a data set's files, which lie in ``root/folder`` or in ``root`` itself.

    Args:
        name: of the data set, for messages.
        root: as given by the user.
        folder: where torchvision puts the files below a root.
        files: the names of all files.
        packed: a suffix, as ``.gz``, with which a file may lie there instead.
        hint: another way to get them, the end of each message.

    Raises:
        InputError: as :func:`checked_root`; none of the files there; some missing, by name.
    """

    def expected(base: Path) -> str:
        either = f" (each plain or {packed})" if packed else ""
        return f"Expected {base / folder}/ with {', '.join(files)}{either}.{' ' if hint else ''}{hint}"

    base = checked_root(name, root, expected)
    for place in (base / folder, base):
        candidates = {file: [place / file, *([place / (file + packed)] if packed else [])] for file in files}
        found = {file: next((p for p in paths if p.is_file()), None) for file, paths in candidates.items()}
        here = {file: path for file, path in found.items() if path is not None}
        if len(here) == len(files):
            return here
        if here:
            missing = [file for file in files if file not in here]
            raise InputError(f"{name}: {place} lacks {', '.join(missing)}. {expected(base)}")
    raise InputError(f"{name}: nothing usable in {base} (it holds {shown_content(base)}). {expected(base)}")


def open_regular(path: str | Path) -> BinaryIO:
    """``path``, opened to read bytes, if it is a regular file or a link to one.

    Raises:
        InputError: as :func:`require_regular`.
        OSError: it cannot be opened.
    """
    require_regular(path)
    return Path(path).open("rb")


def require_regular(path: str | Path) -> None:
    """Raise :class:`InputError` where ``path`` is a named pipe, a socket or a device: opening one may wait for ever.

    Raises:
        InputError: it is one, or a folder.
        OSError: there is nothing.
    """
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode):
        tests = {"folder": stat.S_ISDIR, "named pipe": stat.S_ISFIFO, "socket": stat.S_ISSOCK}
        kind = next((kind for kind, test in tests.items() if test(mode)), "device")
        raise InputError(f"{path} cannot be read: it is a {kind}; give a regular file.")


def shown_text(text: str, length: int = 100) -> str:
    """``text`` from a file, for messages: short, and without characters that steer a terminal or cannot be printed."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:length])
    return shown + (" ..." if len(text) > length else "")
