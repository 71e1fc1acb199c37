"""Kernels over the channels: W's step and what a training forward does to the state; launched by :mod:`.launch`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=attr-defined
# Arguments are pointers and numbers, for Triton's compiler to read.

import triton
import triton.language as tl

from swbn_lightning.norms.passes.kernels.sample_kernels import channel, product

LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32: what is not above it is finite
SMALLEST = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def direction_kernel(
    w, s, direction, squares,
    width: tl.constexpr, FRO: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows of ``(W S W^T - I) W`` (KL) or ``(W S W^T - I) W S`` (Fro), and that block's share in the squared
    Frobenius norm of ``W S W^T - I``.

    With ``(E W) S`` in place of ``E (W S)`` a block of rows needs no other, so that one launch is enough.
    """
    BLOCKS: tl.constexpr = (width + BLOCK_R - 1) // BLOCK_R
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    w += group * width * width
    s += group * width * width
    direction += group * width * width
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_W)
    ws = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    for k in range(0, width, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        there = (rows < width)[:, None] & (inner < width)[None, :]
        a = tl.load(w + rows[:, None] * width + inner[None, :], mask=there, other=0.0)
        there = (inner < width)[:, None] & (columns < width)[None, :]
        ws = product(a, tl.load(s + inner[:, None] * width + columns[None, :], mask=there, other=0.0), ws, PRECISION)
    ew = tl.zeros([BLOCK_R, BLOCK_W], tl.float32)
    norm = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
    for k in range(0, width, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        there = (inner < width)[:, None] & (columns < width)[None, :]
        a = tl.load(w + inner[:, None] * width + columns[None, :], mask=there, other=0.0)
        excess = product(ws, tl.trans(a), tl.zeros([BLOCK_R, BLOCK_K], tl.float32), PRECISION)
        excess -= ((rows[:, None] == inner[None, :]) & (rows < width)[:, None]).to(tl.float32)
        norm += excess * excess
        ew = product(excess, a, ew, PRECISION)
    tl.store(squares + tl.program_id(0), tl.sum(tl.sum(norm, 1), 0))
    if FRO:
        for k in range(0, width, BLOCK_K):
            inner = k + tl.arange(0, BLOCK_K)
            there = (columns < width)[:, None] & (inner < width)[None, :]
            a = tl.load(s + columns[:, None] * width + inner[None, :], mask=there, other=0.0)
            values = product(ew, a, tl.zeros([BLOCK_R, BLOCK_K], tl.float32), PRECISION)
            there = (rows < width)[:, None] & (inner < width)[None, :]
            tl.store(direction + rows[:, None] * width + inner[None, :], values, mask=there)
    else:
        there = (rows < width)[:, None] & (columns < width)[None, :]
        tl.store(direction + rows[:, None] * width + columns[None, :], ew, mask=there)


@triton.jit
def _not_finite(values):
    """How many values are infinite or NaN; a comparison with NaN is false."""
    return tl.sum((tl.abs(values) <= LARGEST).to(tl.int32) ^ 1)


@triton.jit
def _stepped(w, direction, places, there, step_size, norm):
    values = tl.load(w + places, mask=there, other=0.0)
    return values - step_size * (tl.load(direction + places, mask=there, other=0.0) / norm)


@triton.jit
def _mixed(running, value, factor, accepted):
    """``torch.lerp`` of the two where the batch is accepted."""
    near = running + factor * (value - running)
    far = value - (value - running) * (1 - factor)
    return tl.where(accepted, tl.where(factor < 0.5, near, far), running)


@triton.jit(do_not_specialize=["few"])
def state_kernel(
    w, direction, squares, out, mean, variance, running_mean, running_var, tracked, rejected, small,
    step_size, momentum, few,
    groups: tl.constexpr, width: tl.constexpr, blocks: tl.constexpr, FRO: tl.constexpr,
    TRACK: tl.constexpr, AVERAGE: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Step and symmetrise W; if all of it and of the batch's statistics is finite, keep it and mix the running
    statistics; count. One program, so that all groups are accepted or rejected together."""
    SIZE: tl.constexpr = groups * width * width
    CHANNELS: tl.constexpr = groups * width
    TILES: tl.constexpr = (width + BLOCK_W - 1) // BLOCK_W
    bad = 0
    for start in range(0, CHANNELS, BLOCK_C):
        columns = start + tl.arange(0, BLOCK_C)
        bad += _not_finite(channel(mean, columns, CHANNELS)) + _not_finite(channel(variance, columns, CHANNELS))
    element = tl.arange(0, BLOCK_W * BLOCK_W)
    inner = tl.arange(0, BLOCK_W)
    share = tl.arange(0, BLOCK_B)
    for group in range(groups):
        norm = 1.0
        if FRO:
            parts = tl.load(squares + group * blocks + share, mask=share < blocks, other=0.0)
            norm = tl.sqrt(tl.sum(parts, 0))
            norm = tl.where(norm < SMALLEST, SMALLEST, norm)  # 0 where it is 0, NaN where it is NaN
        first = group * width * width
        for i in range(TILES):
            for j in range(i + 1):
                rows, columns = i * BLOCK_W + inner, j * BLOCK_W + inner
                below = first + rows[:, None] * width + columns[None, :]
                above = first + columns[:, None] * width + rows[None, :]
                there = (rows < width)[:, None] & (columns < width)[None, :]
                mirrored = (columns < width)[:, None] & (rows < width)[None, :]
                values = _stepped(w, direction, below, there, step_size, norm)
                values += tl.trans(_stepped(w, direction, above, mirrored, step_size, norm))
                values = values / 2
                bad += _not_finite(values)
                tl.store(out + below, values, mask=there)
                tl.store(out + above, tl.trans(values), mask=mirrored)
    count = tl.load(tracked)
    tl.debug_barrier()  # what is read below was written above by other threads, and the counter is read by all
    accepted = bad == 0
    for start in range(0, SIZE, BLOCK_W * BLOCK_W):
        there = start + element < SIZE
        values = tl.load(out + start + element, mask=there, other=0.0)
        old = tl.load(w + start + element, mask=there, other=0.0)
        values = tl.where(accepted, values, old)
        tl.store(out + start + element, values, mask=there)
        tl.store(w + start + element, values, mask=there)
    tl.store(small, tl.load(small) + few)
    tl.store(rejected, tl.load(rejected) + (bad != 0).to(tl.int64))
    if TRACK:
        count += accepted.to(tl.int64)
        tl.store(tracked, count)
        factor = momentum
        if AVERAGE:
            factor = 1.0 / tl.maximum(count, 1).to(tl.float32)
        for start in range(0, CHANNELS, BLOCK_C):
            columns = start + tl.arange(0, BLOCK_C)
            there = columns < CHANNELS
            old = tl.load(running_mean + columns, mask=there, other=0.0)
            tl.store(
                running_mean + columns, _mixed(old, channel(mean, columns, CHANNELS), factor, accepted), mask=there
            )
            old = tl.load(running_var + columns, mask=there, other=0.0)
            values = channel(variance, columns, CHANNELS)
            tl.store(running_var + columns, _mixed(old, values, factor, accepted), mask=there)
