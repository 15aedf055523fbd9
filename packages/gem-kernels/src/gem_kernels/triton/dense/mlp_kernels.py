"""Triton kernels of `mlp`: the hidden tile lives in registers and never reaches memory in the forward pass.

             w1ᵀ chunk          act        w2ᵀ chunk
   x rows ┌───────────┐  z ┌────────┐  a ┌───────────┐
   BLOCK_M│  BLOCK_H  │ ─► │registers│ ─► │ += y rows │     for every chunk of BLOCK_H hidden columns
          └───────────┘    └────────┘    └───────────┘

A norm in front is applied lazily: z = r (x w1ᵀ − μ Σw1) + b1 with the row statistics of the whole x tile. Backward recomputes z and
da = dy w2 chunk by chunk and leaves a = act(z) and dz in a workspace, from which dx and the weights' gradients are plain products.
x + residual is stored first and read back, so that it enters the products from shared memory like any loaded tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import _value, _value_and_slope
from gem_kernels.triton.dense.tiles import load_tile, store_tile


@triton.jit
def _row_statistics(x, IN: tl.constexpr, IN_PAD: tl.constexpr, LAYER: tl.constexpr, eps):
    """Mean (0 for RMSNorm) and rstd of whole rows [rows, IN_PAD], zero beyond IN."""
    v = x.to(tl.float32)
    mu = tl.sum(v, 1) / IN
    if LAYER:
        v = tl.where((tl.arange(0, IN_PAD) < IN)[None, :], v - mu[:, None], 0.0)
    else:
        mu = mu * 0.0
    return mu, tl.rsqrt(tl.sum(v * v, 1) / IN + eps)


@triton.jit
def _hidden(x, w1, b1, column_sum, mu, r, h, IN_PAD: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_H: tl.constexpr,
            NORM: tl.constexpr, LAYER: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """z of one chunk; ``w1`` is its tile [BLOCK_H, IN_PAD]."""
    z = tl.dot(x, tl.trans(w1), input_precision=PRECISION)
    j = h + tl.arange(0, BLOCK_H)
    if LAYER:
        z -= mu[:, None] * tl.load(column_sum + j, mask=j < HIDDEN, other=0.0)[None, :]
    if NORM:
        z *= r[:, None]
    if BIAS:
        z += tl.load(b1 + j, mask=j < HIDDEN, other=0.0).to(tl.float32)[None, :]
    return z


@triton.jit(do_not_specialize=["rows"])
def mlp_fwd_kernel(
    x, residual, w1, b1, w2, b2, column_sum, y, total, mean, rstd, stride_x: tl.constexpr, stride_r: tl.constexpr, rows, eps, gain,
    IN: tl.constexpr, IN_PAD: tl.constexpr, HIDDEN: tl.constexpr, OUT: tl.constexpr, OUT_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr,
    BIAS1: tl.constexpr, BIAS2: tl.constexpr, RESIDUAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y of BLOCK_M rows. ``gain`` is what the folded activation still has to be multiplied with."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M
    i = m + tl.arange(0, BLOCK_M)
    tile = load_tile(x, stride_x, m, 0, rows, IN, BLOCK_M, IN_PAD, False)
    if RESIDUAL:
        added = load_tile(residual, stride_r, m, 0, rows, IN, BLOCK_M, IN_PAD, False)
        store_tile(total, IN, tile.to(tl.float32) + added.to(tl.float32), m, 0, rows, IN, BLOCK_M, IN_PAD, False)
        tl.debug_barrier()
        tile = load_tile(total, IN, m, 0, rows, IN, BLOCK_M, IN_PAD, False)
    mu = tl.zeros([BLOCK_M], tl.float32)
    r = mu
    if NORM:
        mu, r = _row_statistics(tile, IN, IN_PAD, LAYER, eps)
        tl.store(rstd + i, r, mask=i < rows)
        if LAYER:
            tl.store(mean + i, mu, mask=i < rows)
    acc = tl.zeros([BLOCK_M, OUT_PAD], tl.float32)
    for h in tl.range(0, HIDDEN, BLOCK_H):
        up = load_tile(w1, IN, h, 0, HIDDEN, IN, BLOCK_H, IN_PAD, TMA)
        down = load_tile(w2, HIDDEN, 0, h, OUT, HIDDEN, OUT_PAD, BLOCK_H, TMA)
        z = _hidden(tile, up, b1, column_sum, mu, r, h, IN_PAD, HIDDEN, BLOCK_H, NORM, LAYER, BIAS1, PRECISION)
        a = _value(z, ACT, FAST).to(tile.dtype)
        acc = tl.dot(a, tl.trans(down), acc, input_precision=PRECISION)
    acc *= gain
    if BIAS2:
        o = tl.arange(0, OUT_PAD)
        acc += tl.load(b2 + o, mask=o < OUT, other=0.0).to(tl.float32)[None, :]
    store_tile(y, OUT, acc, m, 0, rows, OUT, BLOCK_M, OUT_PAD, False)


@triton.jit(do_not_specialize=["rows"])
def mlp_bwd_kernel(
    x, dy, w1, b1, w2, column_sum, mean, rstd, hidden, dhidden, db1, db2,
    stride_x: tl.constexpr, stride_dy: tl.constexpr, rows, gain,
    IN: tl.constexpr, IN_PAD: tl.constexpr, HIDDEN: tl.constexpr, OUT: tl.constexpr, OUT_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, ACT: tl.constexpr, FAST: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr,
    BIAS1: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden = act(z) and dhidden = dz [rows, HIDDEN] of BLOCK_M rows; column sums of dz and dy in db1 and db2 [programs, columns]."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M
    i = m + tl.arange(0, BLOCK_M)
    tile = load_tile(x, stride_x, m, 0, rows, IN, BLOCK_M, IN_PAD, False)
    grad = load_tile(dy, stride_dy, m, 0, rows, OUT, BLOCK_M, OUT_PAD, False)
    if db2 is not None:
        o = tl.arange(0, OUT_PAD)
        tl.store(db2 + tl.program_id(0).to(tl.int64) * OUT + o, tl.sum(grad.to(tl.float32), 0), mask=o < OUT)
    mu = tl.zeros([BLOCK_M], tl.float32)
    r = mu
    if NORM:
        r = tl.load(rstd + i, mask=i < rows, other=0.0)
        if LAYER:
            mu = tl.load(mean + i, mask=i < rows, other=0.0)
    for h in tl.range(0, HIDDEN, BLOCK_H):
        up = load_tile(w1, IN, h, 0, HIDDEN, IN, BLOCK_H, IN_PAD, TMA)
        down = load_tile(w2, HIDDEN, 0, h, OUT, HIDDEN, OUT_PAD, BLOCK_H, TMA)
        z = _hidden(tile, up, b1, column_sum, mu, r, h, IN_PAD, HIDDEN, BLOCK_H, NORM, LAYER, BIAS1, PRECISION)
        da = tl.dot(grad, down, input_precision=PRECISION)
        a, slope = _value_and_slope(z, ACT, FAST)
        dz = da * (slope * gain)
        store_tile(hidden, HIDDEN, a * gain, m, h, rows, HIDDEN, BLOCK_M, BLOCK_H, TMA)
        store_tile(dhidden, HIDDEN, dz, m, h, rows, HIDDEN, BLOCK_M, BLOCK_H, TMA)
        if db1 is not None:
            j = h + tl.arange(0, BLOCK_H)
            valid = tl.where((i < rows)[:, None], dz, 0.0)
            tl.store(db1 + tl.program_id(0).to(tl.int64) * HIDDEN + j, tl.sum(valid, 0), mask=j < HIDDEN)
