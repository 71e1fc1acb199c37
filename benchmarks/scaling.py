"""What synchronised statistics cost among several processes: a step with and without them, and the collectives alone.

    torchrun --nproc-per-node 2 -m benchmarks.scaling
    torchrun --nproc-per-node 8 -m benchmarks.scaling --network resnet50 --batch 64 --dtype bfloat16      on GPUs

Every process has a GPU of its own (NCCL), or ``--threads`` of a CPU (gloo), and a batch of ``--batch``. A step is that
of ``DistributedDataParallel``: forward, loss, backward with the gradients' reduction, and an update by SGD. Each norm
takes turns with ``sync`` on and off. ``collectives`` times what the layers send in one step, layer after layer, with
nothing in between: what a step pays if it waits for each of them. Times are those of process 0.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network import SIDE, network, training
from benchmarks.timing import Pass, markdown, medians, parser, write
from swbn_lightning.norms.base import WhiteningNorm
from swbn_lightning.norms.swbn import SWBN

NORMS = ("bn", "swbn-fro", "iternorm")


def main() -> None:
    """Measure, print, write; one process of those that torchrun started."""
    options = parse()
    cuda = options.device == "cuda"
    torch.set_num_threads(options.threads)
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        rows = measure(options)
        if dist.get_rank() == 0:
            print(table(rows, options))
            write(options, rows, "torchvision")
    finally:
        dist.destroy_process_group()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a norm and what was timed: ``off``, ``on``, ``collectives``."""
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    torch.manual_seed(options.seed + dist.get_rank())
    side = SIDE[options.network]
    images = torch.randn(options.batch, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (options.batch,), device=device)
    passes: dict[tuple[str, str], Pass] = {}
    for norm in options.norms:
        for sync in (False,) if norm == "bn" else (False, True):
            torch.manual_seed(options.seed)
            model = network(options.network, norm).to(device)
            layers = [module for module in model.modules() if isinstance(module, WhiteningNorm)]
            for layer in layers:
                layer.sync = sync
            parallel = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
            passes[norm, "on" if sync else "off"] = training(parallel, images, labels, options)
        if norm != "bn":
            passes[norm, "collectives"] = _collectives(layers, device)
    times = medians(passes, options.rounds, device, repeats=False)  # every process must do as many passes
    return [{"norm": norm, "what": what, "ms": 1000 * seconds} for (norm, what), seconds in times.items()]


def _collectives(layers: Sequence[nn.Module], device: torch.device) -> Pass:
    """What the layers send in a training step (the table of ``docs/scaling.md``), of one size each after the other."""
    sent = []
    for layer in layers:
        assert isinstance(layer, WhiteningNorm)
        d, covariance = layer.num_features, layer.num_features**2 // layer.num_groups
        sums = 2 * d if isinstance(layer, SWBN) else d + covariance
        sizes = (covariance + dist.get_world_size() * (d + 1), sums)
        sent.append([torch.zeros(size, device=device) for size in sizes])

    def run() -> None:
        for statistics, _ in sent:
            dist.all_reduce(statistics)
        for _, sums in reversed(sent):
            dist.all_reduce(sums)

    return run


def table(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """A line a norm."""
    times = {(row["norm"], row["what"]): row["ms"] for row in rows}
    first = f"{options.network}, {dist.get_world_size()} processes, batch {options.batch} each"
    head = [first, "step, `sync: false`, ms", "`sync: true`, ms", "times", "collectives alone, ms", "of the step"]
    lines = []
    for norm in options.norms:
        off, on, sent = (times.get((norm, what)) for what in ("off", "on", "collectives"))
        more = [f"{on:.1f}", f"{on / off:.3f}", f"{sent:.1f}", f"{sent / on:.1%}"] if off and on and sent else [""] * 4
        lines.append([norm, f"{off:.1f}", *more])
    return markdown(head, lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options, or those of ``arguments``."""
    made = parser(__doc__, "scaling", rounds=15)
    made.add_argument("--network", default="resnet20", choices=list(SIDE))
    made.add_argument("--norms", nargs="+", default=NORMS)
    made.add_argument("--batch", type=int, default=64, help="of each process")
    made.add_argument("--threads", type=int, default=1, help="of each process")
    options = made.parse_args(arguments)
    if "RANK" not in os.environ and arguments is None:
        made.error("start it with torchrun: torchrun --nproc-per-node 2 -m benchmarks.scaling")
    return options


if __name__ == "__main__":
    main()
