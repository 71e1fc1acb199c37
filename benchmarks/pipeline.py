"""The input pipeline of CIFAR (crop with padding 4, flip, normalise): images a second, ours and torchvision's.

    python -m benchmarks.pipeline
    python -m benchmarks.pipeline --workers 4 --batch 512 --images 50000

``ours`` is what training runs: the data module's loader in the process that trains, and its augmentation of whole
batches on ``--device``, by ``--threads`` threads of the processor. ``gather`` is its loader alone. ``torchvision v1``
and ``v2`` are the usual per-image transforms of PIL images in a DataLoader with ``--workers`` processes, a thread each,
which live on from pass to pass. Each pass is an epoch of random images of CIFAR's size, on which the time does not
depend; the passes take turns, and the figures are medians over the rounds. Prints a Markdown table and writes the same
as JSON.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as v1
from torchvision.transforms import v2

from benchmarks.timing import Pass, medians, parser, write
from classification.datamodules import ClassificationDataModule
from swbn_lightning.data import ImageSet
from swbn_lightning.data.cifar import CIFAR10_MEAN, CIFAR10_STD

PADDING = 4


def main() -> None:
    """Measure, print, write."""
    options = _options()
    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(options.seed)
    pixels = rng.integers(0, 256, (options.images, 3, 32, 32), np.uint8)
    device = torch.device(options.device)
    passes = {
        "ours": ours(pixels, options.batch, device),
        "gather": gather(pixels, options.batch, device),
        "torchvision v1": torchvision(pixels, options.batch, options.workers, device, TRANSFORMS["v1"]),
        "torchvision v2": torchvision(pixels, options.batch, options.workers, device, TRANSFORMS["v2"]),
    }
    count = options.images // options.batch * options.batch
    seconds = medians(passes, options.rounds, device)
    slower = seconds["torchvision v1"], seconds["torchvision v2"]
    rows = [
        {
            "pipeline": name,
            "images_per_second": count / time,
            "times_v1": slower[0] / time,
            "times_v2": slower[1] / time,
        }
        for name, time in seconds.items()
    ]
    print(table(rows))
    write(options, rows, "torchvision")


def _options() -> argparse.Namespace:
    made = parser(__doc__, "pipeline", rounds=5, dtype=False)
    made.add_argument("--images", type=int, default=10_000, help="of an epoch")
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--workers", type=int, default=2, help="processes of torchvision's DataLoader")
    made.add_argument("--threads", type=int, default=1, help="of ours")
    options = made.parse_args()
    if options.images < options.batch:
        made.error(f"--images {options.images} are not one --batch {options.batch}")
    return options


class Arrays(ClassificationDataModule):
    """Images in memory, as a data module of this package."""

    num_classes = 10

    def __init__(self, pixels: np.ndarray, batch: int) -> None:
        super().__init__(mean=CIFAR10_MEAN, std=CIFAR10_STD, batch_size=batch, crop_padding=PADDING, flip=True)
        self.pixels = pixels

    def load(self, split: str) -> ImageSet:
        labels = torch.arange(len(self.pixels)) % 10
        return ImageSet(torch.from_numpy(self.pixels), labels, tuple("0123456789"), split)


def ours(pixels: np.ndarray, batch: int, device: torch.device) -> Pass:
    """An epoch of batches as the model gets them."""
    data, epochs = _loaded(pixels, batch, device)

    def run() -> None:
        for raw in epochs():
            moved = type(raw)(*(None if t is None else t.to(device, non_blocking=True) for t in raw))
            data.on_after_batch_transfer(moved, 0)

    return run


def gather(pixels: np.ndarray, batch: int, device: torch.device) -> Pass:
    """An epoch of batches as they leave the loader, uint8."""
    _, epochs = _loaded(pixels, batch, device)

    def run() -> None:
        for _ in epochs():
            pass

    return run


def _loaded(pixels: np.ndarray, batch: int, device: torch.device) -> tuple[Arrays, Callable[[], Any]]:
    data = Arrays(pixels, batch)
    loader: DataLoader[Any] = data.train_dataloader()
    loader.pin_memory = device.type == "cuda"
    number = 0

    def epochs() -> Any:
        nonlocal number
        number += 1  # so that every pass draws anew, as every epoch does
        loader.sampler.set_epoch(number)  # type: ignore[attr-defined]
        return loader

    return data, epochs


class PerImage(Dataset[tuple[torch.Tensor, int]]):
    """As torchvision's CIFAR10: an array, an image of PIL at a time."""

    def __init__(self, pixels: np.ndarray, transform: Callable[[Image.Image], torch.Tensor]) -> None:
        self.pixels, self.transform = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), transform

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[number])), number % 10


TRANSFORMS: dict[str, Callable[[Image.Image], torch.Tensor]] = {
    "v1": v1.Compose(
        [
            v1.RandomCrop(32, padding=PADDING),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
            v1.Normalize(CIFAR10_MEAN, CIFAR10_STD),
        ]
    ),
    "v2": v2.Compose(
        [
            v2.RandomCrop(32, padding=PADDING),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(CIFAR10_MEAN, CIFAR10_STD),
        ]
    ),
}


def torchvision(
    pixels: np.ndarray,
    batch: int,
    workers: int,
    device: torch.device,
    transform: Callable[[Image.Image], torch.Tensor],
) -> Pass:
    """An epoch of batches on the device, through per-image transforms in worker processes."""
    loader = DataLoader(
        PerImage(pixels, transform),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
    )

    def run() -> None:
        for images, labels in loader:
            images.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    return run


def table(rows: list[dict[str, Any]]) -> str:
    """A line a pipeline."""
    lines = ["| pipeline | images a second | times v1 | times v2 |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        times = f"{row['times_v1']:.1f} | {row['times_v2']:.1f}"
        lines.append(f"| {row['pipeline']} | {row['images_per_second']:,.0f} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
