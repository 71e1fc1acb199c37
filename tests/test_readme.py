"""The README's example runs, and what it names is there."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_files_that_are_named_exist():
    names = set(re.findall(r"\]\(([\w/.-]+)\)", README)) | set(re.findall(r"configs/[\w/]+\.yaml", README))
    assert len(names) >= 4
    missing = [name for name in names if not (REPOSITORY / name).exists()]
    assert not missing
