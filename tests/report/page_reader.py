"""What stands on a page, read with the standard library's parser."""

import base64
import csv
import io
from html.parser import HTMLParser

from PIL import Image

from swbn_lightning.runs.page import write_report

VOID = {"meta", "img", "wbr"}


class Page(HTMLParser):
    """Tables as lists of rows of texts, images, links and all text; fails where a tag is not closed."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.images, self.links, self.words, self.tags = [], [], {}, [], []
        self.attributes, self._open, self._joined = [], [], False
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        self._joined = tag == "wbr"
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "img":
            self.images.append((given["alt"], decode(given["src"])))
        elif tag == "a":
            self.links[given["download"]] = list(csv.DictReader(io.StringIO(decode(given["href"]).decode())))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" in self._open:
            return
        if self._joined and self.words:
            self.words[-1] += data
        else:
            self.words.append(data)
        self._joined = False
        if {"td", "th"} & set(self._open):
            self.tables[-1][-1][-1] += data

    @property
    def title(self):
        return next(word for word in self.words if word.strip())

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def table(self, first):
        """Rows as dictionaries, of the first table whose head begins with this."""
        head, *rows = next(table for table in self.tables if table[0][0] == first)
        return [dict(zip(head, row, strict=True)) for row in rows]

    def sizes(self):
        return {alt: Image.open(io.BytesIO(content)).size for alt, content in self.images}


def report(*paths, output=None):
    """Write the page and read it."""
    return Page(write_report(list(paths), output).read_text(encoding="utf-8"))


def decode(address):
    assert address.startswith("data:")
    return base64.b64decode(address.partition("base64,")[2], validate=True)
