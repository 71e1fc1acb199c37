"""The paper's experiment on the whitening effect (section 4.1.3): correlation heatmaps before and after training.

    python -m benchmarks.whiteness_heatmaps --root DIR
    python -m benchmarks.whiteness_heatmaps --root DIR --epochs 5 --trainer.accelerator=cpu
    python -m benchmarks.whiteness_heatmaps --data classification.GlyphDataModule --backbone resnet20 --epochs 2 \
        --model.num_classes=100 '--model.backbone_args={in_channels: 1}'

For each norm one training through ``swbn fit`` from the same weights: the paper's VGG on all 50,000 training images of
CIFAR-10, step size 1e-5, SGD of rate 0.1 and momentum 0.9, no weight decay, batches of 128, the rate halved after each
fifth of the epochs (30 of its 150). Whiteness is that of 5,000 random images (of the training set: the paper does not
say which; of the validation's where a share is held out, as by ``--data.val_share=0.1``), read at the last
normalisation layer before gamma and beta; the heatmaps show 128 of its channels, the same for each norm. Any other
option of ``swbn fit`` may follow. Writes one figure of all heatmaps, one of the whiteness of all layers, a CSV file
with every number in each, and a table as JSON.
"""

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, environment_line
from cli import main as swbn
from swbn_lightning.files.pictures import save
from swbn_lightning.files.writing import write_whole
from swbn_lightning.whiteness import CorrelationMap, read_heatmap, read_whiteness
from swbn_lightning.whiteness.plots import compare_whiteness, heatmap_pairs
from swbn_lightning.whiteness.records import COLUMNS, WHITENESS_FILE, write_heatmap

TITLES = {"bn": "BN", "swbn-kl": "SWBN-KL", "swbn-fro": "SWBN-Fro", "iternorm": "IterNorm", "dbn": "DBN"}


def main() -> None:
    """Train, draw, print, write."""
    options, others = _options()
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    columns: dict[str, dict[str, CorrelationMap]] = {}
    whiteness: dict[str, list[dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    for norm in options.norms:
        folder = _train(norm, options, others)
        (path,) = folder.glob("heatmap_*.csv")
        columns[TITLES.get(norm, norm)] = read_heatmap(path)
        whiteness[TITLES.get(norm, norm)] = read_whiteness(folder / WHITENESS_FILE)
        rows += _rows(norm, folder)
        # After each training, so that one which is killed leaves those before it.
        maps = {f"{name}, {stage}": found for name, own in columns.items() for stage, found in own.items()}
        write_heatmap(output / "heatmaps.csv", maps)
        content = {"command": sys.argv, "environment": environment("pytorch-lightning"), "rows": rows}
        (output / "heatmaps.json").write_text(json.dumps(content, indent=2) + "\n")
    save(heatmap_pairs(columns, options.signed), output / "heatmaps.png")
    draw_whiteness(whiteness, output)
    print(_table(rows))
    print(f"\n{environment_line('pytorch-lightning')}, seed {options.seed}\nwritten: "
          f"{output / 'heatmaps.png'}, {output / 'whiteness.png'}")  # fmt: skip


def draw_whiteness(runs: dict[str, list[dict[str, Any]]], output: Path) -> None:
    """``whiteness.png``, every layer after training, and the same figures as ``whiteness.csv``."""
    save(compare_whiteness(runs), output / "whiteness.png")
    text = io.StringIO()
    writer = csv.DictWriter(text, ("norm", *COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows({"norm": title, **row} for title, rows in runs.items() for row in rows)
    write_whole(output / "whiteness.csv", text.getvalue())


def _options() -> tuple[argparse.Namespace, list[str]]:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--data", default="classification.CIFAR10DataModule", help="class of the data module")
    made.add_argument("--root", help="folder of the data set's files")
    made.add_argument("--backbone", default="vgg")
    made.add_argument("--norms", nargs="+", default=["bn", "swbn-kl", "swbn-fro"])
    made.add_argument(
        "--step-size",
        type=_step_size,
        default=1e-5,
        help="of SWBN; 1e-5, as in the paper's 150 epochs. For shorter runs auto: chosen for their length",
    )
    made.add_argument("--epochs", type=int, default=150)
    made.add_argument("--images", type=int, default=5000, help="images that are measured")
    made.add_argument("--signed", action="store_true", help="signed correlations, not their absolute values")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--runs", default="runs", help="folder of the runs")
    made.add_argument("--output", default="runs/whiteness_heatmaps", help="folder of figure, CSV and JSON")
    return made.parse_known_args()


def _step_size(text: str) -> float | str:
    return text if text == "auto" else float(text)


def _train(norm: str, options: argparse.Namespace, others: list[str]) -> Path:
    """Run ``swbn fit``; returns the run's folder."""
    name = f"whiteness_heatmaps/{norm}"
    norm_args = {"step_size": options.step_size} if norm.startswith("swbn") else {}
    arguments = [
        f"--seed_everything={options.seed}", f"--run.root={options.runs}", f"--run.name={name}",
        f"--trainer.max_epochs={options.epochs}",
        "--model=classification.ImageClassifier", "--model.num_classes=10", f"--model.backbone={options.backbone}",
        f"--model.norm={norm}", f"--model.norm_args={json.dumps(norm_args)}",
        "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1", "--model.optimizer.momentum=0.9",
        "--model.lr_scheduler=torch.optim.lr_scheduler.StepLR", "--model.lr_scheduler.gamma=0.5",
        f"--model.lr_scheduler.step_size={max(1, options.epochs // 5)}",
        f"--data={options.data}", *([f"--data.root={options.root}"] if options.root else []),
        *(["--data.val_share=0"] if options.data.endswith(".CIFAR10DataModule") else []),  # all images, as in the paper
        f"--whiteness.num_images={options.images}", f"--whiteness.every_n_epochs={options.epochs}",
        f"--whiteness.signed={json.dumps(options.signed)}",
        *others,
    ]  # fmt: skip
    print(f"swbn fit {' '.join(arguments)}", file=sys.stderr, flush=True)
    swbn(["fit", *arguments])
    return max((Path(options.runs) / name).glob("version_*"), key=lambda path: int(path.name.removeprefix("version_")))


def _rows(norm: str, folder: Path) -> list[dict[str, Any]]:
    """The measures of the last layer, before and after training."""
    measured = [row for row in read_whiteness(folder / WHITENESS_FILE) if row["layer"] != "mean"]
    last = measured[-1]["layer"]
    (result,) = json.loads((folder / "results.json").read_text())["results"][-1:]
    own = {"norm": norm, "accuracy": result["accuracy"], "split": result["split"]}
    return [{**own, **row} for row in measured if row["layer"] == last]


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"| {rows[0]['layer']} of | epochs | distance | RMS correlation | effective rank "
        f"| accuracy ({rows[0]['split']}), % |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        accuracy = f"{100 * row['accuracy']:.2f}" if row["epoch"] >= 0 else ""
        lines.append(
            f"| {row['norm']} | {row['epoch'] + 1} | {row['distance']:.2f} | {row['rms']:.3f} "
            f"| {row['effective_rank']:.3f} | {accuracy} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
