"""Triton kernels of `pool_rows`: y = softmax(scale · a x̂ᵀ) x̂ of each sample, x̂ = r x with r = rstd of the row, and its gradients.

    scores    w before it is scaled, r [N], the tile's softmax sums      reads x              writes w [N, M]
    factors   of a tile, from the sums of its sample's tiles
    weights   w = r P, P = softmax of scale · r (x aᵀ) over a sample     reads w              writes w, in place
    sums      y = wᵀ x, by blocks of columns                             reads w, x           writes y
    delta     delta = Σ y dy of each query of a sample                   reads the values that y became, and their gradients
    dscores   e = r dS = scale · w ∘ (r (x dyᵀ) − delta)                 reads x, w           writes e [N, M]
    drows     g = (e a + w dy) / r = dS a + P dy, the gradient of x̂      reads e, w           writes g

The gradient of a is dSᵀ x̂ = eᵀ x. All products take their tiles straight from memory, so that loads run ahead of them; with the softmax
between the loads and the products of one kernel, sums took six times as long. Tiles of rows begin and end with samples, whose dy is read
from the L2 cache. Scores are taken from the tile's largest and leave as r exp(score − largest); what the sample's softmax scales them by
is the same for all rows of a tile, so that weights needs no scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.tiles import zero_slack
from gem_kernels.triton.dense.norm_gdpa_kernels import moments
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
    """Sample, block of it, rows and which of them are live of the program's tile; none past the last tile."""
    entry = tl.load(tiles + tl.program_id(0))
    inside = tl.program_id(0) < tl.load(tile_count)
    sample, block = tl.where(inside, entry >> 32, 0), entry & 0xFFFFFFFF
    i = tl.load(offsets + sample).to(tl.int64) + block * BLOCK_N + tl.arange(0, BLOCK_N)
    return sample, block, i, inside & (i < tl.load(offsets + sample + 1)), inside


@triton.jit
def _place(offsets, sample, BLOCK_N: tl.constexpr):
    """Of a sample's first tile among at most rows // BLOCK_N + samples places of tiles."""
    return tl.load(offsets + sample).to(tl.int64) // BLOCK_N + sample


@triton.jit(do_not_specialize=["batch", "rows"])
def pool_rows_scores_kernel(
    x, a, sums, offsets, tiles, tile_count, w, r, most, total, batch, rows: tl.int64, scale, eps,
    C: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a tile of rows: r, r exp2(score − most) with most the tile's largest score of a query, in base 2, and its exponentials' sum.

    r is zero past the last offset. ``sums``: over the rows, in PARTS parts, or None."""
    zero_slack(r, offsets, batch, rows, 1, 1, 1, 1, 1)
    sample, block, i, live, inside = _tile(tiles, tile_count, offsets, BLOCK_N)
    j = tl.arange(0, M)
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    squares = tl.zeros([BLOCK_N], tl.float32)
    for start in tl.range(0, tl.where(inside, C, 0), BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        x_tile = _load(x, i, live, c, C)
        if sums is None and x_tile.dtype.primitive_bitwidth == 16:
            # The pipeliner counts no slot for a product under way when the tile also has a use in registers: from there it needs none.
            x_tile = own_copy(x_tile)
        acc = tl.dot(x_tile, tl.trans(_load(a, j, j < M, c, C)), acc, input_precision=PRECISION)
        if sums is None:
            values = x_tile.to(tl.float32)
            squares += tl.sum(values * values, 1)
    if sums is None:
        rstd = tl.rsqrt(squares / C + eps)
    else:
        mu, variance = moments(sums, i, live, rows, C, PARTS)
        rstd = tl.rsqrt(variance + mu * mu + eps)
    tl.store(r + i, rstd, live)
    scores = tl.where(live[:, None], acc * (rstd * (scale * LOG2E))[:, None], _LOW)
    above = tl.max(scores, 0)
    weights = tl.exp2(scores - above[None, :])
    to = (_place(offsets, sample, BLOCK_N) + block) * M + j
    tl.store(most + to, above, (j < M) & inside)
    tl.store(total + to, tl.sum(weights, 0), (j < M) & inside)
    tl.store(w + i[:, None] * M + j[None, :], (weights * rstd[:, None]).to(w.dtype.element_ty), live[:, None])


@triton.jit
def pool_rows_factors_kernel(
    most, total, offsets, tiles, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """``total`` of a sample's tiles becomes exp2(most of the tile − most of the sample) over the sample's sum; CHUNK tiles at a time."""
    PARTS: tl.constexpr = M // BLOCK_M
    sample = tl.load(tiles + tl.program_id(0) // PARTS) >> 32
    j = tl.program_id(0) % PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    first = _place(offsets, sample, BLOCK_N)
    count = tl.cdiv(tl.load(offsets + sample + 1) - tl.load(offsets + sample), BLOCK_N)
    above = tl.full([BLOCK_M], _LOW, tl.float32)
    whole = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, count, CHUNK):
        t = start + tl.arange(0, CHUNK)
        at, there = (first + t)[:, None] * M + j[None, :], (t < count)[:, None]
        tops = tl.load(most + at, there, _LOW)
        higher = tl.maximum(above, tl.max(tops, 0))
        whole = whole * tl.exp2(above - higher) + tl.sum(tl.load(total + at, there, 0.0) * tl.exp2(tops - higher[None, :]), 0)
        above = higher
    for start in range(0, count, CHUNK):
        t = start + tl.arange(0, CHUNK)
        at, there = (first + t)[:, None] * M + j[None, :], (t < count)[:, None]
        tops = tl.load(most + at, there, _LOW)
        tl.store(total + at, tl.exp2(tops - above[None, :]) / whole[None, :], there)


@triton.jit
def pool_rows_weights_kernel(w, factors, offsets, tiles, tile_count, M: tl.constexpr, BLOCK_N: tl.constexpr):
    """w of a tile of rows, scaled by the tile's factors."""
    sample, block, i, live, inside = _tile(tiles, tile_count, offsets, BLOCK_N)
    j = tl.arange(0, M)
    factor = tl.load(factors + (_place(offsets, sample, BLOCK_N) + block) * M + j, (j < M) & inside, 0.0)
    weights = _load(w, i, live, j, M).to(tl.float32) * factor[None, :]
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


@triton.jit(do_not_specialize=["rows", "each"])
def pool_rows_delta_kernel(
    o, do, bias, delta, rows, each, stride_on: tl.constexpr, stride_og: tl.constexpr, stride_gn: tl.constexpr, stride_gg: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = Σ (o − bias) do of ROWS queries, ``each`` of a group."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, D_PAD)
    group, n = i // each, (i % each).to(tl.int64)
    mask = (i < rows)[:, None] & (c < D)[None, :]
    values = tl.load(o + (n * stride_on + group * stride_og)[:, None] + c[None, :], mask, 0.0).to(tl.float32)
    if bias is not None:
        values -= tl.load(bias + (group * D)[:, None] + c[None, :], mask, 0.0).to(tl.float32)
    product = values * tl.load(do + (n * stride_gn + group * stride_gg)[:, None] + c[None, :], mask, 0.0).to(tl.float32)
    tl.store(delta + i, tl.sum(product, 1), i < rows)


@triton.jit(do_not_specialize=["batch", "rows"])
def pool_rows_dscores_kernel(
    w, x, r, offsets, tiles, tile_count, dy, delta, e, batch, rows: tl.int64, scale,
    C: tl.constexpr, M: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """e of a tile of rows; zeros past the last offset."""
    zero_slack(e, offsets, batch, rows, M, M, 1, M, M)
    sample, _, i, live, inside = _tile(tiles, tile_count, offsets, BLOCK_N)
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
    sample, _, i, live, inside = _tile(tiles, tile_count, offsets, BLOCK_N)
    queries, j = _queries(sample, batch, M, G), tl.arange(0, M)
    e_tile, w_tile = _load(e, i, live, j, M), _load(w, i, live, j, M)
    divided = 1.0 / tl.load(r + i, live, 1.0)
    for start in tl.range(0, tl.where(inside, C, 0), BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        found = tl.dot(e_tile, _load(a, j, j < M, c, C), input_precision=PRECISION)
        found = tl.dot(w_tile, _load(dy, queries, j < M, c, C), found, input_precision=PRECISION)
        tl.store(g + i[:, None] * C + c[None, :], (found * divided[:, None]).to(g.dtype.element_ty), live[:, None])
