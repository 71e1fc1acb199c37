"""Run folders made by hand, so that every number on a page is known."""

import csv
import itertools
import json
from datetime import UTC, datetime, timedelta

import numpy as np
import torch

from classification.evaluation import ImageResult
from swbn_lightning.whiteness import CorrelationMap
from swbn_lightning.whiteness.measures import MEASURES
from swbn_lightning.whiteness.records import append_whiteness, write_heatmap

ENVIRONMENT = {"seed": 0, "device": "CPU, 7 cores", "torch": "9.8.7"}
LAYERS = ("backbone.a.norm", "backbone.b.norm")
DAY = "2026-01-0{}T00:00:00.{:06}+00:00"
_USUAL = object()
_MADE = itertools.count(1)  # what is made later started later


def settings_of(norm="bn", seed=0, name="name", **more):
    """Flat, as ``run.json`` has them."""
    found = {
        "seed_everything": seed, "run.root": "runs", "run.name": name, "trainer.max_epochs": 3,
        "model.class_path": "fewshot.PrototypicalNetwork", "model.init_args.backbone": "resnet20",
        "model.init_args.norm": norm, "data.init_args.test.shots": 1,
    }  # fmt: skip
    if norm == "bn":
        return {**found, "model.init_args.norm_args": None, **more}
    return {**found, "model.init_args.norm_args.step_size": 0.005, **more}


def change(file, **values):
    """Other values in a JSON file, or none of them (None)."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({key: v for key, v in {**content, **values}.items() if v is not None}))


def told(folder):
    return json.loads((folder / "run.json").read_text())


def identify(folder, kind="fit", settings=None, source=None, **more):
    """``run.json`` of a run, ``source`` the folder of the one that it went on from or tested."""
    number = next(_MADE)
    started = (datetime(2025, 1, 1, tzinfo=UTC) + timedelta(minutes=number)).isoformat(timespec="microseconds")
    content = {
        "id": f"{number:016x}", "kind": kind, "command": f"swbn {kind} --config a.yaml", "started": started,
        "from": None, "trained": None, "settings": settings or {}, "environment": ENVIRONMENT,
    }  # fmt: skip
    if source is not None:
        content["from"] = told(source)["id"]
        if kind != "fit":
            content["trained"] = {key: told(source)[key] for key in ("id", "started", "settings")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({**content, **more}))
    return folder


def make_fit(folder, norm="bn", seed=0, epochs=3, first=0, finished=True, settings=None, rms=0.3, source=None):
    """A training; of epoch ``e`` the validation accuracy is ``0.5 + 0.1 * e + 0.01 * seed``."""
    identify(folder, "fit", settings_of(norm, seed, folder.parent.name, **(settings or {})), source)
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
        best = {"split": f"val (best, epoch {first + epochs})", "epoch": first + epochs - 1, "episodes": 600}
        best |= {"accuracy": 0.5 + 0.1 * (first + epochs - 1) + 0.01 * seed, "ci95": 0.0123, "loss": 1.5}
        results = {"results": [best], "completed": True, "fit_seconds": 77.0, "epoch_seconds": [5.0]}
        change(folder / "results.json", **results, best_checkpoint="checkpoints/best.ckpt")
    return folder


def make_test(folder, training, accuracy=_USUAL, shots=1, episodes=None, **more):
    """A test of that training's best checkpoint; ``episodes`` are the accuracies of each."""
    identify(folder, "test", {**told(training)["settings"], "seed_everything": 0}, training)
    row = {"split": "test", "ways": 5, "shots": shots, "queries": 15, "episodes": 10_000, "classes": 20, "seed": 0}
    if accuracy is _USUAL:
        accuracy = 0.625 if episodes is None else float(np.mean(episodes))
    row |= {"accuracy": accuracy, "ci95": 0.0023, "loss": 0.875, "episodes_id": "same", **more}
    if episodes is not None:
        row["episodes"] = len(episodes)
        lines = ["episode,accuracy", *(f"{i},{value!r}" for i, value in enumerate(map(float, episodes))), ""]
        (folder / "episodes.csv").write_text("\n".join(lines))
    return results_of(folder, training, row)


def make_image_test(folder, training, labels, predicted, names=None, **more):
    """A test of a classifier, with the classes of its images and what it named them; and which classes it confused."""
    labels, predicted = torch.as_tensor(labels), torch.as_tensor(predicted)
    names = names or [f"class {number}" for number in range(int(max(labels.max(), predicted.max())) + 1)]
    accuracy = (labels == predicted).double().mean().item()
    row = {"split": "test", "classes": len(names), "images": len(labels), "images_id": "same", "accuracy": accuracy}
    identify(folder, "test", {**told(training)["settings"], "seed_everything": 0}, training)
    ones = torch.ones(len(labels))
    result = ImageResult(torch.arange(len(labels)), labels, predicted, ones.bool(), ones, ones, len(names))
    for name, text in result.files(names).items():
        (folder / name).write_text(text)
    return results_of(folder, training, {**row, "ci95": 0.0023, "loss": 0.875, "macro_f1": 0.5, **more})


def results_of(folder, training, row):
    results = {"results": [row], "best_checkpoint": None}
    (folder / "results.json").write_text(
        json.dumps({**results, "tested_checkpoint": str(training / "checkpoints" / "best.ckpt")})
    )
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
