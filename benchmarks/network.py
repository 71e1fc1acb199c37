"""What the norms cost in a whole network: one training step, and inference with the layers fused away.

    python -m benchmarks.network
    python -m benchmarks.network --network resnet50 --dtype bfloat16 --graph       on a GPU

``resnet20`` takes CIFAR's images, ``resnet50`` (torchvision's, every BatchNorm converted) ImageNet's. A step is
forward, loss, backward and an update by SGD, under autocast for 16-bit types. ``none`` has no normalisation at all:
``fused`` against it says what is left of the layers at inference.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import resnet50

from benchmarks.layer import LITERAL
from benchmarks.timing import Pass, captured, medians, parser, write
from swbn_lightning import NormFactory, convert_norms, fuse_norms
from swbn_lightning.backbones import build_backbone

NORMS = ("bn", "swbn-kl", "swbn-fro", "iternorm", "literal-iternorm", "none")
SIDE = {"resnet20": 32, "resnet50": 224}


def main() -> None:
    """Measure, print, write."""
    options = _options()
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    side = SIDE[options.network]
    images = torch.randn(options.batch, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (options.batch,), device=device)
    passes: dict[tuple[str, str], Pass] = {}
    for norm in options.norms:
        passes[norm, "train"] = _training(network(options.network, norm).to(device), images, labels, options)
    for norm in ("bn", "swbn-fro"):
        fused = fuse_norms(network(options.network, norm).to(device))
        print(f"{norm}: {fused.fusion_report}")
        passes[f"fused {norm}", "eval"] = _inference(fused, images, options)
    for norm in ("none", "bn", "swbn-fro"):
        passes[norm, "eval"] = _inference(network(options.network, norm).to(device).eval(), images, options)
    if options.graph:
        passes = {key: captured(run) for key, run in passes.items()}
    times = medians(passes, options.rounds, device)
    rows: list[dict[str, Any]] = []
    print(f"| {options.network}, batch {options.batch} | ms | times BatchNorm | times none |")
    print("| --- | ---: | ---: | ---: |")
    for (norm, mode), seconds in times.items():
        base, none = times.get(("bn", mode)), times.get(("none", mode))
        rows.append({"norm": norm, "mode": mode, "ms": 1000 * seconds})
        ratios = " | ".join(f"{seconds / other:.3f}" if other else "" for other in (base, none))
        print(f"| {norm}, {mode} | {1000 * seconds:.2f} | {ratios} |")
    write(options, rows, "torchvision")


def _options() -> argparse.Namespace:
    made = parser(__doc__, "network", rounds=10)
    made.add_argument("--network", default="resnet20", choices=list(SIDE))
    made.add_argument("--norms", nargs="+", default=NORMS)
    made.add_argument("--batch", type=int, default=128)
    made.add_argument("--graph", action="store_true", help="replay CUDA graphs of whole steps")
    options = made.parse_args()
    if options.graph and not options.device.startswith("cuda"):
        made.error(f"--graph needs a GPU, the device is {options.device}")
    return options


def network(name: str, norm: str) -> nn.Module:
    """A network with ten outputs and the norm everywhere, channels last."""
    if norm in LITERAL and norm not in NormFactory.names():
        NormFactory.register(norm, {2: LITERAL[norm]})
    if name == "resnet20":
        backbone = build_backbone("resnet20", norm)
        features = backbone(torch.zeros(2, 3, 32, 32)).shape[1]
        model: nn.Module = nn.Sequential(backbone, nn.Linear(features, 10))
    else:
        model = resnet50(num_classes=10)
        if norm != "bn":
            convert_norms(model, NormFactory(norm))
    return model.to(memory_format=torch.channels_last)


def _training(model: nn.Module, images: Tensor, labels: Tensor, options: argparse.Namespace) -> Pass:
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
