"""The examples of README and docs run, and what the README names is there."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def examples():
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        yield from (pytest.param(block, id=f"{page.name}-{number}") for number, block in enumerate(blocks, start=1))


def test_the_pages_that_promise_examples_have_them():
    ids = [example.id for example in examples()]
    assert "README.md-2" in ids and "norms.md-12" in ids


@pytest.mark.filterwarnings("ignore")  # of the exporter, about itself
@pytest.mark.parametrize("example", examples())
def test_the_examples_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write a file
    exec(compile(example, "example", "exec"), {})


def test_files_that_are_named_exist():
    names = set(re.findall(r"\]\(([\w/.-]+)\)", README)) | set(re.findall(r"configs/[\w/]+\.yaml", README))
    assert len(names) >= 4
    missing = [name for name in names if not (REPOSITORY / name).exists()]
    assert not missing
