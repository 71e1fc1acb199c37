"""What the norms cost in a whole network: one training step, and inference with the layers fused away.

    python -m benchmarks.network
    python -m benchmarks.network --network resnet50 --dtype bfloat16 --graph       on a GPU

``resnet20`` takes CIFAR's images, ``resnet50`` (torchvision's, every BatchNorm converted) ImageNet's. A step is
forward, loss, backward and an update by SGD, under autocast for 16-bit types. ``none`` has no normalisation at all:
``fused`` against it says what is left of the layers at inference. On a GPU ``swbn-fro:kernels`` trains by the layers'
Triton kernels.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet50

from benchmarks.timing import Pass, by_kernels, captured, check_gpu, markdown, medians, parser, split_kernels, write
from swbn_lightning import NormFactory, convert_norms, fuse_norms
from swbn_lightning.backbones import build_backbone

NORMS = ("bn", "swbn-kl", "swbn-fro", "iternorm", "none")
SIDE = {"resnet20": 32, "resnet50": 224}


def main() -> None:
    """Measure, print, write."""
    options = parse()
    rows = measure(options)
    print(table(rows, options))
    write(options, rows, "torchvision")


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a norm and mode."""
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    side = SIDE[options.network]
    images = torch.randn(options.batch, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (options.batch,), device=device)
    passes: dict[tuple[str, str], Pass] = {}
    for norm in options.norms:
        name, kernels = split_kernels(norm)
        run = training(network(options.network, name).to(device), images, labels, options)
        passes[norm, "train"] = by_kernels(run, kernels)
    for norm in ("bn", "swbn-fro") if not options.train else ():
        fused = fuse_norms(network(options.network, norm).to(device))
        print(f"{norm}: {fused.fusion_report}")
        passes[f"fused {norm}", "eval"] = _inference(fused, images, options)
    for norm in ("none", "bn", "swbn-fro") if not options.train else ():
        passes[norm, "eval"] = _inference(network(options.network, norm).to(device).eval(), images, options)
    if options.graph:
        passes = {key: captured(run) for key, run in passes.items()}
    times = medians(passes, options.rounds, device)
    return [{"norm": norm, "mode": mode, "ms": 1000 * seconds} for (norm, mode), seconds in times.items()]


def table(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """A line a norm and mode; milliseconds, times BatchNorm's, times those without normalisation."""
    times = {(row["norm"], row["mode"]): row["ms"] for row in rows}
    lines = []
    for (norm, mode), time in times.items():
        others = times.get(("bn", mode)), times.get(("none", mode))
        ratios = [f"{time / other:.3f}" if other else "" for other in others]
        lines.append([f"{norm}, {mode}", f"{time:.2f}", *ratios])
    return markdown([f"{options.network}, batch {options.batch}", "ms", "times BatchNorm", "times none"], lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options, or those of ``arguments``."""
    made = parser(__doc__, "network", rounds=10)
    made.add_argument("--network", default="resnet20", choices=list(SIDE))
    made.add_argument("--norms", nargs="+", default=NORMS)
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--graph", action="store_true", help="replay CUDA graphs of whole steps")
    made.add_argument("--train", action="store_true", help="only training steps, no inference")
    options = made.parse_args(arguments)
    check_gpu(made, options)
    return options


def network(name: str, norm: str) -> nn.Module:
    """A network with ten outputs and the norm everywhere, channels last."""
    if name == "resnet20":
        backbone = build_backbone("resnet20", norm)
        features = backbone(torch.zeros(2, 3, 32, 32)).shape[1]
        model: nn.Module = nn.Sequential(backbone, nn.Linear(features, 10))
    else:
        model = resnet50(num_classes=10)
        if norm != "bn":
            convert_norms(model, NormFactory(norm))
    return model.to(memory_format=torch.channels_last)


def training(model: nn.Module, images: Tensor, labels: Tensor, options: argparse.Namespace) -> Pass:
    """A training step on these images, once for each call."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        with _autocast(options):
            loss = nn.functional.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()

    return step


def _inference(model: nn.Module, images: Tensor, options: argparse.Namespace) -> Pass:
    def step() -> None:
        with torch.no_grad(), _autocast(options):
            model(images)

    return step


def _autocast(options: argparse.Namespace) -> torch.autocast:
    dtype = getattr(torch, options.dtype)
    kind = torch.device(options.device).type
    return torch.autocast(kind, dtype if dtype != torch.float32 else None, enabled=dtype != torch.float32)


if __name__ == "__main__":
    main()
