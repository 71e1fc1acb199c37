"""The programs on whiteness run, and write what they print and draw."""

import csv
import json
import sys

import numpy as np
import pytest
from PIL import Image

from benchmarks import whiteness_heatmaps
from swbn_lightning.whiteness import read_heatmap, read_whiteness


@pytest.mark.slow
def test_pairs_of_heatmaps(monkeypatch, tmp_path, capsys):
    options = ["--data", "classification.GlyphDataModule", "--backbone=resnet20", "--epochs=1", "--images=16"]
    options += ["--norms", "bn", "swbn-fro", "--step-size=0.01", "--signed"]
    options += ["--model.num_classes=3", "--model.backbone_args={in_channels: 1}", "--trainer.accelerator=cpu"]
    options += ["--data.num_classes=3", "--data.images_per_class=16", "--data.batch_size=16"]
    options += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    monkeypatch.setattr(
        sys, "argv", ["heatmaps", *options, "--runs", f"{tmp_path}/runs", "--output", f"{tmp_path}/out"]
    )
    whiteness_heatmaps.main()
    names = [f"{norm}, {stage}" for norm in ("BN", "SWBN-Fro") for stage in ("before", "after")]
    maps = read_heatmap(tmp_path / "out" / "heatmaps.csv")
    assert list(maps) == names and all(found.correlation.shape == (64, 64) for found in maps.values())
    before = [maps[f"{norm}, before"].correlation for norm in ("BN", "SWBN-Fro")]
    np.testing.assert_allclose(*before, atol=1e-2)  # the same weights, another eps
    rows = json.loads((tmp_path / "out" / "heatmaps.json").read_text())["rows"]
    assert [(row["norm"], row["epoch"]) for row in rows] == [(n, e) for n in ("bn", "swbn-fro") for e in (-1, 0)]
    assert [row["rms"] for row in rows] == [maps[name].rms for name in names]
    last = read_whiteness(tmp_path / "runs" / "whiteness_heatmaps" / "bn" / "version_0" / "whiteness.csv")[-2]
    assert rows[1]["rms"] == last["rms"] and last["layer"] == "backbone.blocks.8.norm2"
    assert Image.open(tmp_path / "out" / "heatmaps.png").size[0] >= 800
    with (tmp_path / "out" / "whiteness.csv").open() as file:
        compared = [(row["norm"], row["layer"], row["rms"]) for row in csv.DictReader(file) if row["epoch"] == "0"]
    for norm, title in (("bn", "BN"), ("swbn-fro", "SWBN-Fro")):
        own = read_whiteness(tmp_path / "runs" / "whiteness_heatmaps" / norm / "version_0" / "whiteness.csv")
        assert [(title, row["layer"], str(row["rms"])) for row in own if row["epoch"] == 0] == [
            row for row in compared if row[0] == title
        ]
    assert Image.open(tmp_path / "out" / "whiteness.png").size[0] >= 800
    assert "| swbn-fro | 1 |" in capsys.readouterr().out


def test_without_options_it_is_the_papers_experiment(monkeypatch, tmp_path):
    given = []

    def stop(arguments):
        given.extend(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(whiteness_heatmaps, "swbn", stop)
    monkeypatch.setattr(sys, "argv", ["heatmaps", "--root=DIR", "--norms=swbn-kl", "--output", str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        whiteness_heatmaps.main()
    # Section 4.1.3 with 4.1: 1e-5, all training images, 150 epochs, 5,000 images measured.
    settings = ["model.backbone=vgg", 'model.norm_args={"step_size": 1e-05}', "data.val_share=0"]
    settings += ["trainer.max_epochs=150", "whiteness.num_images=5000", "model.lr_scheduler.step_size=30"]
    assert {f"--{setting}" for setting in settings} <= set(given)
