"""Triton forward kernel of `norm_gdpa`: l = LN(q), o = gdpa(l, k, v) + l, out = RMSNorm(o) + q, norms over all heads of a row.

A program owns BLOCK_M query rows of one sample with all their heads, because both norms run over H·D. Slots of rows are found as in
block_attention (`gem_kernels.triton.block.kernels`). Nothing but q, k, v is read and nothing but out (and three row statistics) is
written:

    pass 1   every head of q: mean and squared deviations of the rows
    pass 2   head by head: S = l kᵀ, o = act(S) v + l; o waits in out, Σo² in registers
    pass 3   head by head, from the cache: out = o · out_rstd + q

Key rows beyond a sample are loaded as zeros; masked scores are 0 before the activation and act(0) = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import _value, activate
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


@triton.jit(do_not_specialize=["batch", "total_rows"])
def norm_gdpa_fwd_kernel(
    q, k, v, out, mean, rstd, out_rstd, q_offsets, k_offsets, act_ids,
    batch, total_rows, scale_in, gain, eps,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_kn: tl.constexpr, stride_kh: tl.constexpr,
    stride_vn: tl.constexpr, stride_vh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    sample, start, rows, _position = locate(q_offsets, tl.program_id(0).to(tl.int64), batch, total_rows, BLOCK_M)
    if rows > 0:
        i = tl.arange(0, BLOCK_M)
        valid = i < rows
        stride_on: tl.constexpr = H * D
        out += start * stride_on
        if sample == batch:
            zero = tl.zeros([BLOCK_M], tl.float32)
            for h in range(H):
                store_head(out + h * D, tl.zeros([BLOCK_M, DP], tl.float32), stride_on, rows, BLOCK_M, D, DP)
            tl.store(mean + start + i, zero, mask=valid)
            tl.store(rstd + start + i, zero, mask=valid)
            tl.store(out_rstd + start + i, zero, mask=valid)
        else:
            q += start * stride_qn
            begin = tl.load(k_offsets + sample).to(tl.int64)
            keys = (tl.load(k_offsets + sample + 1).to(tl.int64) - begin).to(tl.int32)
            k += begin * stride_kn
            v += begin * stride_vn
            mu = tl.zeros([BLOCK_M], tl.float32)
            spread = tl.zeros([BLOCK_M], tl.float32)
            for h in range(H):  # mean and squared deviations, head by head (Chan, Golub, LeVeque 1979)
                x = load_head(q + h * stride_qh, stride_qn, rows, BLOCK_M, D, DP).to(tl.float32)
                head_mean = tl.sum(x, 1) / D
                away = tl.where((tl.arange(0, DP) < D)[None, :], x - head_mean[:, None], 0.0)
                gap = head_mean - mu
                mu += gap / (h + 1)
                spread += tl.sum(away * away, 1) + gap * gap * (D * h / (h + 1))
            r = tl.rsqrt(spread / (H * D) + eps)
            squares = tl.zeros([BLOCK_M], tl.float32)
            # One loop over heads and key tiles, so that the loads of the next head run during the products of this one.
            steps = tl.maximum((keys + BLOCK_N - 1) // BLOCK_N, 1)
            acc = tl.zeros([BLOCK_M, DP], tl.float32)
            for step in tl.range(0, H * steps):
                h = step // steps
                n = (step - h * steps) * BLOCK_N
                at = tl.cast(n, tl.int64)
                x = load_head(q + h * stride_qh, stride_qn, rows, BLOCK_M, D, DP)
                k_tile = load_head(k + h * stride_kh + at * stride_kn, stride_kn, keys - n, BLOCK_N, D, DP)
                v_tile = load_head(v + h * stride_vh + at * stride_vn, stride_vn, keys - n, BLOCK_N, D, DP)
                act_id = 0
                if act_ids is not None:
                    act_id = tl.load(act_ids + h)
                l = normed(x, mu, r, D, DP)
                s = tl.dot(l, tl.trans(k_tile), input_precision=PRECISION) * scale_in
                if ACT == 64:  # heads differ
                    p = activate(s, act_id, ACT, ACT_SET, FAST)
                else:
                    p = _value(s, ACT, FAST)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
                if n + BLOCK_N >= keys:
                    o = acc * gain + l.to(tl.float32)
                    squares += tl.sum(o * o, 1)
                    store_head(out + h * D, o, stride_on, rows, BLOCK_M, D, DP)
                    acc = tl.zeros([BLOCK_M, DP], tl.float32)
            r2 = tl.rsqrt(squares / (H * D) + eps)
            tl.store(mean + start + i, mu, mask=valid)
            tl.store(rstd + start + i, r, mask=valid)
            tl.store(out_rstd + start + i, r2, mask=valid)
            tl.debug_barrier()
            for h in range(H):
                o = load_head(out + h * D, stride_on, rows, BLOCK_M, D, DP).to(tl.float32)
                x = load_head(q + h * stride_qh, stride_qn, rows, BLOCK_M, D, DP).to(tl.float32)
                store_head(out + h * D, o * r2[:, None] + x, stride_on, rows, BLOCK_M, D, DP)
