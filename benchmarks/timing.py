"""Passes timed in turns, so that what else the machine does falls on all of them."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.environment import environment, environment_line

Key = TypeVar("Key", bound=Hashable)
Pass = Callable[[], object]
WARM_UP = 3


def medians(passes: dict[Key, Pass], rounds: int, device: torch.device) -> dict[Key, float]:
    """Seconds of each pass: the median over ``rounds``, in each of which every pass runs once."""
    times: dict[Key, list[float]] = {key: [] for key in passes}
    for number in range(rounds + WARM_UP):
        for key, run in passes.items():
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            if number >= WARM_UP:
                times[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in times.items()}


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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def parser(description: str | None, output: str, rounds: int, dtype: bool = True) -> argparse.ArgumentParser:
    """What all benchmarks take; ``dtype`` where they can run in several."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if dtype:
        made.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--output", default=f"runs/{output}.json", help="JSON file")
    return made


def write(options: argparse.Namespace, rows: list[dict[str, Any]], *packages: str) -> None:
    """Rows with command and environment as JSON, and a line that says the same."""
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    content = {"command": sys.argv, "environment": environment(*packages), "options": vars(options), "rows": rows}
    output.write_text(json.dumps(content, indent=2) + "\n")
    dtype = f", {options.dtype}" if "dtype" in options else ""
    print(f"\n{environment_line(*packages)}{dtype}, seed {options.seed}\nwritten: {output}")
