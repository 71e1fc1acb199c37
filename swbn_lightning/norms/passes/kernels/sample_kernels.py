"""Kernels over the samples: statistics, products and their backward; launched by :mod:`.launch`.

An activation is ``[n, d]`` here, a sample a row, in float32, float16 or bfloat16; all sums are float32. No kernel keeps
the standardised activation: each forms the rows it needs in registers, rounded to the dtype of ``x`` as the stock
operators round what they store. Sums over the samples are taken part by part and then over the parts in a fixed order,
without atomics, so that the same batch gives the same bits: checkpointing knows a batch by its statistics.

``d`` is a constant of compilation: a network has few widths, and for a power of two no column needs a mask. Places are
counted in 32 bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code=attr-defined
# Arguments are pointers and numbers, for Triton's compiler to read.

import triton
import triton.language as tl


@triton.jit
def product(a, b, start, PRECISION: tl.constexpr):
    """``start + a b``, summed in float32."""
    if PRECISION == "interpreted":  # the interpreter takes bfloat16 for integers here; nothing is lost in float32
        return tl.dot(a.to(tl.float32), b.to(tl.float32), start)
    return tl.dot(a, b, start, input_precision=PRECISION)


@triton.jit
def _standardize(values, mean, rstd, inside):
    """Rows of ``xs`` in the dtype of ``values``; 0 outside, so that they add nothing to a product."""
    xs = (values.to(tl.float32) - mean[None, :]) * rstd[None, :]
    return tl.where(inside, xs, 0.0).to(values.dtype)


@triton.jit
def channel(values, columns, d: tl.constexpr):
    """One float32 a channel; 0 for channels beyond ``d``."""
    return tl.load(values + columns, mask=columns < d, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n", "rows_each"])
def moments_kernel(x, means, squares, n, rows_each, d: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of each part of the rows: mean and centred sum of squares."""
    part = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    count = tl.minimum(rows_each, n - part * rows_each)
    x += part * rows_each * d
    rows = tl.arange(0, BLOCK_N)
    places = rows[:, None] * d + columns[None, :]
    inside = (rows < count)[:, None] & (columns < d)[None, :]
    # Around the mean of the first rows, which lies among the values: what is then lost to cancellation is at most the
    # number of blocks in a part, however far from zero the mean is.
    shift = tl.sum(tl.load(x + places, mask=inside, other=0.0).to(tl.float32), 0) / tl.minimum(count, BLOCK_N)
    first = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    second = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, rows_each, BLOCK_N):
        inside = (start + rows < count)[:, None] & (columns < d)[None, :]
        values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        away = tl.where(inside, values - shift[None, :], 0.0)
        first += away
        second += away * away
        x += BLOCK_N * d
    total = tl.sum(first, 0)
    around = tl.sum(second, 0) - total * total / count
    around = tl.where(around < 0, 0.0, around)  # not `maximum`, which makes a number of NaN
    tl.store(means + part * d + columns, shift + total / count, mask=columns < d)
    tl.store(squares + part * d + columns, around, mask=columns < d)


@triton.jit(do_not_specialize=["n", "rows_each", "parts"])
def merge_moments_kernel(
    means, squares, mean, variance, rstd, n, rows_each, parts, eps,
    d: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Mean, unbiased variance and ``1 / sqrt(variance + eps)`` from those of the parts (Chan, Golub, LeVeque 1979)."""
    columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    part = tl.arange(0, BLOCK_P)
    there = (part < parts)[:, None] & (columns < d)[None, :]
    counts = tl.minimum(rows_each, n - part * rows_each).to(tl.float32)[:, None]
    places = part[:, None] * d + columns[None, :]
    each = tl.load(means + places, mask=there, other=0.0)
    start = tl.load(means + columns, mask=columns < d, other=0.0)
    middle = start + tl.sum(tl.where(there, (each - start[None, :]) * counts, 0.0), 0) / n
    away = each - middle[None, :]
    around = tl.load(squares + places, mask=there, other=0.0) + tl.where(there, away * away * counts, 0.0)
    spread = tl.sum(around, 0) / (n - 1)
    tl.store(mean + columns, middle, mask=columns < d)
    tl.store(variance + columns, spread, mask=columns < d)
    tl.store(rstd + columns, tl.rsqrt(spread + eps), mask=columns < d)


@triton.jit(do_not_specialize=["n", "rows_each"])
def covariance_kernel(
    x, mean, rstd, partial, n, rows_each,
    d: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``xs^T xs`` of each part of the rows; only the blocks on and below the diagonal."""
    tile, part = tl.program_id(0), tl.program_id(1)
    TILES: tl.constexpr = (d + BLOCK_D - 1) // BLOCK_D
    i = 0
    for t in tl.static_range(1, TILES):
        i += (tile >= t * (t + 1) // 2).to(tl.int32)
    j = tile - i * (i + 1) // 2
    left = i * BLOCK_D + tl.arange(0, BLOCK_D)
    right = j * BLOCK_D + tl.arange(0, BLOCK_D)
    left_mean, left_rstd = channel(mean, left, d), channel(rstd, left, d)
    right_mean, right_rstd = channel(mean, right, d), channel(rstd, right, d)
    count = tl.minimum(rows_each, n - part * rows_each)
    x += part * rows_each * d
    rows = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    for start in range(0, rows_each, BLOCK_N):
        inside = (start + rows < count)[:, None]
        line = x + (start + rows)[:, None] * d
        a = tl.load(line + left[None, :], mask=inside & (left < d)[None, :], other=0.0)
        a = _standardize(a, left_mean, left_rstd, inside)
        if TILES == 1:
            b = a
        else:
            b = tl.load(line + right[None, :], mask=inside & (right < d)[None, :], other=0.0)
            b = _standardize(b, right_mean, right_rstd, inside)
        total = product(tl.trans(a), b, total, PRECISION)
    there = (left < d)[:, None] & (right < d)[None, :]
    tl.store(partial + part * d * d + left[:, None] * d + right[None, :], total, mask=there)


@triton.jit(do_not_specialize=["n", "parts"])
def merge_covariance_kernel(
    partial, covariance, n, parts, d: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The parts' sum over ``n``, mirrored from what lies on and below the diagonal."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = place // d, place % d
    place_below = tl.where(row >= column, place, column * d + row)
    part = tl.arange(0, BLOCK_P)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, parts, BLOCK_P):
        there = (start + part < parts)[:, None] & (place < d * d)[None, :]
        values = tl.load(partial + (start + part)[:, None] * d * d + place_below[None, :], mask=there, other=0.0)
        total += tl.sum(values, 0)
    tl.store(covariance + place, total / n, mask=place < d * d)


@triton.jit(do_not_specialize=["n"])
def output_kernel(
    x, mean, rstd, matrix, bias, y, n,
    d: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``xs A^T + beta``."""
    TILES: tl.constexpr = (d + BLOCK_D - 1) // BLOCK_D
    block = tl.program_id(0) // TILES
    out = tl.program_id(0) % TILES * BLOCK_D + tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_N)
    inside = (rows < n - block * BLOCK_N)[:, None]
    first = block * BLOCK_N * d
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for k in range(0, d, BLOCK_K):
        columns = k + tl.arange(0, BLOCK_K)
        values = tl.load(
            x + first + rows[:, None] * d + columns[None, :], mask=inside & (columns < d)[None, :], other=0.0
        )
        xs = _standardize(values, channel(mean, columns, d), channel(rstd, columns, d), inside)
        there = (out < d)[None, :] & (columns < d)[:, None]
        a = tl.load(matrix + out[None, :] * d + columns[:, None], mask=there, other=0.0)
        total = product(xs, a, total, PRECISION)
    if BIAS:
        total += channel(bias, out, d)[None, :]
    tl.store(
        y + first + rows[:, None] * d + out[None, :], total.to(y.dtype.element_ty), mask=inside & (out < d)[None, :]
    )


@triton.jit(do_not_specialize=["n", "rows_each"])
def cross_kernel(
    g, x, mean, rstd, partial, sums, n, rows_each,
    d: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``G^T xs`` and the sum of ``G`` over each part of the rows."""
    tile, part = tl.program_id(0), tl.program_id(1)
    TILES: tl.constexpr = (d + BLOCK_D - 1) // BLOCK_D
    left = tile // TILES * BLOCK_D + tl.arange(0, BLOCK_D)
    right = tile % TILES * BLOCK_D + tl.arange(0, BLOCK_D)
    right_mean, right_rstd = channel(mean, right, d), channel(rstd, right, d)
    count = tl.minimum(rows_each, n - part * rows_each)
    g += part * rows_each * d
    x += part * rows_each * d
    rows = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    # The sum as a product with ones: the matrix units add up over the rows, which lie across threads.
    ones = tl.full([BLOCK_N, 16], 1.0, tl.float32).to(g.dtype.element_ty)
    summed = tl.zeros([BLOCK_D, 16], tl.float32)
    for start in range(0, rows_each, BLOCK_N):
        inside = (start + rows < count)[:, None]
        line = (start + rows)[:, None] * d
        upstream = tl.load(g + line + left[None, :], mask=inside & (left < d)[None, :], other=0.0)
        values = tl.load(x + line + right[None, :], mask=inside & (right < d)[None, :], other=0.0)
        xs = _standardize(values, right_mean, right_rstd, inside)
        total = product(tl.trans(upstream), xs, total, PRECISION)
        summed = product(tl.trans(upstream), ones, summed, PRECISION)
    there = (left < d)[:, None] & (right < d)[None, :]
    tl.store(partial + part * d * d + left[:, None] * d + right[None, :], total, mask=there)
    if tile % TILES == 0:
        tl.store(sums + part * d + left, tl.sum(summed, 1) / 16, mask=left < d)


@triton.jit(do_not_specialize=["parts"])
def merge_cross_kernel(
    partial, sums, w, matrix, weight_gradient, bias_gradient, first, second, parts,
    d: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """From the parts of ``P = G^T xs``: the gradients of gamma and beta; of each block of rows of ``P`` its share in
    ``s1 = A^T sum(G)`` and ``s2_k = sum_i A_ik P_ik``."""
    block = tl.program_id(0)
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_D)
    part = tl.arange(0, BLOCK_P)
    there = (rows < d)[:, None] & (columns < d)[None, :]
    places = rows[:, None] * d + columns[None, :]
    p = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for start in range(0, parts, BLOCK_P):
        here = start + part < parts
        values = tl.load(
            partial + (start + part)[:, None, None] * d * d + places[None, :, :],
            mask=here[:, None, None] & there[None, :, :], other=0.0,
        )  # fmt: skip
        p += tl.sum(values, 0)
        of_part = tl.load(
            sums + (start + part)[:, None] * d + rows[None, :], mask=here[:, None] & (rows < d)[None, :], other=0.0
        )
        total += tl.sum(of_part, 0)
    if WEIGHT:
        whitening = tl.load(w + places, mask=there, other=0.0)
        tl.store(weight_gradient + rows, tl.sum(whitening * p, 1), mask=rows < d)
    if BIAS:
        tl.store(bias_gradient + rows, total, mask=rows < d)
    a = tl.load(matrix + places, mask=there, other=0.0).to(tl.float32)
    tl.store(first + block * d + columns, tl.sum(a * total[:, None], 0), mask=columns < d)
    tl.store(second + block * d + columns, tl.sum(a * p, 0), mask=columns < d)


@triton.jit(do_not_specialize=["n", "blocks"])
def gradient_kernel(
    g, x, mean, rstd, matrix, first, second, dx, n, blocks,
    d: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """``(G A - s1 / n - xs s2 / (n - 1)) rstd``; in float32 to the last, so that no range is left on the way."""
    TILES: tl.constexpr = (d + BLOCK_D - 1) // BLOCK_D
    block = tl.program_id(0) // TILES
    columns = tl.program_id(0) % TILES * BLOCK_D + tl.arange(0, BLOCK_D)
    rows = tl.arange(0, BLOCK_N)
    inside = (rows < n - block * BLOCK_N)[:, None]
    start = block * BLOCK_N * d
    # What the product does not need is asked for first, so that it is there when the product is.
    within = inside & (columns < d)[None, :]
    values = tl.load(x + start + rows[:, None] * d + columns[None, :], mask=within, other=0.0)
    share = tl.arange(0, BLOCK_B)
    shared = (share < blocks)[:, None] & (columns < d)[None, :]
    s1 = tl.sum(tl.load(first + share[:, None] * d + columns[None, :], mask=shared, other=0.0), 0)
    s2 = tl.sum(tl.load(second + share[:, None] * d + columns[None, :], mask=shared, other=0.0), 0)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for k in range(0, d, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        upstream = tl.load(
            g + start + rows[:, None] * d + inner[None, :], mask=inside & (inner < d)[None, :], other=0.0
        )
        there = (inner < d)[:, None] & (columns < d)[None, :]
        a = tl.load(matrix + inner[:, None] * d + columns[None, :], mask=there, other=0.0)
        total = product(upstream, a, total, PRECISION)
    scale = channel(rstd, columns, d)
    xs = _standardize(values, channel(mean, columns, d), scale, within).to(tl.float32)
    total = (total - (s1 / n)[None, :] - xs * (s2 / (n - 1))[None, :]) * scale[None, :]
    tl.store(dx + start + rows[:, None] * d + columns[None, :], total.to(dx.dtype.element_ty), mask=within)
