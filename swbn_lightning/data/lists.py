"""Lists that say which images or classes belong to a split: ``filename,label`` rows, or one class name a line."""

import csv
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

from swbn_lightning.data.files import require_regular
from swbn_lightning.data.listing import ImageListing
from swbn_lightning.errors import InputError
from swbn_lightning.files.reading import printable

COLUMNS = ("filename", "label")

MAX_LINES, MAX_LINE, MAX_CHARACTERS = 5_000_000, 20_000, 500_000_000
"""Lines in a list, characters in one of them and in all. (ImageNet's 1.28 million images take 60 million.)"""


def read_image_list(path: Path) -> list[tuple[str, str]]:
    """The rows of a csv file with the columns ``filename`` and ``label`` (others are passed over)."""
    try:
        reader = csv.DictReader(_lines(path), skipinitialspace=True)
        columns = [name.strip() for name in reader.fieldnames or ()]
        if not set(COLUMNS) <= set(columns):
            begins = printable(",".join(columns)[:100])
            raise InputError(f"{path} needs the columns {','.join(COLUMNS)}, but begins with {begins!r}.")
        reader.fieldnames = columns
        rows = [(row["filename"] or "", row["label"] or "", reader.line_num) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as a list of images: {error}.") from error
    seen: dict[tuple[str, PurePosixPath], int] = {}
    for filename, label, line in rows:
        if not filename.strip() or not label.strip():
            raise InputError(f"{path}, line {line}: needs a filename and a label, got {filename!r} and {label!r}.")
        # (One name under two labels may be two files: <label>/<filename>.)
        if (first := seen.setdefault((label.strip(), PurePosixPath(filename.strip())), line)) != line:
            raise InputError(f"{path} lists {filename} twice, in lines {first} and {line}.")
    if not rows:
        raise InputError(f"{path} lists no images.")
    return [(filename.strip(), label.strip()) for filename, label, _ in rows]


def read_class_list(path: Path) -> list[str]:
    """The class names of a text file, one a line; empty lines and lines that begin with ``#`` are passed over."""
    try:
        lines = [line.strip() for line in _lines(path)]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a list of classes: {error}.") from error
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise InputError(f"{path} lists no classes.")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f"{path} lists the class {twice[0]} twice.")
    return names


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file, with their ends; no file is so large, and no line so long, that it fills the memory."""
    require_regular(path)
    total = 0
    with path.open(newline="", encoding="utf-8-sig") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), ""), start=1):
            total += len(line)
            if len(line) > MAX_LINE:
                raise InputError(f"{path} is no list: line {number} has more than {MAX_LINE} characters.")
            if number > MAX_LINES or total > MAX_CHARACTERS:
                most = f"{MAX_LINES} lines and {MAX_CHARACTERS} characters"
                raise InputError(f"{path} is too long for a list: at most {most} are read.")
            yield line


class Contained:
    """Names from a list as paths below ``root``, none of which may lie elsewhere.

    A list from the network may name any file of the machine: absolute names, ``..`` and links that lead out of the root
    are refused. The root may itself be a link, and so may ``bases``, folders below it whose names no list chose.
    """

    def __init__(self, root: Path, bases: Iterable[Path] = ()) -> None:
        self.root = root
        self._inside = {folder.resolve() for folder in (root, *bases)}
        self._good_folders: set[Path] = set()

    def __call__(self, name: str, source: Path) -> Path:
        """The path that ``name``, from the list ``source``, means; it need not exist."""
        self.require_relative(name, source)
        path = self.root / name
        try:
            # Folders are resolved once: 60,000 images lie in a hundred of them.
            if path.parent not in self._good_folders:
                self._require_inside(path.parent, name, source)
                self._good_folders.add(path.parent)
            if path.is_symlink():
                self._require_inside(path, name, source)
        except InputError:
            raise
        except OSError as error:  # it is too long
            raise InputError(
                f"{source} names {printable(name[:100])!r}, which cannot be a file: {error!s:.40}."
            ) from error
        return path

    def require_relative(self, name: str, source: Path) -> None:
        """Raise :class:`InputError` for an absolute name, ``..``, as any system has them, and control characters."""
        windows = PureWindowsPath(name)
        if PurePosixPath(name).is_absolute() or windows.drive or windows.root or ".." in windows.parts:
            raise InputError(f"{source} names {name!r}: names must be relative to {self.root}, without '..'.")
        if any(unicodedata.category(character) == "Cc" for character in name):  # a zero byte, or what steers a terminal
            raise InputError(f"{source} names {printable(name[:100])!r}, which holds control characters.")

    def _require_inside(self, path: Path, name: str, source: Path) -> None:
        found = path.resolve()
        if not any(found.is_relative_to(folder) for folder in self._inside):
            raise InputError(f"{source} names {name!r}, which is a link to {found}, outside {self.root}.")


def list_images(name: str, root: Path, list_file: Path, places: Sequence[str]) -> ImageListing:
    """The images of a ``filename,label`` list.

    Args:
        name: of the data set, for messages.
        root: folder that holds the images.
        list_file: the list.
        places: where below ``root`` an image may lie, with ``{filename}`` and ``{label}``; the first at which the first
            image is there holds for all.

    Raises:
        InputError: as :func:`read_image_list`; a name that leaves the root; an image that is not there.
    """
    rows = read_image_list(list_file)
    contained = Contained(root, {root / _fixed(place) for place in places})

    def path_of(place: str, filename: str, label: str) -> Path:
        contained.require_relative(filename, list_file)  # by itself, before a folder is put in front of it
        return contained(place.format(filename=filename, label=label), list_file)

    first = {place: path_of(place, *rows[0]) for place in places}
    place = next((p for p, path in first.items() if path.is_file()), None)
    if place is None:
        tried = ", ".join(str(path) for path in first.values())
        raise InputError(f"{name}: {list_file} names {rows[0][0]}, which is not there. Looked for {tried}.")
    classes: dict[str, list[Path]] = {label: [] for label in sorted({label for _, label in rows})}
    missing = []
    for filename, label in rows:
        path = path_of(place, filename, label)
        if path.is_file():
            classes[label].append(path)
        else:
            missing.append(path)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        shown = ", ".join(str(path) for path in missing[:3])
        raise InputError(f"{name}: {list_file} names images that are not there: {shown}{more}.")
    return ImageListing(classes, root)


def _fixed(place: str) -> str:
    """The folders of a place above what the list fills in: ``images`` of ``images/{label}/{filename}``."""
    return place.partition("{")[0].rpartition("/")[0]
