"""SWBN's kernels by themselves: whether they are right on this device, and what each costs.

``python -m benchmarks.gpu`` runs these as sections of its own; here is what they do.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.timing import captured, markdown, medians
from swbn_lightning import SWBN1d
from swbn_lightning.norms.passes.kernels import use_kernels

Row = dict[str, Any]
_FLOOR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # errors below which nothing is wrong
_REPEATS = 10
# Of the activation's size, read or written; and products of 2 n d^2 operations.
_TENSORS = {"moments": 1, "covariance": 1, "output": 2, "cross": 2, "gradient": 3}
_PRODUCTS = {"covariance": 1, "output": 1, "cross": 1, "gradient": 1}


def check(n: int, cases: Iterable[tuple[int, torch.dtype]], device: torch.device) -> Iterator[Row]:
    """A training step by kernels and by stock operators, both against the stock operators in float64.

    With a large step of W and running statistics that are the batch's, every kernel's result shows. ``ok``: no error
    is more than twice the stock operators' (or worth mentioning), and a second run gives the same bits.
    """
    for d, dtype in cases:
        for criterion in ("fro", "kl"):
            x, upstream, norm = _problem(n, d, dtype, criterion, device)
            exact = _step(copy.deepcopy(norm).double(), x.double(), upstream.double(), False)
            stock = _step(copy.deepcopy(norm), x, upstream, False)
            found = _step(copy.deepcopy(norm), x, upstream, True)
            again = _step(copy.deepcopy(norm), x, upstream, True)
            errors = {name: (_error(found[name], exact[name]), _error(stock[name], exact[name])) for name in exact}
            fine = all(mine <= max(2 * theirs, _FLOOR[dtype]) for mine, theirs in errors.values())
            same = all(torch.equal(found[name], again[name]) for name in found)
            row = {"d": d, "dtype": _name(dtype), "criterion": criterion, "ok": fine and same, "same_bits": same}
            yield {**row, "errors": errors}


def check_captured(n: int, d: int, device: torch.device) -> Row:
    """Three replays of a captured training step against three steps."""
    x, upstream, norm = _problem(n, d, torch.bfloat16, "fro", device)
    twin = copy.deepcopy(norm)
    run = captured(lambda: _step(twin, x, upstream, True))
    twin.load_state_dict(norm.state_dict())  # into the buffers that the graph holds
    for _ in range(3):
        run()
        _step(norm, x, upstream, True)
    same = all(torch.equal(value, norm.state_dict()[key]) for key, value in twin.state_dict().items())
    return {"d": d, "dtype": "bfloat16", "criterion": "captured", "ok": same, "same_bits": same, "errors": {}}


def _problem(
    n: int, d: int, dtype: torch.dtype, criterion: str, device: torch.device
) -> tuple[Tensor, Tensor, nn.Module]:
    torch.manual_seed(d)
    mix = torch.eye(d, device=device) + torch.randn(d, d, device=device) / d**0.5
    x = (torch.randn(n, d, device=device) @ mix + 5).to(dtype)
    norm = SWBN1d(d, eps=1e-5, momentum=1.0, criterion=criterion, step_size=0.1, device=device)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1, 0.3)
    return x, torch.randn(n, d, device=device).to(dtype), norm


def _step(norm: nn.Module, x: Tensor, upstream: Tensor, kernels: bool) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    norm.zero_grad()
    with use_kernels(kernels):
        y = norm(x)
        y.backward(upstream)
    assert x.grad is not None
    state = {name: norm.get_buffer(name) for name in ("running_mean", "running_var", "whitening_matrix")}
    gradients = {name: value.grad for name, value in norm.named_parameters() if value.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **gradients, **state}


def _error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_table(rows: list[Row]) -> str:
    """The largest errors a dtype and number of channels, kernels against stock operators."""
    lines = []
    for row in rows:
        name, (mine, theirs) = max(row["errors"].items(), key=lambda item: item[1][0], default=("", (0.0, 0.0)))
        verdict = "yes" if row["ok"] else "NO" + ("" if row["same_bits"] else ", other bits the second time")
        lines.append([str(row["d"]), row["dtype"], row["criterion"], name, f"{mine:.1e}", f"{theirs:.1e}", verdict])
    return markdown(["d", "dtype", "criterion", "worst of", "kernels", "stock", "ok"], lines, texts=7)


def alone(n: int, channels: Iterable[int], device: torch.device, rounds: int) -> Iterator[Row]:
    """Microseconds of each kernel in bfloat16, and the floor: the larger of its bytes and operations at full rate."""
    bandwidth, rate = _ceilings(device)
    for d in channels:
        for name, run in _launches(n, d, device).items():
            bytes_, products = 2 * n * d * _TENSORS.get(name, 0), _PRODUCTS.get(name, 0)
            floor = max(bytes_ / bandwidth, 2 * n * d * d * products / rate)
            yield {"d": d, "kernel": name, "us": 1e6 * _seconds(run, device, rounds), "floor_us": 1e6 * floor}


def _ceilings(device: torch.device) -> tuple[float, float]:
    """Bytes and bfloat16 operations a second, as a copy and a product through PyTorch reach them."""
    size = 2**28 if device.type == "cuda" else 2**16
    side = 8192 if device.type == "cuda" else 64
    a, b = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    c, d = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = medians({"copy": lambda: b.copy_(a), "product": lambda: c @ d}, 5, device)
    return 2 * 2 * size / times["copy"], 2 * side**3 / times["product"]


def alone_table(rows: list[Row]) -> str:
    """A line a kernel, a column a number of channels: microseconds (floor)."""
    channels = list(dict.fromkeys(row["d"] for row in rows))
    found = {(row["kernel"], row["d"]): row for row in rows}
    lines = []
    for name in dict.fromkeys(row["kernel"] for row in rows):
        cells = [found.get((name, d)) for d in channels]
        texts = ["" if row is None else f"{row['us']:.1f} ({row['floor_us']:.1f})" for row in cells]
        lines.append([name, *texts])
    return markdown(["µs (floor)", *(f"d = {d}" for d in channels)], lines)


def _launches(n: int, d: int, device: torch.device) -> dict[str, Callable[[], None]]:
    """The launches of one training pass, each to be done again."""
    from swbn_lightning.norms.passes.kernels import launch

    launched = {}
    x, upstream, norm = _problem(n, d, torch.bfloat16, "fro", device)

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        launched[kernel.__name__.removesuffix("_kernel")] = lambda: kernel[grid](*args, **constants)
        kernel[grid](*args, **constants)

    with mock.patch.object(launch, "_launch", note):
        _step(norm, x, upstream, True)
    return launched


def _seconds(run: Callable[[], None], device: torch.device, rounds: int) -> float:
    """Of one launch: on a GPU from a graph of several, so that the host's time does not count."""

    def several() -> None:
        for _ in range(_REPEATS):
            run()

    if device.type != "cuda":
        return medians({"": run}, rounds, device)[""]
    return medians({"": captured(several)}, rounds, device)[""] / _REPEATS
