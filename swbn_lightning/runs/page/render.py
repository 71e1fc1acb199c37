"""What a page consists of, and the template that makes HTML of it, in which everything is escaped."""

import base64
import io
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from PIL import Image

from swbn_lightning.files.pictures import to_png
from swbn_lightning.files.reading import finite

TEMPLATE = "page.html.jinja"
MOST_PICTURED = 8  # runs or tests with pictures of their own: pages of a big study stay usable
Part = dict[str, Any]  # its `kind` says how the template shows it
_SIDE = 96  # of a thumbnail, CSS pixels


class Number(str):
    """A figure as it is shown, to the right of its column."""

    kind, strong = "number", False


class Strong(Number):
    """A figure that one looks for first."""

    strong = True


class Name(str):
    """A name that may break behind its dots, but for those of numbers, and its slashes."""

    kind = "name"


class Code(str):
    """The same, as code."""

    kind = "code"


class Thumbnail(str):
    """A name below its picture."""

    kind, data = "thumbnail", ""


NONE = Number("–")


def number(value: Any, form: str = "{:.4g}", times: float = 1) -> Number:
    """A figure in a given form; a dash for what is no finite number."""
    if isinstance(value, str) or finite(value) is None:
        return NONE
    return Number(form.format(times * value))


def text(*parts: Any) -> Part:
    """A paragraph, of texts and what else stands in a line."""
    return {"kind": "text", "parts": parts}


def download(name: str, content: str) -> Part:
    """A link that saves a text, which is within the page, as a file of this name."""
    return {"kind": "download", "name": name, "data": _base64(content.encode(errors="backslashreplace"))}


def heading(*parts: Any, level: int = 2) -> Part:
    """Of the second or third level."""
    return {"kind": "heading", "parts": parts, "level": level}


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]], leave_out: bool = False) -> Part:
    """A table whose first column heads its rows; a column of :class:`Number` only stands to the right.

    With ``leave_out`` columns in which nothing is known are left out.
    """
    columns = range(len(head))
    if leave_out:
        columns = [c for c in columns if c == 0 or any(row[c] not in (NONE, "–") for row in rows)]  # type: ignore[assignment]
    shown = [[row[c] for c in columns] for row in rows]
    right = [c > 0 and all(isinstance(row[c], Number) for row in rows) for c in columns]
    return {"kind": "table", "head": [head[c] for c in columns], "rows": shown, "right": right}


def picture(figure: Figure, alternative: str, *caption: Any, wide: bool = False) -> Part:
    """A figure as a PNG within the page, so large that its letters are about as large as the page's.

    A ``wide`` one keeps on a narrow screen a size at which its letters can be read.
    """
    width = round(96 * figure.get_figwidth())  # CSS pixels an inch
    return {"kind": "picture", "alternative": alternative, "data": _base64(to_png(figure)), "width": width,
            "caption": caption, "wide": wide}  # fmt: skip


def thumbnail(pixels: np.ndarray, name: str) -> Thumbnail:
    """A name below its picture, uint8 ``[H, W, 3]`` or gray ``[H, W]``, made small or, by whole factors, large."""
    image = Image.fromarray(pixels)
    times = _SIDE // max(image.size)
    if times > 1:  # small ones keep their pixels apart
        image = image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)
    image.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    image.save(file, format="jpeg", quality=90)
    made = Thumbnail(name)
    made.data = _base64(file.getvalue())
    return made


def details(title: str, parts: Sequence[Part | None], opened: bool = False) -> Part:
    """What is shown when its title is clicked, or from the beginning."""
    return {"kind": "details", "title": title, "parts": [p for p in parts if p is not None], "opened": opened}


def notice(title: str, words: str = "", lines: Sequence[tuple[str, Sequence[Code]]] = ()) -> Part:
    """What is missing or went wrong, with lines that each name the folders which they are about."""
    return {"kind": "notice", "title": title, "words": words, "lines": lines}


def left_out(count: int, most: int, what: str, rest: str = "the others are only in the files") -> list[str]:
    """A sentence, if of so many only the first are shown."""
    return [f"The first {most} of {count:,} {what}; {rest}."] if count > most else []


def render(title: str, parts: Sequence[Part]) -> str:
    """The whole document."""
    made = _template().render(title=title, parts=parts)
    return made.encode(errors="backslashreplace").decode()  # names of folders may hold what is no letter


@cache
def _template() -> Template:
    made = Environment(
        autoescape=True, loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True
    )
    made.filters["breakable"] = lambda name: Markup(re.sub(r"(\.(?!\d)|/)", r"\1<wbr>", str(escape(str(name)))))
    return made.get_template(TEMPLATE)


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
