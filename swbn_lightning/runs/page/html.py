"""HTML in which everything is escaped that is not HTML made here."""

import base64
import html
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure

from swbn_lightning.files.pictures import to_png
from swbn_lightning.files.reading import finite

# No network, no script: also if something slipped through, a browser would load and run nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; overflow-wrap: anywhere; }
body { font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; color: #1b1f24;
  background: #fff; margin: 0 auto; padding: 1.2rem 1.2rem 3rem; max-width: 1160px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .2rem 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; padding-bottom: .25rem; border-bottom: 1px solid #d5dae0; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; max-width: 46rem; }
.quiet { color: #57606a; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td, th *, td * { overflow-wrap: break-word; }
th, td { padding: .3rem .55rem; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e8ec; }
th { font-weight: 600; background: #f4f6f8; }
thead th { vertical-align: bottom; }
tbody th { background: none; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
td.text code { overflow-wrap: anywhere; }
td.strong { font-weight: 600; }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; align-items: flex-start; }
figure { margin: .4rem 0; max-width: 100%; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { font-size: .85rem; color: #57606a; max-width: 46rem; }
.notice { border-left: 4px solid #d55e00; background: #fdf4ee; padding: .5rem .9rem; margin: 1rem 0; }
.notice ul { margin: .2rem 0; padding-left: 1.2rem; }
details { border: 1px solid #d5dae0; border-radius: 6px; margin: .6rem 0; padding: 0 .9rem; }
details[open] { padding-bottom: .6rem; }
details details, .notice details { border: 0; padding: 0; margin: 0; }
summary { cursor: pointer; padding: .5rem 0; font-weight: 600; }
code { font: .88em ui-monospace, "SFMono-Regular", Menlo, "DejaVu Sans Mono", monospace; }
@media (max-width: 640px) {
  .wide img { max-width: none; }
  body { padding: .8rem .8rem 2rem; }
  th, td { padding: .28rem .45rem; }
}
@media print { details { break-inside: avoid; } }
"""


class Html(str):
    """A text that is HTML already."""

    __slots__ = ()


def tag(name: str, *content: Any, **attributes: str) -> Html:
    """An element; content that is not :class:`Html` is escaped, and so are attributes. ``class_`` is ``class``."""
    given = "".join(f' {key.rstrip("_")}="{html.escape(str(value))}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{join(content)}</{name}>")


def join(parts: Iterable[Any]) -> Html:
    """Parts one after the other, escaped where they are not :class:`Html`; None is left out."""
    return Html("".join(p if isinstance(p, Html) else html.escape(str(p)) for p in parts if p is not None))


def dotted(name: str) -> Html:
    """A name that may break behind its dots and slashes."""
    return Html(html.escape(name).replace(".", ".<wbr>").replace("/", "/<wbr>"))


def page(title: str, *content: Any) -> str:
    """A whole document."""
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            tag("title", title),
            Html(f"<style>{_STYLE}</style>"),
        ]
    )
    body = tag("body", tag("main", *content))
    text = f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n{body}\n</html>\n'
    return text.encode(errors="backslashreplace").decode()  # names of folders may hold what is no letter


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Html:
    """A table, its first column as the rows' heads; wider than the page it scrolls by itself.

    A column whose cells are all :class:`Number` stands to the right.
    """
    columns = [[row[number] for row in rows] for number in range(len(head))]
    numeric = [number > 0 and all(isinstance(cell, Number) for cell in own) for number, own in enumerate(columns)]
    titles = [tag("th", title, scope="col", **_numeric(right)) for title, right in zip(head, numeric, strict=True)]
    lines = []
    for row in rows:
        cells = [tag("th", row[0], scope="row")]
        cells += [
            tag("td", cell, class_=cell.style) if isinstance(cell, Number) else tag("td", cell, class_="text")
            for cell in row[1:]
        ]
        lines.append(tag("tr", *cells))
    return tag("div", tag("table", tag("thead", tag("tr", *titles)), tag("tbody", *lines)), class_="scroll")


class Number(str):
    """A figure as it is shown, for the right of its column; a text like any other, so it is escaped."""

    __slots__ = ("strong",)
    strong: bool

    def __new__(cls, text: str, strong: bool = False) -> "Number":
        made = super().__new__(cls, text)
        made.strong = strong
        return made

    @property
    def style(self) -> str:
        """Classes of its cell."""
        return "number strong" if self.strong else "number"


NONE = Number("–")


def number(value: Any, form: str = "{:.4g}", times: float = 1) -> Number:
    """A figure in a given form; a dash for what is no finite number."""
    if isinstance(value, str) or finite(value) is None:
        return NONE
    return Number(form.format(times * value))


def picture(figure: Figure, alternative: str, caption: Any = None) -> Html:
    """A figure as a PNG within the page, at most at the size at which its letters are as large as the page's."""
    content = base64.b64encode(to_png(figure)).decode()
    width = round(96 * figure.get_figwidth())  # CSS pixels an inch
    image = Html(
        f'<img alt="{html.escape(alternative)}" src="data:image/png;base64,{content}" style="width: {width}px">'
    )
    return tag("figure", image, tag("figcaption", caption) if caption is not None else None)


def download(name: str, text: str, words: str) -> Html:
    """A link that saves a text, which is within the page, as a file."""
    content = base64.b64encode(text.encode(errors="backslashreplace")).decode()
    return tag("a", words, download=name, href=f"data:text/csv;charset=utf-8;base64,{content}")


def _numeric(right: bool) -> dict[str, str]:
    return {"class_": "number"} if right else {}
