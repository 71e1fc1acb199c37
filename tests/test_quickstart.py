"""What the README promises of `make quickstart`, in full: minutes, so in CI alone."""

import json
import time
from pathlib import Path

import pytest

from cli import main

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


@pytest.mark.slow
def test_quickstart_keeps_its_promise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.perf_counter()
    main(["fit", "--config", str(CONFIG)])
    main(["test", "--config", str(CONFIG), "--ckpt_path", "runs/quickstart"])
    minutes = (time.perf_counter() - start) / 60
    (tested,) = Path("runs/quickstart").glob("version_1/results.json")
    content = json.loads(tested.read_text())
    (row,) = content["results"]
    assert row["ways"] == 5 and row["shots"] == 1 and row["split"] == "test"
    assert row["accuracy"] >= 0.95 and row["ci95"] <= 0.01
    # BatchNorm's rises from 11.3 to 15.1 in the same run (README).
    assert content["whiteness"][-1]["distance"] < 0.75 * content["whiteness"][0]["distance"]
    print(f"quickstart: {minutes:.1f} minutes")  # told, not asserted: machines differ
