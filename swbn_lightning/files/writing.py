"""Files written whole or not at all, and texts for tables and Markdown."""

import contextlib
import csv
import html
import io
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file whole or not at all: a kill at any moment leaves the old one or the new one.

    Raises:
        InputError: it cannot be written, as on a full disk.
    """
    try:
        with replacing(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of ``path`` at the end, or is gone if that is not reached.

    Another process may be writing it too. Nobody can foresee its name and what is there is never opened: a link that
    waited in a downloaded folder would have another file overwritten.
    """
    temporary = path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.tmp")
    file = temporary.open("xb")
    try:
        with file:
            yield file
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def output_file(path: str | Path, what: str, usual: str) -> Path:
    """The file that a command is to write at its end, checked before its work.

    Args:
        path: as the user gave it.
        what: is in the file, as "the page".
        usual: its usual name.

    Raises:
        InputError: a folder, or a file in the place of one.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise InputError(f"{file} is a folder; give the file for {what}, as {file / usual}.")
    above = next((parent for parent in file.parents if parent.exists()), file.parent)
    if above.exists() and not above.is_dir():
        raise InputError(f"{file} cannot be written: {above} is a file; give {what} another folder.")
    return file


def write_output(file: Path, content: str | bytes) -> Path:
    """As :func:`write_whole`; makes the folders above it, too."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror or error}.") from error
    return write_whole(file, content)


def markdown_text(text: object) -> str:
    """A text out of anybody's file, for Markdown: of one line, without HTML, links and code."""
    return re.sub(r"([\[\]`|])", r"\\\1", html.escape(printable(text), quote=False))


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A header and a line a row; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
