"""Launches of the kernels: memory for what they put out, how the samples are shared out, and block sizes."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from swbn_lightning.norms.passes import kernels
from swbn_lightning.norms.passes.kernels import channel_kernels as C
from swbn_lightning.norms.passes.kernels import sample_kernels as S
from swbn_lightning.norms.passes.rows import as_rows, empty_like_rows

_MOST_PARTS = 512  # one program merges them


def _power(size: int) -> int:
    """The power of two that holds ``size``; Triton's products need 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


def blocks(kernel: str, d: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes, warps and pipeline stages of a kernel for ``d`` channels.

    So chosen that all kernels compile without spilling registers for compute capability 8.0 and 9.0 (a test compiles
    them), and where there are 99 KB of shared memory. By what they cost on a GPU none has been chosen yet.
    """
    wide, half = _power(d), dtype.itemsize == 2
    side = min(wide, 128 if half else 64)
    match kernel:
        case "moments":
            width = min(wide, 128)
            return {"BLOCK_N": 4096 // width, "BLOCK_D": width, "num_warps": 4}
        case "merge_moments":
            return {"BLOCK_P": _MOST_PARTS, "BLOCK_D": 16, "num_warps": 8}
        case "covariance" | "cross":
            if side == 128:
                return {"BLOCK_N": 32, "BLOCK_D": side, "num_warps": 8, "num_stages": 4}
            return {"BLOCK_N": 64 if half else 32, "BLOCK_D": side, "num_warps": 4, "num_stages": 3}
        case "merge_covariance":
            return {"BLOCK_P": 16, "BLOCK": 256, "num_warps": 4}
        case "output":
            rows = 128 if half and side < 128 else 64
            return {"BLOCK_N": rows, "BLOCK_D": side, "BLOCK_K": min(wide, 64 if half else 32), "num_warps": 4,
                    "num_stages": 2}  # fmt: skip
        case "gradient":
            rows, inner = (64, 64) if half else (32, 32)
            return {"BLOCK_N": rows, "BLOCK_D": side, "BLOCK_K": min(wide, inner),
                    "num_warps": 8 if side == 128 else 4, "num_stages": 2}  # fmt: skip
        case "merge_cross":
            rows = max(2, wide // 32)
            return {"BLOCK_P": max(1, 4096 // (rows * wide)), "BLOCK_R": rows, "BLOCK_D": wide, "num_warps": 4}
        case "direction":
            return {"BLOCK_R": 8, "BLOCK_W": wide, "BLOCK_K": min(wide, 32), "num_warps": 4 if wide <= 64 else 8,
                    "num_stages": 2}  # fmt: skip
        case "state":
            return {"BLOCK_W": min(wide, 64), "BLOCK_C": min(wide, 1024), "num_warps": 8}
    raise KeyError(kernel)


def moments(rows: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased variance and ``1 / sqrt(variance + eps)`` of ``[n, d]``, float32."""
    n, d = rows.shape
    options = blocks("moments", d, rows.dtype)
    each, parts = _shares(n, options["BLOCK_N"], min(_MOST_PARTS, 2 * _programs(rows.device)))
    means, squares = rows.new_empty((2, parts, d), dtype=torch.float32).unbind()
    mean, variance, rstd = rows.new_empty((3, d), dtype=torch.float32).unbind()
    with _on(rows.device):
        grid = (parts, _ceil(d, options["BLOCK_D"]))
        _launch(S.moments_kernel, grid, rows, means, squares, n, each, d=d, **options)
        merge = blocks("merge_moments", d, rows.dtype)
        _launch(
            S.merge_moments_kernel, (_ceil(d, merge["BLOCK_D"]),), means, squares, mean, variance, rstd,
            n, each, parts, eps, d=d, **merge,
        )  # fmt: skip
    return mean, variance, rstd


def covariance(rows: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """``xs^T xs / n`` of ``[n, d]``, ``[1, d, d]``."""
    n, d = rows.shape
    options = blocks("covariance", d, rows.dtype)
    tiles = _ceil(d, options["BLOCK_D"])
    tiles = tiles * (tiles + 1) // 2
    each, parts = _shares(n, options["BLOCK_N"], _programs(rows.device) // tiles)
    partial = rows.new_empty((parts, d, d), dtype=torch.float32)
    s = rows.new_empty((1, d, d), dtype=torch.float32)
    with _on(rows.device):
        _launch(
            S.covariance_kernel, (tiles, parts), rows, mean, rstd, partial, n, each,
            d=d, PRECISION=_precision(), **options,
        )  # fmt: skip
        merge = blocks("merge_covariance", d, rows.dtype)
        grid = (_ceil(d * d, merge["BLOCK"]),)
        _launch(S.merge_covariance_kernel, grid, partial, s, n, parts, d=d, **merge)
    return s


def output(x: Tensor, mean: Tensor, rstd: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """``xs A^T + beta`` in shape, layout and dtype of ``x``, with ``A`` of ``[d, d]`` in its dtype."""
    rows = as_rows(x)
    n, d = rows.shape
    y = empty_like_rows(rows, x.shape, True)
    options = blocks("output", d, x.dtype)
    grid = (_ceil(n, options["BLOCK_N"]) * _ceil(d, options["BLOCK_D"]),)
    with _on(x.device):
        _launch(
            S.output_kernel, grid, rows, mean, rstd, matrix, mean if bias is None else bias, y, n,
            d=d, BIAS=bias is not None, PRECISION=_precision(), **options,
        )  # fmt: skip
    return y


def gradients(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    w: Tensor,
    matrix: Tensor,
    needed: tuple[bool, torch.dtype | None, torch.dtype | None],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, gamma and beta, from that of the output; ``needed``: of x or not, the dtypes of the others or None."""
    rows, g = as_rows(x), as_rows(grad).contiguous()
    n, d = rows.shape
    of_x, of_weight, of_bias = needed
    options = blocks("cross", d, x.dtype)
    tiles = _ceil(d, options["BLOCK_D"]) ** 2
    each, parts = _shares(n, options["BLOCK_N"], _programs(x.device) // tiles)
    partial = rows.new_empty((parts, d, d), dtype=torch.float32)
    sums = rows.new_empty((parts, d), dtype=torch.float32)
    merge = blocks("merge_cross", d, x.dtype)
    count = _ceil(d, merge["BLOCK_R"])
    first, second = rows.new_empty((2, count, d), dtype=torch.float32).unbind()
    grad_weight, grad_bias = (None if t is None else rows.new_empty(d, dtype=t) for t in (of_weight, of_bias))
    with _on(x.device):
        _launch(
            S.cross_kernel, (tiles, parts), g, rows, mean, rstd, partial, sums, n, each,
            d=d, PRECISION=_precision(), **options,
        )  # fmt: skip
        _launch(
            S.merge_cross_kernel, (count,), partial, sums, w, matrix,
            first if grad_weight is None else grad_weight, first if grad_bias is None else grad_bias,
            first, second, parts, d=d, WEIGHT=grad_weight is not None, BIAS=grad_bias is not None, **merge,
        )  # fmt: skip
        if not of_x:
            return None, grad_weight, grad_bias
        dx = empty_like_rows(rows, x.shape, True)
        options = blocks("gradient", d, x.dtype)
        grid = (_ceil(n, options["BLOCK_N"]) * _ceil(d, options["BLOCK_D"]),)
        _launch(
            S.gradient_kernel, grid, g, rows, mean, rstd, matrix, first, second, dx, n, count,
            d=d, BLOCK_B=_power(count), PRECISION=_precision(), **options,
        )  # fmt: skip
    return dx, grad_weight, grad_bias


def direction(w: Tensor, s: Tensor, criterion: str) -> tuple[Tensor, Tensor]:
    """``dW`` before it is divided by a norm, ``[g, d, d]``, and shares in that norm's square, ``[g, blocks]``."""
    groups, width, _ = w.shape
    options = blocks("direction", width, w.dtype)
    count = _ceil(width, options["BLOCK_R"])
    change, squares = torch.empty_like(w), w.new_empty((groups, count))
    precision = "interpreted" if kernels.interpreted() else "ieee"
    with _on(w.device):
        _launch(
            C.direction_kernel, (groups * count,), w, s, change, squares,
            width=width, FRO=criterion == "fro", PRECISION=precision, **options,
        )  # fmt: skip
    return change, squares


def update_state(
    w: Tensor,
    s: Tensor,
    mean: Tensor,
    variance: Tensor,
    running: tuple[Tensor, Tensor, Tensor] | None,
    rejected: Tensor,
    small: Tensor,
    few: bool,
    criterion: str,
    step_size: float,
    momentum: float | None,
) -> Tensor:
    """W stepped, and kept with the batch's statistics if all is finite; returns the W of this forward.

    Written are the buffers ``w``, ``running`` (mean, variance, count of accepted batches), ``rejected`` and ``small``,
    the count of batches with ``few`` samples.
    """
    groups, width, _ = w.shape
    out = torch.empty_like(w)
    change, squares = direction(w, s, criterion)
    running_mean, running_var, tracked = running or (mean, variance, rejected)
    options = blocks("state", width, w.dtype)
    count = _ceil(width, blocks("direction", width, w.dtype)["BLOCK_R"])
    with _on(w.device):
        _launch(
            C.state_kernel, (1,), w, change, squares, out, mean, variance, running_mean, running_var, tracked,
            rejected, small, step_size, momentum or 0.0, int(few),
            groups=groups, width=width, blocks=count, FRO=criterion == "fro",
            TRACK=running is not None, AVERAGE=momentum is None, BLOCK_B=_power(count), **options,
        )  # fmt: skip
    # Kernels write unseen by autograd, which refuses a backward that needs what was overwritten.
    torch.autograd.graph.increment_version([w, rejected, small, *(running or ())])
    return out


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    kernel[grid](*args, **constants)


def _precision() -> str:
    """How float32 is multiplied: on tensor cores in three products of TF32, which leave float32's precision."""
    return "interpreted" if kernels.interpreted() else "tf32x3"


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


def _shares(n: int, block: int, wanted: int) -> tuple[int, int]:
    """Rows of each part, in whole blocks, and the number of parts: about as many as ``wanted``."""
    each = block * _ceil(n, block * max(wanted, 1))
    return each, _ceil(n, each)


@functools.cache
def _programs(device: torch.device) -> int:
    """Programs that a device runs at once, about: two a multiprocessor."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    return nullcontext() if device.type != "cuda" else torch.cuda.device(device)
