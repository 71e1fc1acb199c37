"""Reading run folders, which may be anyone's: with limits, running nothing of theirs, and with one kind of error.

A run's own files are far below every limit. What is above one was not written by this package, or is of no use to read.
"""

import contextlib
import csv
import io
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from swbn_lightning.errors import InputError

_MOST_BYTES = {".json": 16 << 20, ".csv": 64 << 20}
_MOST_VALUES = 1_000_000  # in a JSON file; of a text each hundred letters count
_MOST_SETTINGS = 20_000
_MOST_ROWS = 1_000_000
_DEEPEST = 40
_LONGEST_KEY = 1_000
_LARGEST = 1e100  # of a number: its square, and a sum of many, are finite
_MOST_WHOLE = 2**53  # up to which a float tells every whole number from the next
_MOST_ENTRIES = 1_000_000  # files and folders below a path
_MOST_RUNS = 2_000


class UnreadableFile(InputError):
    """A file of a run that cannot be read, and why."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{printable(path)} cannot be read: {reason}.")
        self.name, self.reason = Path(path).name, reason


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Whatever goes wrong within is an :class:`UnreadableFile`; a foreign one raises almost anything."""
    try:
        yield
    except UnreadableFile:
        raise
    except Exception as error:
        reason = str((isinstance(error, OSError) and error.strerror) or error)
        if isinstance(error, KeyError):
            reason = f"it lacks {reason}"
        elif isinstance(error, RecursionError):
            reason = f"it is nested more than {_DEEPEST} deep"
        reason = " ".join(printable(" ".join(reason.split())).split())[:200].rstrip(".")
        raise UnreadableFile(path, reason or type(error).__name__) from error


def read_json(path: Path, most: int = _MOST_VALUES, link: bool = False) -> dict[str, Any]:
    """The mapping of at most ``most`` values in a JSON file; the numbers in it may be NaN or infinite.

    It may be a ``link`` only where nothing of it is shown.
    """
    with reading(path), _opened(path, ".json", link) as file:
        return plain_mapping(json.loads(file.read()), most)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a configuration, which is the user's own and trusted, as the command's parser reads it."""
    import jsonargparse  # which only commands with a configuration need

    with reading(path):
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise InputError("it is not a regular file")
        content = jsonargparse.get_loader("yaml")(path.read_text())
        if not isinstance(content, dict | None):
            raise InputError(f"it holds a {type(content).__name__}, not a mapping")
        return content or {}


def csv_rows(path: Path, columns: Collection[str] = (), log: bool = False) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV file, each with the number of its line; they are read as they are asked for.

    Args:
        path: of the file.
        columns: that it has to have.
        log: its writer may have been killed: lines with more or fewer cells than columns, a last line without its end,
            and a file without a header are left out, not refused.

    Raises:
        UnreadableFile: not such a file, or more than a limit.
    """
    with reading(path), _opened(path) as file:
        lines = csv.reader((line for line in file if line.endswith("\n")) if log else file, strict=not log)
        header = next(lines, [])
        if log and not header:
            return
        if missing := [name for name in columns if name not in header]:
            raise InputError(f"it lacks the column {missing[0]!r}")
        if twice := [name for name in columns if header.count(name) > 1]:
            raise InputError(
                f"it has the column {twice[0]!r} {header.count(twice[0])} times; which counts is not known"
            )
        for number, cells in enumerate(filter(None, lines)):
            if number >= _MOST_ROWS:
                raise InputError(f"it has more than {_MOST_ROWS} rows")
            if len(cells) == len(header):
                yield lines.line_num, dict(zip(header, cells, strict=True))
            elif not log:
                raise InputError(f"line {lines.line_num} has {len(cells)} cells for {len(header)} columns")


def flatten(settings: Mapping[Any, Any]) -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; an empty mapping and a list of plain values stand as values.

    So does, as JSON, an inner mapping of plain values with a key that is empty or ends with a dot.
    """
    flat: dict[str, Any] = {}
    _flatten(settings, "", 0, flat)
    return flat


def finite(value: object) -> float | None:
    """A number in a file, or a text that is one, if it can be computed with and drawn; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # not so for NaN


def whole(text: str) -> int:
    """The whole number that a text is, if it may be a count."""
    try:
        value = int(text) if len(text) < 20 else _MOST_WHOLE + 1
    except ValueError:
        raise InputError(f"{text!r} is not a whole number") from None
    if abs(value) > _MOST_WHOLE:
        raise InputError(f"{text[:20]} is too large for a count")
    return value


def printable(text: object) -> str:
    r"""A text of one line that acts on no terminal: ``\x1b`` for an escape, ``\udcff`` for a byte that is no letter."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def folders_with(path: Path, names: Collection[str]) -> list[Path]:
    """A folder and those below it that have a file of one of these names; of a linked folder itself only."""
    found, seen, above = [], 0, str(path).count(os.sep)
    for here, folders, files in os.walk(path):
        seen += 1 + len(files)
        links = [Path(here, name) for name in folders if Path(here, name).is_symlink()]
        found += [link for link in links if has_file(link, names)]
        found += [Path(here)] if not set(names).isdisjoint(files) else []
        if seen > _MOST_ENTRIES or len(found) > _MOST_RUNS:
            raise InputError(
                f"{printable(path)} holds more than {_MOST_RUNS} runs or {_MOST_ENTRIES} files; give folders below it."
            )
        if here.count(os.sep) - above > _DEEPEST:
            folders.clear()
    return found


def has_file(folder: Path, names: Collection[str]) -> bool:
    """Whether there is a file of one of these names, however odd the names; a folder that may not be read has none."""
    return any(os.path.isfile(folder / name) for name in names)  # noqa: PTH113 - Path's own raises for odd names


@contextlib.contextmanager
def _opened(path: Path, kind: str = "", link: bool = False) -> Iterator[TextIO]:
    """A regular file of not more bytes than its kind may have, as UTF-8."""
    most = _MOST_BYTES[kind or path.suffix]
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # the other end of a pipe may never be opened
    if not link:
        if path.is_symlink():
            raise InputError("it is a link, which could show any file of yours; put a copy of the file in its place")
        flags |= getattr(os, "O_NOFOLLOW", 0)  # it may have become one since
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise InputError("it is not a regular file")
        if found.st_size > most:
            raise InputError(f"it has {found.st_size >> 20} MiB, and {most >> 20} are the most that is read")
        content = file.read(most + 1)  # some of /proc say that they have no bytes, and never end
        if len(content) > most:
            raise InputError(f"it has more than {most >> 20} MiB, the most that is read")
    yield io.StringIO(content.decode(), newline="")


def plain_mapping(content: Any, most: int) -> dict[str, Any]:
    """A copy of at most ``most`` values, whose texts can be written and shown; raises for anything else."""
    if not isinstance(content, dict):
        kind = "nothing" if content is None else f"a {type(content).__name__}"
        raise InputError(f"it holds {kind}, not a mapping")
    return _plain(content, iter(range(most)), 0)


def _plain(value: Any, budget: Iterator[int], depth: int) -> Any:
    """A copy whose texts can be written and shown, and name no impossible file."""
    if depth > _DEEPEST:
        raise InputError(f"it is nested more than {_DEEPEST} deep")
    for _ in range(_weight(value)):
        if next(budget, None) is None:
            raise InputError("it holds more values than are read")
    if isinstance(value, dict):
        return {_plain(key, budget, depth): _plain(inner, budget, depth + 1) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, budget, depth + 1) for inner in value]
    if isinstance(value, int) and abs(value) >= 2**64:
        raise InputError(f"it holds an integer of {value.bit_length()} bits")
    if value is None or isinstance(value, int | float):
        return value
    return str(value).replace("\0", r"\x00").encode("utf-8", "backslashreplace").decode()


def _weight(value: Any) -> int:
    return 1 + len(value) // 100 if isinstance(value, str) else 1


def _maps_beginnings(value: Mapping[Any, Any]) -> bool:
    """Whether it maps beginnings of names to plain values, as ``backbone_names`` does."""
    plain = not any(isinstance(part, Mapping | list) for part in value.values())
    return plain and any(name == "" or str(name).endswith(".") for name in value)


def _flatten(value: Any, key: str, depth: int, flat: dict[str, Any]) -> None:
    if depth > _DEEPEST or len(flat) > _MOST_SETTINGS or len(key) > _LONGEST_KEY:
        raise InputError(
            f"its settings are nested more than {_DEEPEST} deep, more than {_MOST_SETTINGS} in number or have "
            f"names of more than {_LONGEST_KEY} letters"
        )
    if key and isinstance(value, Mapping) and _maps_beginnings(value):
        flat[key] = json.dumps({str(name): part for name, part in value.items()}, default=str)
    elif isinstance(value, Mapping) and value:
        for name, part in value.items():
            _flatten(part, f"{key}.{name}" if key else str(name), depth + 1, flat)
    elif isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
        for number, part in enumerate(value):
            _flatten(part, f"{key}[{number}]", depth + 1, flat)
    else:
        flat[key] = value
