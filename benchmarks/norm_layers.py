"""What one normalisation layer costs: training (forward and backward) and evaluation, against BatchNorm.

    python -m benchmarks.norm_layers
    python -m benchmarks.norm_layers --norms bn swbn --shapes 128x64x16x16 --dtype bfloat16 --rounds 50

The layers take turns, one pass each a round, so that what else the machine does falls on all of them; the figures are
medians over the rounds. ``fused`` is what ``fuse_norms`` leaves of a layer with nothing before it, a 1x1 convolution;
behind a convolution it leaves nothing at all. Prints a Markdown table and writes the same as JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.environment import environment, environment_line
from swbn_lightning import NormFactory, fuse_norms

SHAPES = ("64x16x32x32", "64x64x16x16", "64x256x8x8", "64x512x6x6")


def main() -> None:
    """Measure, print, write."""
    options = _options()
    dtype, device = getattr(torch, options.dtype), torch.device(options.device)
    rows: list[dict[str, Any]] = []
    for text in options.shapes:
        torch.manual_seed(options.seed)
        shape = tuple(int(size) for size in text.split("x"))
        x = torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
        layers = {norm: NormFactory(norm)(shape[1]).to(device, dtype) for norm in options.norms}
        passes: dict[tuple[str, str], Callable[[], object]] = {}
        for norm, layer in layers.items():
            passes[norm, "train"] = _training(layer, x)
        for norm in layers:
            passes[norm, "eval"] = _evaluation(NormFactory(norm)(shape[1]).to(device, dtype), x)
        if "swbn" in layers:
            passes["fused", "eval"] = _evaluation(fuse_norms(layers["swbn"]), x)
        for (norm, mode), seconds in _medians(passes, options.rounds, device).items():
            rows.append({"shape": text, "norm": norm, "mode": mode, "ms": 1000 * seconds})
    print(_table(rows, options.shapes))
    content = {"command": sys.argv, "environment": environment(), "rows": rows}
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\n{environment_line()}, {options.dtype}, channels_last, seed {options.seed}\nwritten: {output}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norms", nargs="+", default=["bn", "swbn", "iternorm", "dbn"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="NxCxHxW")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/norm_layers.json", help="JSON file")
    return parser.parse_args()


def _training(layer: nn.Module, x: Tensor) -> Callable[[], object]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    upstream = torch.randn_like(x)
    layer.train()

    def step() -> None:
        x.grad = None
        layer(x).backward(upstream)

    return step


def _evaluation(layer: nn.Module, x: Tensor) -> Callable[[], object]:
    layer.eval()

    def step() -> None:
        with torch.inference_mode():
            layer(x)

    return step


def _medians(
    passes: dict[tuple[str, str], Callable[[], object]], rounds: int, device: torch.device
) -> dict[tuple[str, str], float]:
    times: dict[tuple[str, str], list[float]] = {key: [] for key in passes}
    for number in range(rounds + 3):
        for key, step in passes.items():
            start = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number >= 3:  # the first ones warm up
                times[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in times.items()}


def _table(rows: list[dict[str, Any]], shapes: list[str]) -> str:
    """A line a norm and mode; milliseconds, and times BatchNorm's where that was measured."""
    found = {(row["norm"], row["mode"], row["shape"]): row["ms"] for row in rows}
    lines = [f"| norm | {' | '.join(shapes)} |", f"| --- |{' ---: |' * len(shapes)}"]
    for norm, mode in dict.fromkeys((row["norm"], row["mode"]) for row in rows):
        cells = []
        for shape in shapes:
            ms, base = found[norm, mode, shape], found.get(("bn", mode, shape))
            cells.append(f"{ms:.2f}" + (f" ({ms / base:.1f})" if base and norm != "bn" else ""))
        lines.append(f"| {norm}, {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
