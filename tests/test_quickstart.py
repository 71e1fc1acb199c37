"""What the README promises of `make quickstart`, in full: minutes, so in CI alone."""

import json
import time
from pathlib import Path

import pytest

from cli import main

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


def train_and_test(*arguments):
    main(["fit", "--config", str(CONFIG), *arguments])
    main(["test", "--config", str(CONFIG), "--ckpt_path", "runs/quickstart", *arguments])
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
