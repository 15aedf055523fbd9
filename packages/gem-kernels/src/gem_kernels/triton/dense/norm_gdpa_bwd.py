"""Triton backward kernels of `norm_gdpa`: one over query rows, one over keys; deterministic.

Rows (dq). With n = H·D, r₂ = out_rstd, g = dout and ô = out − q the normalised o, one row block at a time as in the forward pass:

    pass 1   every head: Σ g ô
    pass 2   head by head: do = r₂ (g − ô Σ(g ô) / n) (RMSNorm), also stored for the other kernel; dS = scale_in act'(S) (do vᵀ);
             dl = dS k + do, into dq; Σ dl, Σ dl l
    pass 3   dq = r (dl − Σ dl / n − l Σ(dl l) / n) + g (LayerNorm, residual)

Keys (dk, dv). A program owns BLOCK_N keys of one head and walks over its sample's query rows, scores transposed (keys × rows) so that Pᵀ
and dSᵀ stay in registers; l is applied to the sums: dk = (dS r)ᵀ q − (Σ dS r μ) 1ᵀ.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.block.kernels import locate
from gem_kernels.triton.dense.norm_gdpa_fwd import load_head, normed, store_head


@triton.jit(do_not_specialize=["batch", "total_rows"])
def norm_gdpa_bwd_dq_kernel(
    q, k, v, out, dout, mean, rstd, out_rstd, do, dq, q_offsets, k_offsets, act_ids,
    batch, total_rows, scale_in, gain,
    stride_qn: tl.constexpr, stride_qh: tl.constexpr, stride_kn: tl.constexpr, stride_kh: tl.constexpr,
    stride_vn: tl.constexpr, stride_vh: tl.constexpr, stride_gn: tl.constexpr, stride_gh: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M rows, and the gradient of o in ``do`` [rows, H, D]."""
    sample, start, rows, _position = locate(q_offsets, tl.program_id(0).to(tl.int64), batch, total_rows, BLOCK_M)
    if rows > 0:
        stride_on: tl.constexpr = H * D
        dq += start * stride_on
        if sample == batch:
            for h in range(H):
                store_head(dq + h * D, tl.zeros([BLOCK_M, DP], tl.float32), stride_on, rows, BLOCK_M, D, DP)
        else:
            i = tl.arange(0, BLOCK_M)
            q += start * stride_qn
            dout += start * stride_gn
            out += start * stride_on
            do += start * stride_on
            begin = tl.load(k_offsets + sample).to(tl.int64)
            keys = (tl.load(k_offsets + sample + 1).to(tl.int64) - begin).to(tl.int32)
            k += begin * stride_kn
            v += begin * stride_vn
            mu = tl.load(mean + start + i, mask=i < rows, other=0.0)
            r = tl.load(rstd + start + i, mask=i < rows, other=0.0)
            r2 = tl.load(out_rstd + start + i, mask=i < rows, other=0.0)
            shared = tl.zeros([BLOCK_M], tl.float32)
            for h in range(H):
                x = load_head(q + h * stride_qh, stride_qn, rows, BLOCK_M, D, DP).to(tl.float32)
                hat = load_head(out + h * D, stride_on, rows, BLOCK_M, D, DP).to(tl.float32) - x
                shared += tl.sum(hat * load_head(dout + h * stride_gh, stride_gn, rows, BLOCK_M, D, DP).to(tl.float32), 1)
            shared /= H * D
            dl_sum = tl.zeros([BLOCK_M], tl.float32)
            dll_sum = tl.zeros([BLOCK_M], tl.float32)
            for h in range(H):
                x = load_head(q + h * stride_qh, stride_qn, rows, BLOCK_M, D, DP).to(tl.float32)
                hat = load_head(out + h * D, stride_on, rows, BLOCK_M, D, DP).to(tl.float32) - x
                g = load_head(dout + h * stride_gh, stride_gn, rows, BLOCK_M, D, DP).to(tl.float32)
                store_head(do + h * D, (g - hat * shared[:, None]) * r2[:, None], stride_on, rows, BLOCK_M, D, DP)
            tl.debug_barrier()
            # One loop over heads and key tiles, so that the loads of the next head run during the products of this one.
            steps = tl.maximum((keys + BLOCK_N - 1) // BLOCK_N, 1)
            acc = tl.zeros([BLOCK_M, DP], tl.float32)
            for step in tl.range(0, H * steps):
                h = step // steps
                n = (step - h * steps) * BLOCK_N
                at = tl.cast(n, tl.int64)
                x = load_head(q + h * stride_qh, stride_qn, rows, BLOCK_M, D, DP)
                do_tile = load_head(do + h * D, stride_on, rows, BLOCK_M, D, DP)
                k_tile = load_head(k + h * stride_kh + at * stride_kn, stride_kn, keys - n, BLOCK_N, D, DP)
                v_tile = load_head(v + h * stride_vh + at * stride_vn, stride_vn, keys - n, BLOCK_N, D, DP)
                act_id = 0
                if act_ids is not None:
                    act_id = tl.load(act_ids + h)
                # K goes to products only: a tile that registers read too would be overwritten by the pipelined loads.
                l = normed(x, mu, r, D, DP)
                s = tl.dot(l, tl.trans(k_tile), input_precision=PRECISION) * scale_in
                _value, slope = activate_with_slope(s, act_id, ACT, ACT_SET, FAST)
                ds = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION) * slope
                acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
                if n + BLOCK_N >= keys:
                    dl = acc * (gain * scale_in) + load_head(do + h * D, stride_on, rows, BLOCK_M, D, DP).to(tl.float32)
                    dl_sum += tl.sum(dl, 1)
                    dll_sum += tl.sum(dl * l.to(tl.float32), 1)
                    store_head(dq + h * D, dl, stride_on, rows, BLOCK_M, D, DP)
                    acc = tl.zeros([BLOCK_M, DP], tl.float32)
            dl_sum /= H * D
            dll_sum /= H * D
            tl.debug_barrier()
            for h in range(H):
                dl = load_head(dq + h * D, stride_on, rows, BLOCK_M, D, DP).to(tl.float32)
                l = normed(load_head(q + h * stride_qh, stride_qn, rows, BLOCK_M, D, DP), mu, r, D, DP).to(tl.float32)
                g = load_head(dout + h * stride_gh, stride_gn, rows, BLOCK_M, D, DP).to(tl.float32)
                store_head(dq + h * D, (dl - dl_sum[:, None] - l * dll_sum[:, None]) * r[:, None] + g, stride_on, rows, BLOCK_M, D, DP)


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
