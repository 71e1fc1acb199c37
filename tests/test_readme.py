"""The examples of README and docs run, what the README names is there, and `make quickstart` gives what it promises."""

import json
import re
import time
from pathlib import Path

import pytest
import yaml

import swbn_lightning
from cli import main

REPOSITORY = Path(__file__).parents[1]
QUICKSTART = REPOSITORY / "configs" / "quickstart.yaml"
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def examples():
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        yield from (pytest.param(block, id=f"{page.name}-{number}") for number, block in enumerate(blocks, start=1))


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


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == swbn_lightning.__version__
    start_page = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    assert re.findall(r"version *= \{(.*?)\}", start_page) == [swbn_lightning.__version__]
    names = [author["family-names"] for author in citation["preferred-citation"]["authors"]]
    assert all(name in README for name in names) and len(names) == 6


def train_and_test(*arguments):
    main(["fit", "--config", str(QUICKSTART), *arguments])
    main(["test", "--config", str(QUICKSTART), "--ckpt_path", "runs/quickstart", *arguments])
    newest = max(Path("runs/quickstart").glob("version_*"), key=lambda path: int(path.name[8:]))
    (row,) = json.loads((newest / "results.json").read_text())["results"]
    assert (row["split"], row["ways"], row["shots"]) == ("test", 5, 1)
    return row


@pytest.mark.slow
def test_quickstart_keeps_its_promises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.perf_counter()
    swbn = train_and_test()
    main(["report", "runs/quickstart"])
    page = Path("runs/quickstart/report.html").read_text(encoding="utf-8")
    assert f"{100 * swbn['accuracy']:.2f} ± {100 * swbn['ci95']:.2f}" in page and "data:image/png" in page
    print(f"quickstart: {(time.perf_counter() - start) / 60:.1f} minutes")  # told, not asserted: machines differ
    assert swbn["accuracy"] >= 0.95 and swbn["ci95"] <= 0.01
    batch_norm = train_and_test("--model.norm=bn")
    assert swbn["distance"][0] == pytest.approx(batch_norm["distance"][0], rel=1e-3)  # the same network at the start
    assert swbn["distance"][1] < 0.6 * batch_norm["distance"][1]
