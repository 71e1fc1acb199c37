"""All that there is to measure on a GPU, in one run: the kernels checked, then layers, networks and memory.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --sections check tests --output runs/gpu-2.json
    python -m benchmarks.gpu --smoke                        tiny, on a CPU: whether it runs

Sections run one after the other, the most wanted first, each in a process of its own: an error or a hanging kernel in
one leaves the others. Each prints its tables in Markdown, and the JSON file holds what has been measured so far, so
that a run which is cut off keeps it. A section that needs more than what is left of the budget is stopped.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernels, layer, memory, network
from benchmarks.timing import installed
from swbn_lightning.norms.passes.kernels import available
from swbn_lightning.runs.record import environment

Row = dict[str, Any]
REPOSITORY = Path(__file__).parents[1]
TESTS = [f"tests/norms/kernels_{name}.py" for name in ("alone", "in_layers")]
KERNELS = ("swbn-fro:kernels", "swbn-kl:kernels")
NORMS = ("bn", "bn+products", "swbn-fro", "iternorm")


class Section:
    """Where a section's rows and tables go: to the screen and the JSON file, as they come."""

    def __init__(self, name: str, output: Path, smoke: bool) -> None:
        self.name, self.output, self.smoke = name, output, smoke
        self.device = torch.device("cpu" if smoke else "cuda")

    def add(self, rows: Iterable[Row], table: Callable[[list[Row]], str], title: str) -> None:
        """Rows as they come into the file; the table when there are no more."""
        kept: list[Row] = []
        for row in rows:
            kept.append(row)
            _append(self.output, self.name, "rows", {"title": title, **row})
        text = f"\n{title}\n\n{table(kept)}\n"
        _append(self.output, self.name, "tables", text)
        print(text, flush=True)

    def attempt(self, run: Callable[..., None], *args: Any) -> None:
        """Go on after an error, which the file keeps."""
        try:
            run(self, *args)
        except Exception as error:
            text = f"{run.__name__} {args}: {type(error).__name__}: {error}"[:2000]
            _append(self.output, self.name, "errors", text)
            print(text, flush=True)


def check(section: Section) -> None:
    """Every kernel against the stock operators: float32, bfloat16, float16."""
    n = 70 if section.smoke else 65_573
    some, more = ((16,), (16, 24)) if section.smoke else ((64, 100, 512), (64, 256, 16, 100, 512))
    cases = [(d, torch.bfloat16) for d in more]
    cases += [(d, dtype) for dtype in (torch.float32, torch.float16) for d in some]
    title = f"Kernels against float64, n = {n}; relative errors"
    section.add(kernels.check(n, cases, section.device), kernels.check_table, title)
    if not section.smoke:
        rows = (kernels.check_captured(n, d, section.device) for d in (64, 256))
        section.add(rows, kernels.check_table, "Captured in a CUDA graph against step by step")


def single_layer(section: Section) -> None:
    """The single-layer table: forward and backward, bfloat16, channels last, captured."""
    shapes = ("4x16x3x3",) if section.smoke else ("64x64x32x32", "64x256x32x32", "64x1024x32x32", "64x2048x32x32",
                                                 "64x128x32x32", "64x512x32x32")  # fmt: skip
    for shape in shapes:
        channels = int(shape.split("x")[1])
        norms = [*NORMS, *(KERNELS if channels <= 512 else ())]
        section.attempt(_layer_table, shape, norms, True)
    if not section.smoke:
        section.attempt(_layer_table, "64x64x32x32", ["bn", "swbn-fro", *KERNELS, "iternorm"], False)


def _layer_table(section: Section, shape: str, norms: list[str], graph: bool) -> None:
    arguments = ["--norms", *norms, "--shapes", shape, "--device", section.device.type]
    arguments += ["--rounds", "1"] if section.smoke else ["--dtype", "bfloat16", "--rounds", "20"]
    options = layer.parse([*arguments, *(["--graph"] if graph and not section.smoke else [])])
    title = f"One layer, {options.dtype}, {'captured' if options.graph else 'eager'}"
    section.add(layer.measure(options), lambda rows: layer.table(rows, options.shapes), title)


def alone(section: Section) -> None:
    """Each kernel by itself."""
    n, channels, rounds = (70, (16,), 1) if section.smoke else (65_536, (64, 128, 256, 512), 10)
    rows = kernels.alone(n, channels, section.device, rounds)
    section.add(rows, kernels.alone_table, f"Kernels alone, bfloat16, n = {n}")


def _network_table(section: Section, name: str, norms: Iterable[str], graph: bool) -> None:
    arguments = ["--network", name, "--train", "--device", section.device.type, "--norms", *norms]
    arguments += ["--batch", "2", "--rounds", "1"] if section.smoke else ["--batch", "128", "--dtype", "bfloat16"]
    options = network.parse([*arguments, *(["--graph"] if graph and not section.smoke else [])])
    title = f"Training step of {name}, {options.dtype}, {'captured' if options.graph else 'eager'}"
    section.add(network.measure(options), lambda rows: network.table(rows, options), title)


def resnet20(section: Section) -> None:
    """CIFAR's ResNet20, eager and captured."""
    norms = ("bn", "swbn-fro") if section.smoke else ("bn", "swbn-fro", *KERNELS, "iternorm")
    for graph in (False,) if section.smoke else (True, False):
        section.attempt(_network_table, "resnet20", norms, graph)


def resnet50(section: Section) -> None:
    """ResNet-50 with all its 53 layers, captured."""
    if section.smoke:  # minutes on a CPU
        return
    section.attempt(_network_table, "resnet50", ("bn", "swbn-fro", KERNELS[0], "iternorm"), True)


def peaks(section: Section) -> None:
    """Peak memory of a chain of layers, of the tensors and of the allocator."""
    norms = ["bn", "swbn-fro", *([] if section.smoke else KERNELS[:1]), "iternorm"]
    small = ["--channels", "8", "--side", "8", "--batch", "8", "--depth", "2"] if section.smoke else []
    options = memory.parse(["--norms", *norms, "--device", section.device.type, *small])
    section.add(memory.measure(options), lambda rows: memory.table(rows, options.norms), "Peak memory")


def tests(section: Section) -> None:
    """The kernels' own tests on this device, against references in numpy."""
    chosen = ["-k", "a_w_that_whitens"] if section.smoke else []
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *TESTS, *chosen]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    row = {"returncode": done.returncode, "output": done.stdout[-6000:]}
    section.add([row], lambda rows: f"```\n{done.stdout[-3000:]}```", "Tests of the kernels")


SECTIONS: dict[str, Callable[[Section], None]] = {
    "check": check, "layer": single_layer, "resnet50": resnet50, "resnet20": resnet20, "alone": alone,
    "memory": peaks, "tests": tests,
}  # fmt: skip


def main() -> None:
    """Run sections until the budget is spent."""
    options = _options()
    output = Path(options.output)
    if options.child:
        SECTIONS[options.child](Section(options.child, output, options.smoke))
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    ran_on = environment("torchvision", *(["triton"] if installed("triton") else []))
    output.write_text(json.dumps({"command": sys.argv, "environment": ran_on, "sections": {}}, indent=1) + "\n")
    print(", ".join(f"{key} {value}" for key, value in ran_on.items()), flush=True)
    start = time.monotonic()
    for name in options.sections:
        left = options.budget - (time.monotonic() - start)
        if left < 5:
            print(f"{name}: left out, the budget of {options.budget} s is spent", flush=True)
            continue
        begun = time.monotonic()
        result = {"verdict": _run(name, output, options.smoke, left), "seconds": round(time.monotonic() - begun, 1)}
        _store(output, name, {**_section(output, name), **result})
        print(f"{name}: {result['verdict']}, {result['seconds']} s", flush=True)
    print(f"written: {output}")


def _run(name: str, output: Path, smoke: bool, seconds: float) -> str:
    command = [sys.executable, "-m", "benchmarks.gpu", "--child", name, "--output", str(output)]
    variables = {"TRITON_INTERPRET": "1"} if smoke else {}
    child = subprocess.Popen(
        [*command, *(["--smoke"] if smoke else [])], cwd=REPOSITORY, env={**os.environ, **variables},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # with what it has started itself
        child.wait()
        return "stopped, out of budget"
    if child.returncode == 0:
        return "done"
    print(errors[-3000:], flush=True)
    _append(output, name, "errors", errors[-3000:])
    return f"ended with {child.returncode}"


def _append(output: Path, name: str, key: str, value: object) -> None:
    section = _section(output, name)
    section[key].append(value)
    _store(output, name, section)


def _section(output: Path, name: str) -> Row:
    return json.loads(output.read_text())["sections"].get(name, {"rows": [], "tables": [], "errors": []})


def _store(output: Path, name: str, section: Row) -> None:
    """A whole new file takes the old one's place, so that it is never half written."""
    content = json.loads(output.read_text())
    content["sections"][name] = section
    partial = output.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(output)


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--budget", type=float, default=560.0, metavar="SECONDS", help="for all sections together")
    made.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS), metavar="SECTION",
                      help=f"of {', '.join(SECTIONS)}")  # fmt: skip
    made.add_argument("--smoke", action="store_true", help="tiny, on a CPU, kernels in Triton's interpreter")
    made.add_argument("--output", default="runs/gpu.json", help="JSON file")
    made.add_argument("--child", choices=list(SECTIONS), help=argparse.SUPPRESS)
    options = made.parse_args()
    options.output = str(Path(options.output).absolute())
    if not options.smoke and not available():
        made.error(f"{available().reason}; --smoke tries the program out on a CPU")
    return options


if __name__ == "__main__":
    main()
