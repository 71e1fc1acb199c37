"""Run folders made by hand, so that every number on a page is known."""

import csv
import itertools
import json
from datetime import UTC, datetime, timedelta

import numpy as np
import torch
import yaml

from swbn_lightning.whiteness import CorrelationMap
from swbn_lightning.whiteness.measures import MEASURES
from swbn_lightning.whiteness.records import append_whiteness, write_heatmap

ENVIRONMENT = {
    "command": "swbn fit --config a.yaml",
    "stage": "fit",
    "seed": 0,
    "device": "CPU, 7 cores",
    "torch": "9.8.7",
}
_MADE = itertools.count()  # what is made later started later
LAYERS = ("backbone.a.norm", "backbone.b.norm")


def config(norm="bn", seed=0, name="name", **more):
    settings = {"backbone": "resnet20", "norm": norm, "norm_args": None if norm == "bn" else {"step_size": 0.005}}
    return {
        "seed_everything": seed,
        "trainer": {"max_epochs": 3},
        "model": {"class_path": "fewshot.PrototypicalNetwork", "init_args": settings},
        "data": {"init_args": {"test": {"shots": 1}}},
        "run": {"root": "runs", "name": name},
        **more,
    }


def started():
    return {"started": (datetime(2025, 1, 1, tzinfo=UTC) + timedelta(minutes=next(_MADE))).isoformat()}


def make_fit(folder, norm="bn", seed=0, epochs=3, first=0, finished=True, settings=None, rms=0.3):
    """A training; of epoch ``e`` the validation accuracy is ``0.5 + 0.1 * e + 0.01 * seed``."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**config(norm, seed, folder.parent.name), **(settings or {})}))
    (folder / "environment.json").write_text(json.dumps({**ENVIRONMENT, **started(), "seed": seed}))
    columns = ["epoch", "step", "lr", "train/loss", "train/accuracy", "val/loss", "val/accuracy"]
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for epoch in range(first, first + epochs):
            at = {"epoch": epoch, "step": 10 * epoch + 9}
            writer.writerow({**at, "val/loss": 2 - 0.25 * epoch, "val/accuracy": 0.5 + 0.1 * epoch + 0.01 * seed})
            writer.writerow({**at, "train/loss": 3 - 0.5 * epoch, "train/accuracy": 0.25 + 0.125 * epoch, "lr": 0.1})
    append_whiteness(folder / "whiteness.csv", white(range(first - 1, first + epochs), rms))
    write_heatmap(folder / f"heatmap_{LAYERS[1]}.csv", {"before": a_map(-1), "after": a_map(first + epochs - 1, 1)})
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "best.ckpt").write_bytes(b"")
    if finished:
        best = {"split": f"val (best, epoch {first + epochs - 1})", "epoch": first + epochs - 1, "episodes": 600}
        best |= {"accuracy": 0.5 + 0.1 * (first + epochs - 1) + 0.01 * seed, "ci95": 0.0123, "loss": 1.5}
        told = {"command": "fit", "results": [best], "completed": True, "fit_seconds": 77.0, "epoch_seconds": [5.0]}
        (folder / "results.json").write_text(json.dumps({**told, "best_checkpoint": "checkpoints/best.ckpt"}))
    return folder


def make_test(folder, training, accuracy=0.625, shots=1, norm="bn", seed=0, **more):
    """A test of that training's best checkpoint."""
    folder.mkdir(parents=True)
    checkpoint = str(training / "checkpoints" / "best.ckpt")
    (folder / "config.yaml").write_text(yaml.safe_dump(config(norm, seed, folder.parent.name, ckpt_path=checkpoint)))
    (folder / "environment.json").write_text(json.dumps({**ENVIRONMENT, **started(), "stage": "test"}))
    row = {"split": "test", "ways": 5, "shots": shots, "queries": 15, "episodes": 10_000, "classes": 20, "seed": 0}
    row |= {"accuracy": accuracy, "ci95": 0.0023, "loss": 0.875, **more}
    told = {"command": "test", "results": [row], "best_checkpoint": None, "tested_checkpoint": checkpoint}
    (folder / "results.json").write_text(json.dumps(told))
    return folder


def white(epochs, rms=0.3):
    """Rows of ``whiteness.csv``: the layers have rms / (epoch + 2), and the second 0.05 more."""
    rows = []
    for epoch in epochs:
        values = [rms / (epoch + 2), rms / (epoch + 2) + 0.05]
        for layer, value in zip(LAYERS, values, strict=True):
            rows.append({"epoch": epoch, "step": 10 * (epoch + 1), "layer": layer, **dict.fromkeys(MEASURES, value)})
        mean = dict.fromkeys(MEASURES, float(np.mean(values)))
        rows.append({"epoch": epoch, "step": 10 * (epoch + 1), "layer": "mean", **mean, "seconds": 1.5})
    return rows


def a_map(epoch, seed=0):
    x = np.random.default_rng(seed).normal(size=(30, 4))
    return CorrelationMap(list(range(4)), torch.from_numpy(np.corrcoef(x.T)), epoch, 8, 0.125 + seed / 8)
