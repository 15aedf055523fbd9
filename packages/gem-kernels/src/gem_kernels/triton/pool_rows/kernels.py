"""Triton kernels of `pool_rows`: y = softmax(scale · a x̂ᵀ) x̂ of each sample, x̂ = r x with r = rstd of the row, and its gradients.

    scores    s = scale · r (x aᵀ) [N, M] fp32, r [N]                    reads x              writes s
    weights   w = r P, P = softmax of s over the rows of a sample        reads s              writes w [N, M]
    sums      y = wᵀ x, by blocks of columns                             reads w, x           writes y
    delta     delta = Σ y dy of each query of a sample                   reads y, dy
    dscores   e = r dS = scale · w ∘ (r (x dyᵀ) − delta)                 reads x, w           writes e [N, M]
    drows     g = (e a + w dy) / r = dS a + P dy, the gradient of x̂      reads e, w           writes g

The gradient of a is dSᵀ x̂ = eᵀ x. All products take their tiles straight from memory, so that loads run ahead of them; with the softmax
between the loads and the products of one kernel, sums took six times as long. Tiles of rows begin and end with samples, whose dy is read
from the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.tiles import zero_slack
from gem_kernels.triton.dense.norm_linear_kernels import own_copy

LOG2E = tl.constexpr(1.4426950408889634)
_LOW = tl.constexpr(-1e30)


@triton.jit
def _load(x, i, live, c, C: tl.constexpr):
    """[rows, columns] of a contiguous tensor of C columns, zeros where a row is not live."""
    return tl.load(x + i.to(tl.int64)[:, None] * C + c[None, :], live[:, None], 0.0)


@triton.jit
def _queries(sample, batch, M: tl.constexpr, G: tl.constexpr):
    """Rows of y and dy of a sample's queries."""
    j = tl.arange(0, M)
    return (j // (M // G) * batch.to(tl.int64) + sample) * (M // G) + j % (M // G)


@triton.jit
def _tile(tiles, tile_count, offsets, BLOCK_N: tl.constexpr):
    """Sample, rows and which of them are live of the program's tile; none past the last tile."""
    entry = tl.load(tiles + tl.program_id(0))
    inside = tl.program_id(0) < tl.load(tile_count)
    sample = tl.where(inside, entry >> 32, 0)
    i = tl.load(offsets + sample).to(tl.int64) + (entry & 0xFFFFFFFF) * BLOCK_N + tl.arange(0, BLOCK_N)
    return sample, i, inside & (i < tl.load(offsets + sample + 1)), inside


@triton.jit(do_not_specialize=["rows"])
def pool_rows_scores_kernel(
    x, a, s, r, rows, scale, eps, C: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """s and r of BLOCK_N rows."""
    i = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, M)
    live = i < rows
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    squares = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        x_tile = _load(x, i, live, c, C)
        if x_tile.dtype.primitive_bitwidth == 16:
            # The pipeliner counts no slot for a product under way when the tile also has a use in registers: from there it needs none.
            x_tile = own_copy(x_tile)
        acc = tl.dot(x_tile, tl.trans(_load(a, j, j < M, c, C)), acc, input_precision=PRECISION)
        values = x_tile.to(tl.float32)
        squares += tl.sum(values * values, 1)
    rstd = tl.rsqrt(squares / C + eps)
    tl.store(r + i, rstd, live)
    tl.store(s + i[:, None] * M + j[None, :], acc * (rstd * scale)[:, None], live[:, None])


@triton.jit
def pool_rows_weights_kernel(s, r, offsets, tiles, w, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """w of BLOCK_M queries of a sample: once over its rows for the softmax's sums, once for the weights."""
    PARTS: tl.constexpr = M // BLOCK_M
    sample = tl.load(tiles + tl.program_id(0) // PARTS) >> 32
    j = tl.program_id(0) % PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    first, end = tl.load(offsets + sample).to(tl.int64), tl.load(offsets + sample + 1).to(tl.int64)
    most = tl.full([BLOCK_M], _LOW, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for block in tl.range(0, tl.cdiv(end - first, BLOCK_N)):
        i = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
        scores = tl.load(s + i[:, None] * M + j[None, :], (i < end)[:, None], _LOW) * LOG2E
        above = tl.maximum(most, tl.max(scores, 0))
        total = total * tl.exp2(most - above) + tl.sum(tl.exp2(scores - above[None, :]), 0)
        most = above
    for block in tl.range(0, tl.cdiv(end - first, BLOCK_N)):
        i = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
        live = i < end
        scores = tl.load(s + i[:, None] * M + j[None, :], live[:, None], _LOW) * LOG2E
        weights = tl.exp2(scores - most[None, :]) * (1.0 / total)[None, :] * tl.load(r + i, live, 0.0)[:, None]
        tl.store(w + i[:, None] * M + j[None, :], weights.to(w.dtype.element_ty), live[:, None])


@triton.jit(do_not_specialize=["batch"])
def pool_rows_sums_kernel(
    w, x, offsets, tiles, y, batch,
    C: tl.constexpr, M: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_C columns of y of a sample."""
    PARTS: tl.constexpr = C // BLOCK_C
    sample = tl.load(tiles + tl.program_id(0) // PARTS) >> 32
    c = tl.program_id(0) % PARTS * BLOCK_C + tl.arange(0, BLOCK_C)
    first, end = tl.load(offsets + sample).to(tl.int64), tl.load(offsets + sample + 1).to(tl.int64)
    acc = tl.zeros([M, BLOCK_C], tl.float32)
    for block in tl.range(0, tl.cdiv(end - first, BLOCK_N)):
        i = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
        live = i < end
        w_tile = _load(w, i, live, tl.arange(0, M), M)
        acc = tl.dot(tl.trans(w_tile), _load(x, i, live, c, C), acc, input_precision=PRECISION)
    tl.store(y + _queries(sample, batch, M, G)[:, None] * C + c[None, :], acc.to(y.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])
def pool_rows_delta_kernel(y, dy, delta, rows, C: tl.constexpr, C_PAD: tl.constexpr, ROWS: tl.constexpr):
    """delta of ROWS rows of y."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, C_PAD)
    at, mask = i.to(tl.int64)[:, None] * C + c[None, :], (i < rows)[:, None] & (c < C)[None, :]
    product = tl.load(y + at, mask, 0.0).to(tl.float32) * tl.load(dy + at, mask, 0.0).to(tl.float32)
    tl.store(delta + i, tl.sum(product, 1), i < rows)


@triton.jit(do_not_specialize=["batch", "rows"])
def pool_rows_dscores_kernel(
    w, x, r, offsets, tiles, tile_count, dy, delta, e, batch, rows: tl.int64, scale,
    C: tl.constexpr, M: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """e of a tile of rows; zeros past the last offset."""
    zero_slack(e, offsets, batch, rows, M, M, 1, M, M)
    sample, i, live, inside = _tile(tiles, tile_count, offsets, BLOCK_N)
    queries, j = _queries(sample, batch, M, G), tl.arange(0, M)
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    for start in tl.range(0, tl.where(inside, C, 0), BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        acc = tl.dot(_load(x, i, live, c, C), tl.trans(_load(dy, queries, j < M, c, C)), acc, input_precision=PRECISION)
    weights = _load(w, i, live, j, M).to(tl.float32)
    found = weights * (acc * tl.load(r + i, live, 0.0)[:, None] - tl.load(delta + queries)[None, :]) * scale
    tl.store(e + i[:, None] * M + j[None, :], found.to(e.dtype.element_ty), live[:, None])


@triton.jit(do_not_specialize=["batch", "rows"])
def pool_rows_drows_kernel(
    e, w, r, offsets, tiles, tile_count, a, dy, g, batch, rows: tl.int64,
    C: tl.constexpr, M: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """g of a tile of rows, BLOCK_C columns at a time; zeros past the last offset."""
    zero_slack(g, offsets, batch, rows, C, C, 1, C, C)
    sample, i, live, inside = _tile(tiles, tile_count, offsets, BLOCK_N)
    queries, j = _queries(sample, batch, M, G), tl.arange(0, M)
    e_tile, w_tile = _load(e, i, live, j, M), _load(w, i, live, j, M)
    divided = 1.0 / tl.load(r + i, live, 1.0)
    for start in tl.range(0, tl.where(inside, C, 0), BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        found = tl.dot(e_tile, _load(a, j, j < M, c, C), input_precision=PRECISION)
        found = tl.dot(w_tile, _load(dy, queries, j < M, c, C), found, input_precision=PRECISION)
        tl.store(g + i[:, None] * C + c[None, :], (found * divided[:, None]).to(g.dtype.element_ty), live[:, None])
