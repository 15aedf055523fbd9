"""Triton kernels of `pool_rows`: y = softmax(scale · a x̂ᵀ) x̂ of each sample, x̂ = r x with r = rstd of the row, and its gradients.

    scores    s = scale · r (x aᵀ) [N, M] fp32, r [N]            reads x
    sums      y = Pᵀ x̂ / Σ P, by blocks of columns, lse [B, M]   reads s, x
    backward  dP = r (x dyᵀ), dS = scale · P ∘ (dP − Σ y dy), g = dS a + P dy, the gradient of x̂      reads s, x   writes r dS, g

The gradient of a is dSᵀ x̂ = (r dS)ᵀ x. A program of ``sums`` has BLOCK_C columns of a sample, and the transposed sum in registers: P and x
need not be turned. Programs of ``backward`` share the rows equally and begin and end within samples, as those of
`attention.backward_shared` do. Their products take dy of the sample and a from the L2 cache, BLOCK_C columns at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.backward_shared import samples_between
from gem_kernels.triton.attention.tiles import zero_slack

LOG2E = tl.constexpr(1.4426950408889634)
_LOW = tl.constexpr(-1e30)


@triton.jit
def _load(x, i, live, c, C: tl.constexpr):
    """[rows, columns] of a contiguous tensor of C columns, zeros where a row is not live."""
    return tl.load(x + i.to(tl.int64)[:, None] * C + c[None, :], live[:, None], 0.0)


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
        acc = tl.dot(x_tile, tl.trans(_load(a, j, j < M, c, C)), acc, input_precision=PRECISION)
        values = x_tile.to(tl.float32)
        squares += tl.sum(values * values, 1)
    rstd = tl.rsqrt(squares / C + eps)
    tl.store(r + i, rstd, live)
    tl.store(s + i[:, None] * M + j[None, :], acc * (rstd * scale)[:, None], live[:, None])


@triton.jit(do_not_specialize=["batch"])
def pool_rows_sums_kernel(
    s, x, r, offsets, tiles, y, lse, batch,
    C: tl.constexpr, M: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_C columns of y of a sample, and with the first of them lse, base 2; no rows: zeros, and an lse that makes P zero."""
    PARTS: tl.constexpr = C // BLOCK_C
    sample = tl.load(tiles + tl.program_id(0) // PARTS) >> 32
    c = tl.program_id(0) % PARTS * BLOCK_C + tl.arange(0, BLOCK_C)
    j = tl.arange(0, M)
    first, end = tl.load(offsets + sample).to(tl.int64), tl.load(offsets + sample + 1).to(tl.int64)
    most = tl.full([M], _LOW, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([BLOCK_C, M], tl.float32)
    for block in tl.range(0, tl.cdiv(end - first, BLOCK_N)):
        i = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
        live = i < end
        scores = tl.load(s + i[:, None] * M + j[None, :], live[:, None], _LOW) * LOG2E
        x_tile = _load(x, i, live, c, C)
        rstd = tl.load(r + i, live, 0.0)
        above = tl.maximum(most, tl.max(scores, 0))
        p = tl.where(live[:, None], tl.exp2(scores - above[None, :]), 0.0)
        shrunk = tl.exp2(most - above)
        most = above
        total = total * shrunk + tl.sum(p, 0)
        acc = tl.dot(tl.trans(x_tile), (p * rstd[:, None]).to(x_tile.dtype), acc * shrunk[None, :], input_precision=PRECISION)
    divided = tl.trans(acc * tl.where(total > 0, 1.0 / total, 0.0)[None, :])
    row = (j // (M // G) * batch.to(tl.int64) + sample) * (M // G) + j % (M // G)
    tl.store(y + row[:, None] * C + c[None, :], divided.to(y.dtype.element_ty))
    if tl.program_id(0) % PARTS == 0:
        tl.store(lse + sample * M + j, tl.where(total > 0, most + tl.log2(total), -_LOW))


@triton.jit(do_not_specialize=["batch", "rows"])
def pool_rows_bwd_kernel(
    s, x, r, offsets, a, y, dy, lse, ds, g, batch, rows: tl.int64, scale,
    C: tl.constexpr, M: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """r dS and g of a share of the rows; zeros past the last offset."""
    zero_slack(ds, offsets, batch, rows, M, M, 1, M, M)
    zero_slack(g, offsets, batch, rows, C, C, 1, C, C)
    share, shares = tl.program_id(0), tl.num_programs(0)
    keys = tl.load(offsets + batch).to(tl.int64)
    begin, end = keys * share // shares, keys * (share + 1) // shares
    first, after = samples_between(offsets, batch, begin, end)
    j = tl.arange(0, M)
    every = j < M
    for sample in tl.range(first, after):
        row0, stop = tl.load(offsets + sample).to(tl.int64), tl.load(offsets + sample + 1).to(tl.int64)
        block0 = tl.cdiv(tl.maximum(begin - row0, 0), BLOCK_N).to(tl.int32)
        block1 = tl.cdiv(tl.minimum(end, stop) - row0, BLOCK_N).to(tl.int32)
        queries = (j // (M // G) * batch.to(tl.int64) + sample) * (M // G) + j % (M // G)
        own_lse = tl.load(lse + tl.full([], sample, tl.int64) * M + j)
        delta = tl.zeros([M], tl.float32)
        for start in tl.range(0, C, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            delta += tl.sum(_load(y, queries, every, c, C).to(tl.float32) * _load(dy, queries, every, c, C).to(tl.float32), 1)
        for block in tl.range(block0, block1):
            i = row0 + block * BLOCK_N + tl.arange(0, BLOCK_N)
            live = i < stop
            dp = tl.zeros([BLOCK_N, M], tl.float32)
            for start in tl.range(0, C, BLOCK_C):
                c = start + tl.arange(0, BLOCK_C)
                dp = tl.dot(_load(x, i, live, c, C), tl.trans(_load(dy, queries, every, c, C)), dp, input_precision=PRECISION)
            rstd = tl.load(r + i, live, 0.0)
            scores = tl.load(s + i[:, None] * M + j[None, :], live[:, None], _LOW) * LOG2E
            p = tl.exp2(scores - own_lse[None, :])
            found_ds = p * (dp * rstd[:, None] - delta[None, :]) * scale
            tl.store(ds + i[:, None] * M + j[None, :], (found_ds * rstd[:, None]).to(ds.dtype.element_ty), live[:, None])
            ds_tile, p_tile = found_ds.to(dy.dtype.element_ty), p.to(dy.dtype.element_ty)
            for start in tl.range(0, C, BLOCK_C):
                c = start + tl.arange(0, BLOCK_C)
                found = tl.dot(ds_tile, _load(a, j, every, c, C), input_precision=PRECISION)
                found = tl.dot(p_tile, _load(dy, queries, every, c, C), found, input_precision=PRECISION)
                tl.store(g + i[:, None] * C + c[None, :], found.to(g.dtype.element_ty), live[:, None])
