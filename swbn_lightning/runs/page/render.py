"""What a page consists of, and the template that makes HTML of it, in which everything is escaped."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from swbn_lightning.files.reading import finite
from swbn_lightning.whiteness.plots import to_png

TEMPLATE = "page.html.jinja"


class Number(str):
    """A figure as it is shown, to the right of its column."""

    __slots__ = ("strong",)
    kind = "number"
    strong: bool

    def __new__(cls, text: str, strong: bool = False) -> "Number":
        made = super().__new__(cls, text)
        made.strong = strong
        return made


class Name(str):
    """A name that may break behind its dots and slashes."""

    __slots__ = ()
    kind = "name"


class Code(str):
    """The same, as code."""

    __slots__ = ()
    kind = "code"


NONE = Number("–")


@dataclass(frozen=True)
class Download:
    """A link that saves a text, which is within the page, as a file of this name."""

    name: str
    text: str
    kind = "download"

    @property
    def address(self) -> str:
        """A data URL."""
        content = base64.b64encode(self.text.encode(errors="backslashreplace")).decode()
        return f"data:text/csv;charset=utf-8;base64,{content}"


@dataclass(frozen=True)
class Text:
    """A paragraph, of texts and what else stands in a line; ``style`` is a class, as ``quiet``."""

    parts: Sequence[Any]
    style: str = "quiet"
    kind = "text"


@dataclass(frozen=True)
class Heading:
    """A heading of the second or third level."""

    parts: Sequence[Any]
    level: int = 2
    kind = "heading"


@dataclass(frozen=True)
class Table:
    """A table whose first column heads its rows; a column whose cells are all :class:`Number` stands to the right."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    kind = "table"

    def is_numeric(self, column: int) -> bool:
        """Whether a column stands to the right."""
        return column > 0 and all(isinstance(row[column], Number) for row in self.rows)


@dataclass(frozen=True)
class Picture:
    """A PNG within the page; ``wide`` ones keep their size on a narrow screen."""

    alternative: str
    png: bytes
    width: int
    caption: Sequence[Any] = ()
    wide: bool = False
    kind = "picture"

    @property
    def address(self) -> str:
        """A data URL."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"

    @classmethod
    def of(cls, figure: Figure, alternative: str, caption: Sequence[Any] = (), wide: bool = False) -> "Picture":
        """Of a figure, at most at the size at which its letters are as large as the page's."""
        return cls(alternative, to_png(figure), round(96 * figure.get_figwidth()), caption, wide)


@dataclass(frozen=True)
class Together:
    """Pictures side by side."""

    pictures: Sequence[Picture]
    kind = "together"


@dataclass(frozen=True)
class Details:
    """What is shown when its title is clicked, or from the beginning."""

    title: str
    parts: Sequence[Any]
    opened: bool = False
    kind = "details"


@dataclass(frozen=True)
class Notice:
    """What is missing or went wrong: lines, each with the folders that it is about."""

    title: str
    lines: Sequence[tuple[str, Sequence[Code]]] = ()
    words: str = ""
    kind = "notice"


def number(value: Any, form: str = "{:.4g}", times: float = 1) -> Number:
    """A figure in a given form; a dash for what is no finite number."""
    if isinstance(value, str) or finite(value) is None:
        return NONE
    return Number(form.format(times * value))


def render(title: str, parts: Sequence[Any]) -> str:
    """The whole document."""
    text = _template().render(title=title, parts=parts)
    return text.encode(errors="backslashreplace").decode()  # names of folders may hold what is no letter


@cache
def _template() -> Template:
    made = Environment(
        autoescape=True, loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True
    )
    made.filters["breakable"] = lambda text: Markup(
        str(escape(str(text))).replace(".", ".<wbr>").replace("/", "/<wbr>")
    )
    return made.get_template(TEMPLATE)
