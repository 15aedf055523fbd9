"""Triton kernels of `norm`: memory-bound, one pass over the rows, a few whole rows a program.

Backward of x̂ = (x − μ) r (RMSNorm: μ = 0) from the gradient g of x̂: r (g − mean(g) − x̂ mean(g x̂)), without mean(g) for RMSNorm.
Gradients of weight and bias, and the sums of dx, are column sums: every program adds up its rows in registers and stores one partial row,
and `gem_kernels.triton.common.sums` adds those up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def norm_fwd_kernel(
    x, residual, weight, bias, y, total, mean, rstd, stride_x: tl.constexpr, stride_r: tl.constexpr, rows, eps,
    C: tl.constexpr, C_PAD: tl.constexpr, ROWS: tl.constexpr, LAYER: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """y = norm(x + residual) · weight + bias of ROWS rows; total = x + residual, rounded before the norm is taken of it."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, C_PAD)
    mask = (i < rows)[:, None] & (c < C)[None, :]
    at = i[:, None] * C + c[None, :]
    v = tl.load(x + i[:, None] * stride_x + c[None, :], mask=mask, other=0.0)
    if RESIDUAL:
        v = (v.to(tl.float32) + tl.load(residual + i[:, None] * stride_r + c[None, :], mask=mask, other=0.0).to(tl.float32)).to(v.dtype)
        tl.store(total + at, v, mask=mask)
    v = v.to(tl.float32)
    if LAYER:
        mu = tl.sum(v, 1) / C
        v = tl.where((c < C)[None, :], v - mu[:, None], 0.0)
        tl.store(mean + i, mu, mask=i < rows)
    r = tl.rsqrt(tl.sum(v * v, 1) / C + eps)
    tl.store(rstd + i, r, mask=i < rows)
    v = v * r[:, None]
    if WEIGHT:
        v = v * tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        v = v + tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, v.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _columns(x, KEPT: tl.constexpr):
    """What is added to column sums: x itself, or its sums [1, C]."""
    return x if KEPT else tl.sum(x, 0)[None, :]


@triton.jit(do_not_specialize=["rows"])
def norm_bwd_kernel(
    x, weight, dy, dtotal, mean, rstd, dx, xhat, dweight, dbias, dsum,
    stride_x: tl.constexpr, stride_dy: tl.constexpr, stride_dt: tl.constexpr, stride_part: tl.constexpr, rows,
    C: tl.constexpr, C_PAD: tl.constexpr, ROWS: tl.constexpr, LAYER: tl.constexpr, NORMED: tl.constexpr,
    WEIGHT: tl.constexpr, DTOTAL: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, DSUM: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """dx (+ dtotal) of every program's share of the rows, and a row of partial sums of dweight, dbias and dx (+ dtotal), fp32.

    EACH: blocks that a program does, one after the other; 0: as many as there are for all programs. NORMED: ``x`` holds x̂. Where ``xhat``
    is given, x̂ is stored there. From the last row to the first: a product before this one leaves the last rows of its result in the L2
    cache.
    """
    c = tl.arange(0, C_PAD)
    scale = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)[None, :] if WEIGHT else 1.0
    # by row until the end where turns are short, since what a warp holds of a column is of few rows; longer ones have no registers for it
    KEPT: tl.constexpr = ROWS if EACH else 1
    dweight_sum = tl.zeros([KEPT, C_PAD], tl.float32)
    dbias_sum = tl.zeros([KEPT, C_PAD], tl.float32)
    dx_sum = tl.zeros([KEPT, C_PAD], tl.float32)
    # a loop over one block is none to the compiler
    if EACH:
        blocks, first, step, turns = tl.num_programs(0) * EACH, tl.program_id(0) * EACH, 1, EACH
    else:
        blocks, first, step = tl.cdiv(rows, ROWS), tl.program_id(0), tl.num_programs(0)
        turns = tl.cdiv(blocks - first, step)
    for turn in range(turns):
        block = first + turn * step
        i = tl.cast(blocks - 1 - block, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (i < rows)[:, None] & (c < C)[None, :]
        r = tl.load(rstd + i, mask=i < rows, other=0.0)[:, None]
        hat = tl.load(x + i[:, None] * stride_x + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if not NORMED:
            if LAYER:
                hat = tl.where(mask, hat - tl.load(mean + i, mask=i < rows, other=0.0)[:, None], 0.0)
            hat = hat * r
        if xhat is not None:
            tl.store(xhat + i[:, None] * C + c[None, :], hat.to(xhat.dtype.element_ty), mask=mask)
        g = tl.load(dy + i[:, None] * stride_dy + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if DWEIGHT:
            dweight_sum += _columns(g * hat, EACH)
        if DBIAS:
            dbias_sum += _columns(g, EACH)
        g = g * scale
        d = g - hat * (tl.sum(g * hat, 1) / C)[:, None]
        if LAYER:
            d = d - (tl.sum(g, 1) / C)[:, None]
        d = d * r
        if DTOTAL:
            d = d + tl.load(dtotal + i[:, None] * stride_dt + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if DSUM:
            dx_sum += _columns(d, EACH)
        tl.store(dx + i[:, None] * C + c[None, :], d.to(dx.dtype.element_ty), mask=mask)
    partial = tl.program_id(0).to(tl.int64) * stride_part + c
    if DWEIGHT:
        tl.store(dweight + partial, tl.sum(dweight_sum, 0), mask=c < C)
    if DBIAS:
        tl.store(dbias + partial, tl.sum(dbias_sum, 0), mask=c < C)
    if DSUM:
        tl.store(dsum + partial, tl.sum(dx_sum, 0), mask=c < C)
