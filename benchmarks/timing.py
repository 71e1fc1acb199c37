"""Passes timed in turns, so that what else the machine does falls on all of them."""

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from swbn_lightning.norms.passes.kernels import available, use_kernels
from swbn_lightning.runs.record import environment

Key = TypeVar("Key", bound=Hashable)
Pass = Callable[[], object]
KERNELS = "kernels"  # an option of a norm that is no argument of the layer
WARM_UP = 3
_LEAST_SECONDS = 2e-3  # on a GPU, so that the launch of the first of several passes does not count
_MOST_REPEATS = 50


def medians(passes: dict[Key, Pass], rounds: int, device: torch.device, repeats: bool = True) -> dict[Key, float]:
    """Seconds of each pass: the median over ``rounds``, in each of which every pass has its turn.

    A turn is one pass; on a GPU, with ``repeats``, as many as take 2 ms by its own clock.
    """
    times: dict[Key, list[float]] = {key: [] for key in passes}
    turns = dict.fromkeys(passes, 1)
    for number in range(rounds + WARM_UP):
        for key, run in passes.items():
            seconds = _seconds(run, turns[key], device)
            if number >= WARM_UP:
                times[key].append(seconds)
            elif device.type == "cuda" and repeats:
                turns[key] = min(_MOST_REPEATS, math.ceil(_LEAST_SECONDS / seconds))
    return {key: statistics.median(values) for key, values in times.items()}


def _seconds(run: Pass, repeats: int, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(repeats):
        run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000 / repeats


def captured(run: Pass) -> Pass:
    """The same pass as a CUDA graph; an error, from PyTorch, if it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def split_kernels(norm: str) -> tuple[str, bool]:
    """``swbn-fro:kernels,num_groups=2`` as ``swbn-fro:num_groups=2`` and whether kernels are asked for."""
    name, _, given = norm.partition(":")
    options = [option for option in given.split(",") if option]
    rest = ",".join(option for option in options if option != KERNELS)
    return f"{name}:{rest}" if rest else name, KERNELS in options


def by_kernels(run: Pass, on: bool) -> Pass:
    """The same pass with the kernels switched on, or off."""

    def switched() -> None:
        with use_kernels(on):
            run()

    return switched


def check_gpu(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with an error if a CUDA graph, or a norm by kernels, is asked for that cannot run here."""
    if vars(options).get("graph") and not options.device.startswith("cuda"):
        made.error(f"--graph needs a GPU, the device is {options.device}")
    asking = [norm for norm in options.norms if split_kernels(norm)[1]]
    if asking and not available():
        made.error(f"{', '.join(asking)}: {available().reason}")


def installed(package: str) -> bool:
    """Whether a package is there."""
    return importlib.util.find_spec(package) is not None


def parser(description: str | None, output: str, rounds: int | None, dtype: bool = True) -> argparse.ArgumentParser:
    """What all benchmarks take; ``rounds`` of those that time, ``dtype`` where one of several is chosen."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if dtype:
        made.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--output", default=f"runs/{output}.json", help="JSON file")
    return made


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A Markdown table, of which so many columns are texts and the others stand to the right."""
    marks = ["---"] * texts + ["---:"] * (len(head) - texts)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, marks, *rows))


def write(options: argparse.Namespace, rows: list[dict[str, Any]], *packages: str) -> None:
    """Rows with command and environment as JSON, and a line that says the same."""
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    ran_on = environment(*packages)
    content = {"command": sys.argv, "environment": ran_on, "options": vars(options), "rows": rows}
    output.write_text(json.dumps(content, indent=2) + "\n")
    dtype = f", {options.dtype}" if "dtype" in options else ""
    line = ", ".join(f"{key} {value}" for key, value in ran_on.items())
    print(f"\n{line}{dtype}, seed {options.seed}\nwritten: {output}")
