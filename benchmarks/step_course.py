"""The course of W's step over a run, and where W starts: short trainings that differ in nothing else, over seeds.

    python -m benchmarks.step_course --root DIR
    python -m benchmarks.step_course --root DIR --data CIFAR100 --backbone resnet20 --epochs 14 --device cuda

Each norm gets ``step_size: auto``; its budget, so that all of a norm's arms have the same sum of steps, is that of the
rule times ``--budgets``. Arms: ``constant``; the courses of ``swbn_lightning.step_course`` (linear, cosine, early); and
``whitened``: constant, with W started from the whitening of training images. Of every seed all arms have the same
network, the same batches and the same test images. Reported: accuracy on the test images after the last epoch, its
difference to the constant of the same norm paired by seed with Student's 95% interval, and the mean RMS correlation
between channels. Prints a Markdown table and writes the same, every run a row, as JSON.
"""

import argparse
import functools
import itertools
import logging
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.timing import parser, write
from classification import CIFAR10DataModule, CIFAR100DataModule, ImageClassifier, MNISTDataModule
from classification.datamodules import ClassificationDataModule
from swbn_lightning import WhitenessMonitor
from swbn_lightning.errors import InputError
from swbn_lightning.runs.intervals import Interval, corrected, mean_interval, paired_difference
from swbn_lightning.step_course import COURSES, StepSizeCourse, WhitenedStart
from swbn_lightning.training.step_size import BUDGETS, LARGEST

DATA: dict[str, Callable[..., ClassificationDataModule]] = {
    "CIFAR10": functools.partial(CIFAR10DataModule, crop_padding=4, flip=True),
    "CIFAR100": functools.partial(CIFAR100DataModule, crop_padding=4, flip=True),
    "MNIST": MNISTDataModule,
}
CONSTANT, WHITENED = "constant", "whitened"
ARMS = (CONSTANT, *COURSES, WHITENED)


def main() -> None:
    """Train, print, write."""
    options = _options()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    arms = [("bn", 1.0, CONSTANT), *itertools.product(options.norms, options.budgets, options.arms)]
    rows = []
    for seed, (norm, budget, arm) in itertools.product(range(options.seed, options.seed + options.seeds), arms):
        row = {"norm": norm, "budget": budget, "arm": arm, "seed": seed, **run(norm, budget, arm, seed, options)}
        rows.append(row)
        print(f"seed {seed} {norm} x{budget:g} {arm}: {row.get('skipped') or row['accuracy']}", flush=True)
    print(f"\n{table(rows)}")
    write(options, rows, "pytorch-lightning")


def run(norm: str, budget: float, arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One training and its test; ``skipped`` where W's steps would leave what stays finite."""
    pl.seed_everything(seed, verbose=False)
    data = DATA[options.data](root=options.root, val_share=0, batch_size=options.batch, seed=seed)
    steps = (
        options.epochs * options.steps
        if options.steps
        else options.epochs * (len(data.image_set("train")) // options.batch)
    )
    callbacks: list[pl.Callback] = []
    norm_args, step_budget = None, None
    if norm != "bn":
        norm_args = {"step_size": "auto"}
        step_budget = budget * BUDGETS[norm.removeprefix("swbn-")]
        if step_budget / steps * (COURSES[arm](0) if arm in COURSES else 1) > LARGEST:
            return {"skipped": f"its first step size would exceed {LARGEST:g}"}
        callbacks += [StepSizeCourse(arm)] if arm in COURSES else []
        callbacks += [WhitenedStart()] if arm == WHITENED else []
    model = ImageClassifier(
        num_classes=data.num_classes, backbone=options.backbone, backbone_args=_backbone_args(options, data), norm=norm,
        norm_args=norm_args, step_budget=step_budget, warmup_steps=steps // 20, lr_interval="step",
        optimizer=lambda p: torch.optim.SGD(p, lr=options.lr, momentum=0.9, weight_decay=5e-4),
        lr_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, steps), cuda_graph=False,
    )  # fmt: skip
    monitor = WhitenessMonitor(every_n_epochs=options.epochs, pictures=False)
    trainer = pl.Trainer(
        max_epochs=options.epochs, limit_train_batches=options.steps or 1.0, callbacks=[*callbacks, monitor],
        accelerator=torch.device(options.device).type, devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, verbose=False)
    return {
        "accuracy": model.results["test"]["accuracy"],
        "loss": model.results["test"]["loss"],
        "rms": monitor.history[-1]["rms"],
        "steps": steps,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line an arm, means over the seeds."""
    lines = [
        "| norm | budget | arm | accuracy, % ± std | to constant, 95% | RMS correlation |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    compared = 0
    for key in dict.fromkeys((row["norm"], row["budget"], row["arm"]) for row in rows):
        own = _by_seed(rows, *key)
        norm, budget, arm = key
        name = f"| `{norm}` | {'' if norm == 'bn' else f'{budget:g}×'} | {arm} |"
        if not own:
            lines.append(f"{name} not run: {next(r['skipped'] for r in rows if 'skipped' in r)} | | |")
            continue
        accuracy = mean_interval([100 * row["accuracy"] for row in own.values()])
        base = _by_seed(rows, norm, budget, CONSTANT)
        difference = "" if arm == CONSTANT or base.keys() != own.keys() else _paired(own, base)
        compared += "±" in difference
        std = "" if accuracy.std is None else f" ± {accuracy.std:.2f}"
        rms = statistics.fmean(row["rms"] for row in own.values())
        lines.append(f"{name} {accuracy.mean:.2f}{std} | {difference} | {rms:.3f} |")
    note = f"{compared} comparisons, each at 95%; Bonferroni's are each at {100 * corrected(compared or 1):.2f} %."
    return "\n".join([*lines, *(["", note] if compared > 1 else [])])


def _by_seed(rows: list[dict[str, Any]], norm: str, budget: float, arm: str) -> dict[int, dict[str, Any]]:
    key = (norm, budget, arm)
    return {r["seed"]: r for r in rows if (r["norm"], r["budget"], r["arm"]) == key and "skipped" not in r}


def _paired(own: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> str:
    found: Interval = paired_difference(*([100 * side[seed]["accuracy"] for seed in own] for side in (own, base)))
    return f"{found.mean:+.2f}" + ("" if found.half_width is None else f" ± {found.half_width:.2f}")


def _backbone_args(options: argparse.Namespace, data: ClassificationDataModule) -> dict[str, Any]:
    found: dict[str, Any] = {"in_channels": data.channels}
    if options.backbone == "mlp":
        found |= {"hidden": [options.hidden] * 3, "image_size": data.image_size}
    return found


def _options() -> argparse.Namespace:
    made = parser(__doc__, "step_course", rounds=1, dtype=False)
    made.add_argument("--root", required=True, help="folder of the data set's files")
    made.add_argument("--data", choices=sorted(DATA), default="CIFAR10")
    made.add_argument("--backbone", default="mlp")
    made.add_argument("--hidden", type=int, default=64, help="width of the mlp's three layers")
    made.add_argument("--epochs", type=int, default=4)
    made.add_argument("--steps", type=int, default=0, help="training batches an epoch; 0 for all")
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--lr", type=float, default=0.05)
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--norms", nargs="+", default=["swbn-kl", "swbn-fro"], choices=["swbn-kl", "swbn-fro"])
    made.add_argument("--budgets", nargs="+", type=float, default=[1.0], help="times the rule's own")
    made.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    options = made.parse_args()
    if min(options.epochs, options.seeds, options.batch, *options.budgets) <= 0 or options.steps < 0:
        made.error("epochs, seeds, batch and budgets must be positive.")
    return options


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(f"step_course: error: {error}") from None
