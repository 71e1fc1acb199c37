"""What one normalisation layer costs: training (forward and backward) and evaluation, against BatchNorm.

    python -m benchmarks.layer
    python -m benchmarks.layer --norms bn swbn-fro swbn-fro:num_groups=4 --shapes 128x64x16x16 --rounds 50
    python -m benchmarks.layer --dtype bfloat16 --graph          on a GPU: the paper's single-layer table

The layers take turns, one pass each a round; the figures are medians over the rounds. ``bn+products`` is BatchNorm
and, by themselves, the four products over the samples that whitening cannot do without. ``fused`` is what
``fuse_norms`` leaves of a layer with nothing before it, a 1x1 convolution; behind a convolution it leaves nothing. On a
GPU ``swbn-fro:kernels`` is the layer by its Triton kernels. Prints a Markdown table and writes the same as JSON.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import Pass, by_kernels, captured, check_gpu, markdown, medians, parser, split_kernels, write
from swbn_lightning import NormFactory, fuse_norms
from swbn_lightning.runs.paper import find_paper_figure
from swbn_lightning.runs.study.cells import Variant

CPU_SHAPES = ("64x16x32x32", "64x64x16x16", "64x256x8x8", "64x512x6x6")
GPU_SHAPES = ("64x64x32x32", "64x256x32x32", "64x1024x32x32", "64x2048x32x32")
PAPER_SIZE = (64, 32, 32)  # section 4.1.4, as IterNorm's authors: 65,536 samples a channel
NORMS = ("bn", "bn+products", "swbn-kl", "swbn-fro", "iternorm", "dbn")
EVALUATED = ("bn", "swbn-fro", "iternorm", "dbn")


def main() -> None:
    """Measure, print, write."""
    options = parse()
    rows = measure(options)
    print(table(rows, options.shapes))
    write(options, rows)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a shape, norm and mode."""
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    layout = getattr(torch, options.layout)
    rows: list[dict[str, Any]] = []
    for text in options.shapes:
        torch.manual_seed(options.seed)
        shape = tuple(int(size) for size in text.split("x"))
        x = torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=layout)
        passes: dict[tuple[str, str], Pass] = {}
        for norm in options.norms:
            passes[norm, "train"] = training_pass(norm, x)
        for norm in (n for n in options.norms if n in EVALUATED):
            passes[norm, "eval"] = _evaluation(NormFactory(norm)(shape[1]).to(device, dtype), x)
        if "swbn-fro" in options.norms:
            passes["fused", "eval"] = _evaluation(fuse_norms(NormFactory("swbn-fro")(shape[1]).to(device, dtype)), x)
        if options.graph:
            passes = {key: captured(run) for key, run in passes.items() if key[0] != "dbn"}
        for (norm, mode), seconds in medians(passes, options.rounds, device).items():
            row = {"shape": text, "norm": norm, "mode": mode, "ms": 1000 * seconds}
            rows.append({**row, "paper_ratio": paper_ratio(norm, tuple(shape))})
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options, or those of ``arguments``."""
    made = parser(__doc__, "layer", rounds=30)
    made.add_argument("--norms", nargs="+", default=NORMS, help="names, with options as swbn-fro:num_groups=4")
    made.add_argument("--shapes", nargs="+", help="NxCxHxW; by default four of CIFAR's size, on a GPU the paper's")
    made.add_argument("--layout", default="channels_last", choices=["channels_last", "contiguous_format"])
    made.add_argument("--graph", action="store_true", help="replay CUDA graphs")
    options = made.parse_args(arguments)
    check_gpu(made, options)
    options.shapes = options.shapes or (GPU_SHAPES if options.device.startswith("cuda") else CPU_SHAPES)
    return options


def paper_ratio(norm: str, shape: tuple[int, ...]) -> float | None:
    """The paper's time of one layer over its BatchNorm's; None where it gives none, or had another shape."""
    batch, channels, *size = shape
    if (batch, *size) != PAPER_SIZE:
        return None
    times = (find_paper_figure(table="table_time", norm=name, setting=f"d={channels}") for name in (norm, "bn"))
    layer, base = (figure.value if figure else None for figure in times)
    return layer / base if layer and base else None


def training_pass(norm: str, x: Tensor) -> Pass:
    """Forward and backward of one layer in training, on an input and a gradient that stay the same."""
    if norm == "bn+products":
        return _batchnorm_and_products(x)
    norm, kernels = split_kernels(norm)
    variant = Variant.parse(norm)
    layer = NormFactory(variant.name, **(variant.options or {}))(x.shape[1]).to(x.device, x.dtype)
    return by_kernels(_training(layer, x), kernels)


def _training(layer: nn.Module, x: Tensor) -> Pass:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    upstream = torch.randn_like(x)
    layer.train()

    def step() -> None:
        x.grad = None
        layer.zero_grad()
        layer(x).backward(upstream)

    return step


def _batchnorm_and_products(x: Tensor) -> Pass:
    batchnorm = _training(nn.BatchNorm2d(x.shape[1], device=x.device, dtype=x.dtype), x)
    d = x.shape[1]
    rows = x.movedim(1, -1).reshape(-1, d)
    matrix = torch.randn(d, d, device=x.device, dtype=x.dtype)

    def step() -> None:
        batchnorm()
        for _ in range(2):
            torch.mm(rows.T, rows)
            torch.mm(rows, matrix)

    return step


def _evaluation(layer: nn.Module, x: Tensor) -> Pass:
    layer.eval()

    def step() -> None:
        with torch.no_grad():
            layer(x)

    return step


def table(rows: list[dict[str, Any]], shapes: list[str]) -> str:
    """A line a norm and mode; milliseconds, times BatchNorm's, and in brackets the paper's ratio."""
    found = {(row["norm"], row["mode"], row["shape"]): row for row in rows}
    lines = []
    for norm, mode in dict.fromkeys((row["norm"], row["mode"]) for row in rows):
        cells = []
        for shape in shapes:
            row, base = found.get((norm, mode, shape)), found.get(("bn", mode, shape))
            if row is None:
                cells.append("")
                continue
            cell = f"{row['ms']:.3f}"
            if base and norm != "bn":
                paper = f", paper {row['paper_ratio']:.1f}" if row["paper_ratio"] and mode == "train" else ""
                cell += f" ({row['ms'] / base['ms']:.2f}{paper})"
            cells.append(cell)
        lines.append([f"{norm}, {mode}", *cells])
    return markdown(["norm", *shapes], lines)


if __name__ == "__main__":
    main()
