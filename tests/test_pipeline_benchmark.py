"""The benchmark of the input pipeline runs, and what it compares is the same work."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import pipeline


def test_pipeline(monkeypatch, tmp_path, capsys):
    output = tmp_path / "figures.json"
    few = ["--images=300", "--batch=64", "--rounds=1", "--workers=1", "--device=cpu", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["pipeline", *few])
    threads = torch.get_num_threads()
    try:
        pipeline.main()
    finally:
        torch.set_num_threads(threads)
    rows = {row["pipeline"]: row for row in json.loads(output.read_text())["rows"]}
    assert set(rows) == {"ours", "gather", "torchvision v1", "torchvision v2"}
    assert rows["torchvision v1"]["times_v1"] == rows["torchvision v2"]["times_v2"] == 1
    assert rows["ours"]["images_per_second"] > rows["torchvision v1"]["images_per_second"]
    assert "| torchvision v2 |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["pipeline", "--images=10", "--batch=64"])
    with pytest.raises(SystemExit):
        pipeline.main()


def test_the_pipelines_make_the_same_images():
    """All crops of a constant image are zeros outside and one colour inside; a border of at most four is outside."""
    pixels = np.full((64, 3, 32, 32), 100, np.uint8)
    data = pipeline.Arrays(pixels, 64)
    found = {"ours": data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0).images}
    image = Image.fromarray(pixels[0].transpose(1, 2, 0))
    found |= {name: torch.stack([make(image) for _ in range(64)]) for name, make in pipeline.TRANSFORMS.items()}
    for images in found.values():
        assert images.shape == (64, 3, 32, 32) and images.dtype == torch.float32
        inner, black = (data.normalize(torch.full((3, 1, 1), value, dtype=torch.uint8)) for value in (100, 0))
        torch.testing.assert_close(images[:, :, 4:28, 4:28], inner.expand(64, 3, 24, 24), rtol=1e-5, atol=1e-5)
        inside = (images - inner).abs() < 1e-4
        assert (inside | ((images - black).abs() < 1e-4)).all()
        rows, columns = (inside[:, 0].any(dim).sum(1) for dim in (2, 1))
        assert rows.min() == columns.min() == 28 and rows.max() == columns.max() == 32
