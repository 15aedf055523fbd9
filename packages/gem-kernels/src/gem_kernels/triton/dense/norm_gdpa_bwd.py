"""Triton backward kernels of `norm_gdpa`, deterministic. With n = H·D, r₂ = out_rstd, g = dout and ô = out − q the normalised o:

rows     do = r₂ (g − ô Σ(g ô) / n)  (RMSNorm)                          reads q, out, g   writes do
heads    dS = scale_in act'(S) (do vᵀ), dl = dS k + do                  reads q, do, k, v writes dl, into dq
rows     dq = r (dl − Σdl / n − l Σ(dl l) / n) + g  (LayerNorm, residual)  reads dl, q, g  writes dq, in place
keys     dk, dv: a program owns BLOCK_N keys of one head and walks over its sample's query rows, scores transposed (keys × rows) so that
         Pᵀ and dSᵀ stay in registers; l is applied to the sums: dk = (dS r)ᵀ q − (Σ dS r μ) 1ᵀ
"""

# ruff: noqa: RUF005 - the compiler knows no unpacking of tuples

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.block.kernels import locate
from gem_kernels.triton.dense.norm_gdpa_fwd import load_head, load_rows, normed, store_head, store_rows


@triton.jit(do_not_specialize=["batch", "rows"])
def norm_gdpa_bwd_do_kernel(
    q, out, dout, out_rstd, do, q_offsets, batch, rows,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_gn: tl.constexpr, stride_gh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of o of ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    i = row + tl.arange(0, ROWS)
    end = tl.load(q_offsets + batch).to(tl.int64)
    hat = load_rows(out, H * D, D, row, end, H, D, ROWS, COLUMNS) - load_rows(q, stride_qn, stride_qh, row, end, H, D, ROWS, COLUMNS)
    g = load_rows(dout, stride_gn, stride_gh, row, end, H, D, ROWS, COLUMNS)
    r2 = tl.load(out_rstd + i, mask=i < rows, other=0.0)
    shared = tl.sum(g * hat, 1) / (H * D)
    store_rows(do, (g - hat * shared[:, None]) * r2[:, None], row, rows, H, D, ROWS, COLUMNS)


@triton.jit
def _slope_back(l, do_tile, k_tile, v_tile, acc, scale_in, act_id, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr,
                PRECISION: tl.constexpr):  # fmt: skip
    s = tl.dot(l, tl.trans(k_tile), input_precision=PRECISION) * scale_in
    dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
    _value, slope = activate_with_slope(s, act_id, ACT, ACT_SET, FAST)
    return tl.dot((dp * slope).to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["batch", "total_rows"])
def norm_gdpa_bwd_dl_kernel(
    q, k, v, do, mean, rstd, dl, q_offsets, k_offsets, act_ids, batch, total_rows, scale_in, gain,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_kn: tl.constexpr, stride_kh: tl.constexpr,
    stride_vn: tl.constexpr, stride_vh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPAN: tl.constexpr,
    RESIDENT: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dl of SPAN rows of one head, BLOCK_M at a time. RESIDENT: all keys are in so many tiles, which stay on the chip; 0: they do not."""
    pid = tl.program_id(0).to(tl.int64)
    h = pid % H
    sample, start, rows, _position = locate(q_offsets, pid // H, batch, total_rows, SPAN)
    if (rows > 0) & (sample < batch):
        begin = tl.load(k_offsets + sample).to(tl.int64)
        keys = (tl.load(k_offsets + sample + 1).to(tl.int64) - begin).to(tl.int32)
        q += start * stride_qn + h * stride_qh
        k += begin * stride_kn + h * stride_kh
        v += begin * stride_vn + h * stride_vh
        do += start * (H * D) + h * D
        dl += start * (H * D) + h * D
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
            row = tl.cast(m, tl.int64)
            x = load_head(q + row * stride_qn, stride_qn, rows - m, BLOCK_M, D, DP)
            do_tile = load_head(do + row * (H * D), H * D, rows - m, BLOCK_M, D, DP)
            l = normed(x, tl.load(mean + i, mask=i < rows, other=0.0), tl.load(rstd + i, mask=i < rows, other=0.0), D, DP)
            acc = tl.zeros([BLOCK_M, DP], tl.float32)
            for t in tl.static_range(RESIDENT):
                acc = _slope_back(l, do_tile, k_tiles[t], v_tiles[t], acc, scale_in, act_id, ACT, ACT_SET, FAST, PRECISION)
            if RESIDENT == 0:
                for n in tl.range(0, keys, BLOCK_N):
                    at = tl.cast(n, tl.int64)
                    k_tile = load_head(k + at * stride_kn, stride_kn, keys - n, BLOCK_N, D, DP)
                    v_tile = load_head(v + at * stride_vn, stride_vn, keys - n, BLOCK_N, D, DP)
                    acc = _slope_back(l, do_tile, k_tile, v_tile, acc, scale_in, act_id, ACT, ACT_SET, FAST, PRECISION)
            # A load of its own (the policy keeps the compiler from joining it with the first one): a pipelined tile that registers read
            # beside a product would be overwritten while the product reads it.
            d = tl.arange(0, DP)
            at = do + row * (H * D) + (tl.arange(0, BLOCK_M)[:, None] * (H * D) + d[None, :])
            again = tl.load(at, mask=(i < rows)[:, None] & (d < D)[None, :], other=0.0, eviction_policy="evict_first")
            acc = acc * (gain * scale_in) + again.to(tl.float32)
            store_head(dl + row * (H * D), acc, H * D, rows - m, BLOCK_M, D, DP)


@triton.jit(do_not_specialize=["batch", "rows"])
def norm_gdpa_bwd_dq_kernel(
    q, dout, mean, rstd, dq, q_offsets, batch, rows,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_gn: tl.constexpr, stride_gh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dq of ROWS rows from dl, which ``dq`` holds."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    i = row + tl.arange(0, ROWS)
    end = tl.load(q_offsets + batch).to(tl.int64)
    mu = tl.load(mean + i, mask=i < rows, other=0.0)
    r = tl.load(rstd + i, mask=i < rows, other=0.0)
    l = (load_rows(q, stride_qn, stride_qh, row, end, H, D, ROWS, COLUMNS) - mu[:, None]) * r[:, None]
    dl = load_rows(dq, H * D, D, row, end, H, D, ROWS, COLUMNS)
    if H * D != COLUMNS:
        l = tl.where((tl.arange(0, COLUMNS) < H * D)[None, :], l, 0.0)
    d = dl - (tl.sum(dl, 1) / (H * D))[:, None] - l * (tl.sum(dl * l, 1) / (H * D))[:, None]
    g = load_rows(dout, stride_gn, stride_gh, row, end, H, D, ROWS, COLUMNS)
    store_rows(dq, d * r[:, None] + g, row, rows, H, D, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["batch", "total_keys"])
def norm_gdpa_bwd_dkdv_kernel(
    q, k, v, do, mean, rstd, dk, dv, q_offsets, k_offsets, act_ids,
    batch, total_keys, scale_in, gain,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_kn: tl.constexpr, stride_kh: tl.constexpr,
    stride_vn: tl.constexpr, stride_vh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv (contiguous) of BLOCK_N keys of one head."""
    pid = tl.program_id(0).to(tl.int64)
    h = pid % H
    sample, start, keys, _position = locate(k_offsets, pid // H, batch, total_keys, BLOCK_N)
    if keys > 0:
        stride_on: tl.constexpr = H * D
        dk += start * stride_on + h * D
        dv += start * stride_on + h * D
        dk_acc = tl.zeros([BLOCK_N, DP], tl.float32)
        dv_acc = tl.zeros([BLOCK_N, DP], tl.float32)
        if sample < batch:
            act_id = 0
            if act_ids is not None:
                act_id = tl.load(act_ids + h)
            k_tile = load_head(k + start * stride_kn + h * stride_kh, stride_kn, keys, BLOCK_N, D, DP)
            v_tile = load_head(v + start * stride_vn + h * stride_vh, stride_vn, keys, BLOCK_N, D, DP)
            key_sum = tl.sum(k_tile.to(tl.float32), 1)
            begin = tl.load(q_offsets + sample).to(tl.int64)
            rows = (tl.load(q_offsets + sample + 1).to(tl.int64) - begin).to(tl.int32)
            q += begin * stride_qn + h * stride_qh
            do += begin * stride_on + h * D
            correction = tl.zeros([BLOCK_N], tl.float32)
            for m in tl.range(0, rows, BLOCK_M):
                at = tl.cast(m, tl.int64)
                i = m + tl.arange(0, BLOCK_M)
                q_tile = load_head(q + at * stride_qn, stride_qn, rows - m, BLOCK_M, D, DP)
                do_tile = load_head(do + at * stride_on, stride_on, rows - m, BLOCK_M, D, DP)
                mu = tl.load(mean + begin + i, mask=i < rows, other=0.0)
                r = tl.load(rstd + begin + i, mask=i < rows, other=0.0)
                s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                s = (s - key_sum[:, None] * mu[None, :]) * (r * scale_in)[None, :]
                p, slope = activate_with_slope(s, act_id, ACT, ACT_SET, FAST)
                dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
                ds = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION) * slope * r[None, :]
                correction += tl.sum(ds * mu[None, :], 1)
                dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
            dk_acc = (dk_acc - correction[:, None]) * (gain * scale_in)
            dv_acc *= gain
        store_head(dk, dk_acc, stride_on, keys, BLOCK_N, D, DP)
        store_head(dv, dv_acc, stride_on, keys, BLOCK_N, D, DP)
