"""Triton forward kernels of `norm_gdpa`: l = LN(q), o = gdpa(l, k, v) + l, out = RMSNorm(o) + q, norms over all heads of a row.

Both norms run over H·D, a product over one head only: a program that owned whole rows would hold so much that its loads and its products
had to take turns. So there are three passes, each bound by what it has to move, and l is never in memory:

    rows     mean and rstd of q                                              reads q
    heads    o = act(l kᵀ) v + l, l = (q − mean) · rstd made in registers    reads q, k, v    writes o, into out
    rows     out = o · out_rstd + q                                          reads o, q       writes out, in place

Slots of rows are found as in block_attention (`gem_kernels.triton.block.kernels`). Key rows beyond a sample are loaded as zeros; masked
scores are 0 before the activation and act(0) = 0. Rows past the last offset get zeros from the passes over rows; the others skip them.
"""

# ruff: noqa: RUF005 - the compiler knows no unpacking of tuples

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate
from gem_kernels.triton.block.kernels import locate


@triton.jit
def load_head(pointer, stride_row, rows, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """[ROWS, DP] of one head from ``pointer``, zeros beyond ``rows`` rows and D columns."""
    i = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    mask = (i < rows)[:, None] & (d < D)[None, :]
    return tl.load(pointer + (i[:, None] * stride_row + d[None, :]), mask=mask, other=0.0)


@triton.jit
def store_head(pointer, tile, stride_row, rows, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    i = tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    mask = (i < rows)[:, None] & (d < D)[None, :]
    tl.store(pointer + (i[:, None] * stride_row + d[None, :]), tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def normed(x, mu, r, D: tl.constexpr, DP: tl.constexpr):
    """l = (x − μ) r of one head, rounded to x's dtype; zeros beyond D."""
    l = (x.to(tl.float32) - mu[:, None]) * r[:, None]
    if D != DP:
        l = tl.where((tl.arange(0, DP) < D)[None, :], l, 0.0)
    return l.to(x.dtype)


@triton.jit
def load_rows(pointer, stride_row: tl.constexpr, stride_head: tl.constexpr, row, end, H: tl.constexpr, D: tl.constexpr,
              ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """[ROWS, COLUMNS] fp32: all heads of the rows from ``row`` on, zeros from row ``end`` and column H · D on."""
    i = row + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    at = c if stride_head == D else c // D * stride_head + c % D
    mask = (i < end)[:, None] & (c < H * D)[None, :]
    return tl.load(pointer + i[:, None] * stride_row + at[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(pointer, tile, row, rows, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The converse for a contiguous [rows, H, D]."""
    i = row + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    mask = (i < rows)[:, None] & (c < H * D)[None, :]
    tl.store(pointer + i[:, None] * (H * D) + c[None, :], tile.to(pointer.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["batch", "rows"])
def norm_gdpa_stats_kernel(
    q, mean, rstd, q_offsets, batch, rows, eps, stride_qn: tl.constexpr, stride_qh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Mean and rstd of ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    i = row + tl.arange(0, ROWS)
    end = tl.load(q_offsets + batch).to(tl.int64)
    x = load_rows(q, stride_qn, stride_qh, row, end, H, D, ROWS, COLUMNS)
    mu = tl.sum(x, 1) / (H * D)
    away = tl.where((tl.arange(0, COLUMNS) < H * D)[None, :], x - mu[:, None], 0.0)
    tl.store(mean + i, mu, mask=i < rows)
    tl.store(rstd + i, tl.where(i < end, tl.rsqrt(tl.sum(away * away, 1) / (H * D) + eps), 0.0), mask=i < rows)


@triton.jit
def _attend(l, k_tile, v_tile, acc, scale_in, act_id, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    s = tl.dot(l, tl.trans(k_tile), input_precision=PRECISION) * scale_in
    p = activate(s, act_id, ACT, ACT_SET, FAST)
    return tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["batch", "total_rows"])
def norm_gdpa_fwd_kernel(
    q, k, v, o, mean, rstd, q_offsets, k_offsets, act_ids, batch, total_rows, scale_in, gain,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_kn: tl.constexpr, stride_kh: tl.constexpr,
    stride_vn: tl.constexpr, stride_vh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
    RESIDENT: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o of SPAN rows of one head, BLOCK_M at a time. RESIDENT: all keys are in so many tiles, which stay on the chip; 0: they do not."""
    pid = tl.program_id(0).to(tl.int64)
    h = pid % H
    sample, start, rows, _position = locate(q_offsets, pid // H, batch, total_rows, SPAN)
    if (rows > 0) & (sample < batch):
        begin = tl.load(k_offsets + sample).to(tl.int64)
        keys = (tl.load(k_offsets + sample + 1).to(tl.int64) - begin).to(tl.int32)
        q += start * stride_qn + h * stride_qh
        k += begin * stride_kn + h * stride_kh
        v += begin * stride_vn + h * stride_vh
        o += start * (H * D) + h * D
        mean += start
        rstd += start
        act_id = 0
        if act_ids is not None:
            act_id = tl.load(act_ids + h)
        k_tiles = ()
        v_tiles = ()
        for t in tl.static_range(RESIDENT):
            k_tiles = k_tiles + (load_head(k + t * BLOCK_N * stride_kn, stride_kn, keys - t * BLOCK_N, BLOCK_N, D, DP),)
            v_tiles = v_tiles + (load_head(v + t * BLOCK_N * stride_vn, stride_vn, keys - t * BLOCK_N, BLOCK_N, D, DP),)
        for m in tl.range(0, rows, BLOCK_M):
            i = m + tl.arange(0, BLOCK_M)
            x = load_head(q + tl.cast(m, tl.int64) * stride_qn, stride_qn, rows - m, BLOCK_M, D, DP)
            l = normed(x, tl.load(mean + i, mask=i < rows, other=0.0), tl.load(rstd + i, mask=i < rows, other=0.0), D, DP)
            acc = tl.zeros([BLOCK_M, DP], tl.float32)
            for t in tl.static_range(RESIDENT):
                acc = _attend(l, k_tiles[t], v_tiles[t], acc, scale_in, act_id, ACT, ACT_SET, FAST, PRECISION)
            if RESIDENT == 0:
                for n in tl.range(0, keys, BLOCK_N):
                    at = tl.cast(n, tl.int64)
                    k_tile = load_head(k + at * stride_kn, stride_kn, keys - n, BLOCK_N, D, DP)
                    v_tile = load_head(v + at * stride_vn, stride_vn, keys - n, BLOCK_N, D, DP)
                    acc = _attend(l, k_tile, v_tile, acc, scale_in, act_id, ACT, ACT_SET, FAST, PRECISION)
            acc = acc * gain + l.to(tl.float32)
            store_head(o + tl.cast(m, tl.int64) * (H * D), acc, H * D, rows - m, BLOCK_M, D, DP)


@triton.jit(do_not_specialize=["batch", "rows"])
def norm_gdpa_out_kernel(
    q, out, out_rstd, q_offsets, batch, rows, eps, stride_qn: tl.constexpr, stride_qh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out = o · out_rstd + q of ROWS rows, o being what ``out`` holds."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    i = row + tl.arange(0, ROWS)
    end = tl.load(q_offsets + batch).to(tl.int64)
    x = load_rows(q, stride_qn, stride_qh, row, end, H, D, ROWS, COLUMNS)
    o = load_rows(out, H * D, D, row, end, H, D, ROWS, COLUMNS)
    r2 = tl.where(i < end, tl.rsqrt(tl.sum(o * o, 1) / (H * D) + eps), 0.0)
    tl.store(out_rstd + i, r2, mask=i < rows)
    store_rows(out, o * r2[:, None] + x, row, rows, H, D, ROWS, COLUMNS)
