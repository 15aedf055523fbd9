"""Backward pass of one Q that all samples share (PMA), whose rows fit one tile: five products a tile pair, every program the same work.

    S = Q Kᵀ, dP = dO Vᵀ  ->  P, dS  ->  dV = Pᵀ dO, dK = dSᵀ Q, written;  dQ += dS K, in registers

Lengths of histories differ by a factor of a hundred, and a program that had whole samples would wait for the longest. dQ is a sum over all
keys of all samples, so a program may as well begin and end within one: of P programs of a head, program p has the blocks of BLOCK_N keys
that begin at the packed rows N p / P to N (p + 1) / P, N keys in all.

    keys      |---- sample 0 ----|-- 1 --|---------- sample 2 ----------|- 3 -|
    programs  |      0      |      1      |      2      |      3      |

Program p of head h writes one partial sum, ``dq [P, Lq, H, D]`` fp32, and if asked for one row of column sums of dK and of dV,
``dk_sums, dv_sums [P, H · D]`` fp32; the caller adds them up. Which program does what follows from the offsets alone: repeated runs agree.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.attention.tiles import load_rows, store_rows, zero_slack

LOG2E = tl.constexpr(1.4426950408889634)
_COUNTED = tl.constexpr(1024)


@triton.jit
def _samples(k_offsets, batch, begin, end):
    """First sample that has a row from ``begin`` on, and the one after the last that begins before ``end``."""
    first = tl.zeros([_COUNTED], tl.int32)
    after = tl.zeros([_COUNTED], tl.int32)
    for start in range(0, batch, _COUNTED):
        i = start + tl.arange(0, _COUNTED)
        first += ((i < batch) & (tl.load(k_offsets + i + 1, i < batch, 0) <= begin)).to(tl.int32)
        after += ((i < batch) & (tl.load(k_offsets + i, i < batch, 0) < end)).to(tl.int32)
    return tl.sum(first, 0), tl.sum(after, 0)


@triton.jit(do_not_specialize=["batch", "q_len", "rows", "k_rows"])
def attention_bwd_shared_kernel(
    q, k, v, out, dout, lse, dq, dk, dv, dk_sums, dv_sums, k_offsets, act_ids,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on, stride_oh, stride_don, stride_doh,
    stride_dqn, stride_dqh, stride_dkn, stride_dkh, stride_dvn, stride_dvh,
    batch, q_len, rows: tl.int64, k_rows: tl.int64, scale, ds_scale, dv_scale, delta_scale,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """H programs for each of the P = programs / H shares of the keys."""
    SUMS: tl.constexpr = dk_sums is not None
    zero_slack(dk, k_offsets, batch, k_rows, stride_dkn, stride_dkh, H, D, D_PAD)
    zero_slack(dv, k_offsets, batch, k_rows, stride_dvn, stride_dvh, H, DV, DV_PAD)
    head = tl.program_id(0) % H
    share = tl.program_id(0) // H
    shares = tl.num_programs(0) // H
    keys = tl.load(k_offsets + batch).to(tl.int64)
    begin = keys * share // shares
    end = keys * (share + 1) // shares
    first, after = _samples(k_offsets, batch, begin, end)
    i = tl.arange(0, BLOCK_M)
    q_tile = load_rows(q, tl.zeros([], tl.int64), 0, q_len, head, stride_qn, stride_qh, BLOCK_M, D, D_PAD, TMA)
    act_id = 0
    if act_ids is not None:
        act_id = tl.load(act_ids + head)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    if SUMS:
        dk_sum = tl.zeros([BLOCK_N, D_PAD], tl.float32)
        dv_sum = tl.zeros([BLOCK_N, DV_PAD], tl.float32)
    for sample in tl.range(first, after):
        k_row = tl.load(k_offsets + sample).to(tl.int64)
        stop = tl.load(k_offsets + sample + 1).to(tl.int64)
        h = (stop - k_row).to(tl.int32)
        x0 = tl.cdiv(tl.maximum(begin - k_row, 0), BLOCK_N).to(tl.int32)
        x1 = tl.cdiv(tl.minimum(end, stop) - k_row, BLOCK_N).to(tl.int32)
        out_row = tl.full([], sample, tl.int64) * q_len
        do_tile = load_rows(dout, out_row, 0, q_len, head, stride_don, stride_doh, BLOCK_M, DV, DV_PAD, TMA)
        lse_i = tl.zeros([BLOCK_M], tl.float32)
        delta_i = lse_i
        if SOFTMAX:
            o_tile = load_rows(out, out_row, 0, q_len, head, stride_on, stride_oh, BLOCK_M, DV, DV_PAD, False)
            delta_i = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1) * delta_scale
            lse_i = tl.load(lse + head.to(tl.int64) * rows + out_row + i, i < q_len, float("inf")) * LOG2E
        for x in tl.range(x0, x1):
            n0 = x * BLOCK_N
            k_tile = load_rows(k, k_row, n0, h, head, stride_kn, stride_kh, BLOCK_N, D, D_PAD, TMA)
            v_tile = load_rows(v, k_row, n0, h, head, stride_vn, stride_vh, BLOCK_N, DV, DV_PAD, TMA)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            seen = n0 + tl.arange(0, BLOCK_N) < h
            if SOFTMAX:
                prob = tl.exp2(s * (scale * LOG2E) - lse_i[:, None])
                if n0 + BLOCK_N > h:
                    prob = tl.where(seen[None, :], prob, 0.0)
                ds = prob * (dp - delta_i[:, None])
            else:
                prob, slope = activate_with_slope(s * scale, act_id, ACT, ACT_SET, FAST)
                ds = slope * dp
            ds16 = ds.to(k_tile.dtype)
            acc = tl.dot(ds16, k_tile, acc, input_precision=PRECISION)
            dv_tile = tl.dot(tl.trans(prob.to(do_tile.dtype)), do_tile, input_precision=PRECISION) * dv_scale
            store_rows(dv, k_row, n0, h, head, stride_dvn, stride_dvh, dv_tile, BLOCK_N, DV, DV_PAD)
            dk_tile = tl.dot(tl.trans(ds16), q_tile, input_precision=PRECISION) * ds_scale
            store_rows(dk, k_row, n0, h, head, stride_dkn, stride_dkh, dk_tile, BLOCK_N, D, D_PAD)
            if SUMS:
                dk_sum += tl.where(seen[:, None], dk_tile, 0.0)
                dv_sum += tl.where(seen[:, None], dv_tile, 0.0)
    if SUMS:
        column = tl.arange(0, D_PAD)
        to = (share.to(tl.int64) * H + head) * D + column
        tl.store(dk_sums + to, tl.sum(dk_sum, 0), column < D)
        tl.store(dv_sums + to, tl.sum(dv_sum, 0), column < D)
    partial = share.to(tl.int64) * q_len
    store_rows(dq, partial, 0, q_len, head, stride_dqn, stride_dqh, acc * ds_scale, BLOCK_M, D, D_PAD)
