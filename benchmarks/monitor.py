"""What WhitenessMonitor costs: a measurement's share of an epoch, ResNet20 on images of CIFAR's size.

    python -m benchmarks.monitor
    python -m benchmarks.monitor --norms swbn-fro --num-images 5000

A training through Lightning of so few steps (``--rounds``) that it takes seconds; an epoch is reckoned as the median
step times the steps of 50,000 images (validation, which every epoch has too, is left out). ``measurement`` is what the
callback does after an epoch, ``pictures`` what it does once, when training ends. Prints a Markdown table and writes the
same as JSON.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.timing import WARM_UP, parser, write
from swbn_lightning import WhitenessMonitor
from swbn_lightning.backbones import build_backbone

CIFAR_IMAGES = 50_000
PRECISIONS: dict[str, Any] = {"float32": "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}


def main() -> None:
    """Measure, print, write."""
    options = _options()
    warnings.filterwarnings("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    rows = [_row(norm, options) for norm in options.norms]
    print(f"| {options.backbone}, batch {options.batch}, {options.num_images} images | step, ms | epoch, s "
          "| measurement, s | share of the epoch | pictures, s |")  # fmt: skip
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row['norm']} | {1000 * row['step_seconds']:.0f} | {row['epoch_seconds']:.0f} "
            f"| {row['measurement_seconds']:.2f} | {100 * row['share']:.1f} % | {row['picture_seconds']:.2f} |"
        )
    write(options, rows, "pytorch-lightning")


def _options() -> argparse.Namespace:
    made = parser(__doc__, "monitor", rounds=10)
    made.add_argument("--norms", nargs="+", default=["bn", "swbn-fro"])
    made.add_argument("--backbone", default="resnet20")
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--num-images", type=int, default=WhitenessMonitor().num_images)
    return made.parse_args()


def _row(norm: str, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    monitor = _Timed(num_images=options.num_images, images=torch.randn(options.num_images, 3, 32, 32))
    steps = _StepTimes()
    images = torch.randn(options.batch * (options.rounds + WARM_UP), 3, 32, 32)
    data = TensorDataset(images, torch.randint(10, (len(images),)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=1, accelerator=torch.device(options.device).type, devices=1,
            precision=PRECISIONS[options.dtype], callbacks=[monitor, steps], logger=CSVLogger(folder),
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(_Classifier(options.backbone, norm), DataLoader(data, batch_size=options.batch))
    # The one after the epoch: the first one also meets a cold machine.
    measurement = next(row["seconds"] for row in reversed(monitor.rows) if "seconds" in row)
    epoch = statistics.median(steps.seconds[WARM_UP:]) * (CIFAR_IMAGES // options.batch)
    return {
        "norm": norm,
        "step_seconds": statistics.median(steps.seconds[WARM_UP:]),
        "epoch_seconds": epoch,
        "measurement_seconds": measurement,
        "share": measurement / epoch,
        "picture_seconds": monitor.picture_seconds,
    }


class _Timed(WhitenessMonitor):
    picture_seconds = 0.0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        start = time.perf_counter()
        super().on_train_end(trainer, pl_module)
        self.picture_seconds = time.perf_counter() - start


class _StepTimes(pl.Callback):
    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        _synchronize()
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        _synchronize()
        self.seconds.append(time.perf_counter() - self._start)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _Classifier(pl.LightningModule):
    def __init__(self, backbone: str, norm: str) -> None:
        super().__init__()
        self.backbone = build_backbone(backbone, norm).to(memory_format=torch.channels_last)
        self.head = nn.Linear(self.backbone.num_features, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images.contiguous(memory_format=torch.channels_last)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


if __name__ == "__main__":
    main()
