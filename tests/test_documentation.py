"""The pages hold together: links lead somewhere, every public name has its place in the reference, lines are short."""

import importlib
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = sorted([*REPOSITORY.glob("*.md"), *DOCS.glob("*.md")])
REFERENCE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "reference").glob("*.rst")))
PUBLIC = ["swbn_lightning", "swbn_lightning.norms", "swbn_lightning.whiteness", "swbn_lightning.backbones", "fewshot"]


def documented():
    """What the reference shows: names after autoclass and autofunction, with the module that a page is about."""
    module = ""
    for line in REFERENCE.splitlines():
        if found := re.match(r"\.\. (module|automodule|autoclass|autofunction):: (\S+)", line):
            kind, name = found.groups()
            if kind == "module":
                module = name
            elif kind != "automodule":
                yield name if name.startswith(("swbn_lightning.", "fewshot.")) else f"{module}.{name}"


@pytest.mark.parametrize("package", [*PUBLIC, "classification"])
def test_the_reference_has_every_public_name(package):
    module = importlib.import_module(package)
    shown = {name.rsplit(".", 1)[1] for name in documented()}
    assert not [name for name in module.__all__ if name not in shown and not name.startswith("__")]


def outside_code(page):
    code = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            yield number, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short_outside_tables_links_and_code(page):
    too_long = [n for n, line in outside_code(page) if len(line) > 100 and "](" not in line and line[:1] != "|"]
    assert not too_long


def anchors(page):
    """The names that code hosts give to a page's headings."""
    headings = [line.lstrip("#") for _, line in outside_code(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_are_there(page):
    lost = []
    for _, line in outside_code(page):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            path, _, anchor = target.partition("#")
            if path.startswith(("http:", "https:", "mailto:")):
                continue
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                lost.append(target)
    assert not lost
