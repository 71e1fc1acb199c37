"""How much memory the norms need in training: the most that is held at once, against BatchNorm.

    python -m benchmarks.memory

A chain of convolution, norm and ReLU in place, as networks have it; forward and backward. Counted are the bytes of
all tensors that operators make, weights and their gradients not; so the figures do not depend on an allocator. On a
GPU the allocator's own peak stands beside it.
"""

import argparse
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.timing import check_gpu, markdown, parser, split_kernels, write
from swbn_lightning import NormFactory
from swbn_lightning.norms.passes.kernels import use_kernels

NORMS = ("bn", "swbn-kl", "swbn-fro", "iternorm", "dbn")


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made inside hold at once; what they share, or what was there before, not counted."""

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in before}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._known or not size:
            return
        self._known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, address, size)

    def _free(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


def main() -> None:
    """Measure, print, write."""
    options = parse()
    rows = measure(options)
    print(table(rows, options.norms))
    write(options, rows)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a norm and dtype."""
    return [_measure(norm, dtype, options) for dtype in (torch.float32, torch.bfloat16) for norm in options.norms]


def table(rows: list[dict[str, Any]], norms: Sequence[str]) -> str:
    """A line a norm: the tensors' peak, times BatchNorm's, and the allocator's on a GPU."""
    lines = []
    for norm in norms:
        cells = []
        for name in ("float32", "bfloat16"):
            found = {row["norm"]: row for row in rows if row["dtype"] == name}
            cell = []
            for key in ("peak_bytes", "allocator_peak_bytes"):
                peak, base = found[norm][key], found.get("bn", {}).get(key)
                if peak:
                    cell.append(f"{peak / 2**20:.1f}" + (f" ({peak / base:.2f})" if base else ""))
            cells.append("; allocator ".join(cell))
        lines.append([norm, *cells])
    return markdown(["norm", "float32, MiB (times BatchNorm)", "bfloat16, MiB (times BatchNorm)"], lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options, or those of ``arguments``."""
    made = parser(__doc__, "memory", rounds=None, dtype=False)
    made.add_argument("--norms", nargs="+", default=NORMS)
    made.add_argument("--channels", type=int, default=64)
    made.add_argument("--side", type=int, default=32, help="height and width of the maps")
    made.add_argument("--batch", type=int, default=64)
    made.add_argument("--depth", type=int, default=8, help="norms in the chain")
    options = made.parse_args(arguments)
    check_gpu(made, options)
    return options


def _measure(norm: str, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(options.seed)
    d = options.channels
    name, kernels = split_kernels(norm)
    layers: list[nn.Module] = []
    for _ in range(options.depth):
        layers += [nn.Conv2d(d, d, 1, bias=False), NormFactory(name)(d), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers).to(options.device, dtype).to(memory_format=torch.channels_last)
    x = torch.randn(options.batch, d, options.side, options.side, device=options.device, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    autocast = torch.autocast(torch.device(options.device).type, dtype, enabled=dtype != torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [x, *model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    cuda = options.device.startswith("cuda")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated() if cuda else 0
    with PeakMemory([t for t in before if t is not None]) as counted, autocast, use_kernels(kernels):
        loss = model(x).sum()
        loss.backward()
    peak = torch.cuda.max_memory_allocated() - start if cuda else None
    return {
        "norm": norm,
        "dtype": str(dtype).removeprefix("torch."),
        "peak_bytes": counted.peak,
        "allocator_peak_bytes": peak,
    }


if __name__ == "__main__":
    main()
