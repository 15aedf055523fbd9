"""Backward pass, query side: a program holds rows of Q and dO and walks over the keys as the forward pass does.

    S = Q Kᵀ, dP = dO Vᵀ  ->  dS  ->  dQ += dS K            three products a tile; no program shares its dQ

- softmax: P = 2^(S - lse), dS = P ∘ (dP - delta), delta = rowsum(O ∘ dO). The kernel computes delta for its rows and leaves it in memory
  for the key side, which therefore runs afterwards.
- gdpa: dS = f'(scale_in · S + bias) ∘ dP.

A candidate's own pair was differentiated row by row beforehand (`rows`); its dS K is added last.

EMIT: all query rows of a sample fit one tile, so the program also has everything for dV = Pᵀ dO and dK = dSᵀ Q of each key block and writes
them: five products, no second kernel ("q_resident"). Its list has one tile for every sample, so that keys without queries get their zeros.
Into ``dk_sums`` and ``dv_sums`` ``[batch, H · D]`` fp32, if given, go the column sums of each sample.

BROADCAST: one Q for all samples. Program p serves one (head, row block) throughout, adds up dQ over its samples in registers and writes one
partial sum, ``dq [partials, Lq, H, D]`` in fp32; the caller adds the partials.
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.attention.bias import add_bias, load_times
from gem_kernels.triton.attention.masks import key_block, key_walk, sample_geometry, visible
from gem_kernels.triton.attention.tiles import load_own, load_rows, store_rows, zero_slack

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["batch", "q_len", "rows", "k_rows", "left", "right", "radius", "edges"])
def attention_bwd_dq_kernel(
    q, k, v, out, dout, lse, delta, dq, dk, dv, dk_sums, dv_sums,
    q_offsets, k_offsets, num_targets, ds_own, target_k, context_len, kv_index,
    bias_position, bias_time, time_index, time_edges, q_times, k_times, q_relative, k_relative, act_ids,
    tiles, tile_count,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on, stride_oh, stride_don, stride_doh,
    stride_dqn, stride_dqh, stride_dkn, stride_dkh, stride_dvn, stride_dvh, stride_tkn, stride_tkh,
    stride_bp, stride_bt,
    batch, q_len, rows: tl.int64, k_rows: tl.int64, left, right, radius, edges,
    scale, ds_scale, dv_scale, delta_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TIME_STEPS: tl.constexpr, EMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    TARGETS: tl.constexpr = num_targets is not None
    CONTEXT: tl.constexpr = context_len is not None
    BROADCAST: tl.constexpr = q_offsets is None
    SUMS: tl.constexpr = dk_sums is not None
    BIAS: tl.constexpr = (bias_position is not None) or (bias_time is not None)
    pid = tl.program_id(0)
    row_blocks = tl.zeros([], tl.int32) + 1
    if BROADCAST:
        row_blocks = (q_len + BLOCK_M - 1) // BLOCK_M
    else:
        zero_slack(dq, q_offsets, batch, rows, stride_dqn, stride_dqh, H, D, D_PAD)
    if EMIT:
        zero_slack(dk, k_offsets, batch, k_rows, stride_dkn, stride_dkh, H, D, D_PAD)
        zero_slack(dv, k_offsets, batch, k_rows, stride_dvn, stride_dvh, H, DV, DV_PAD)
    total = tl.load(tile_count) * H * row_blocks
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for item in tl.range(pid, total, tl.num_programs(0)):
        head = item % H
        kv_head = head // GROUP
        entry = tl.load(tiles + item // (H * row_blocks))
        sample = (entry >> 32).to(tl.int32)
        m0 = (entry & 0xFFFFFFFF).to(tl.int32) * BLOCK_M
        if BROADCAST:
            m0 = (item // H) % row_blocks * BLOCK_M
        else:
            acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
        q_row, out_row, lq, k_row, h, t, c = sample_geometry(sample, q_offsets, k_offsets, num_targets, context_len, kv_index, q_len)
        shift = h + t - lq
        m1 = tl.minimum(m0 + BLOCK_M, lq)
        i = m0 + tl.arange(0, BLOCK_M)
        p = tl.minimum(i + shift, h)
        p_min = tl.minimum(m0 + shift, h)
        p_max = tl.minimum(m1 - 1 + shift, h)
        blocks, walk_head, walk_first, free0, free1 = key_walk(m0, m1, shift, h, c, left, right, BLOCK_N, CAUSAL, WINDOW, CONTEXT)
        q_tile = load_rows(q, q_row, m0, lq, head, stride_qn, stride_qh, BLOCK_M, D, D_PAD, TMA)
        do_tile = load_rows(dout, out_row, m0, lq, head, stride_don, stride_doh, BLOCK_M, DV, DV_PAD, TMA)
        lse_i = tl.zeros([BLOCK_M], tl.float32)
        delta_i = lse_i
        if SOFTMAX:
            o_tile = load_rows(out, out_row, m0, lq, head, stride_on, stride_oh, BLOCK_M, DV, DV_PAD, False)
            delta_i = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1) * delta_scale
            at = head.to(tl.int64) * rows + out_row + i
            if not EMIT:
                tl.store(delta + at, delta_i, i < lq)
            lse_i = tl.load(lse + at, i < lq, float("-inf"))
            # A row that sees no key must give P = 2^(S - inf) = 0.
            lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E)
        act_id = 0
        if act_ids is not None:
            act_id = tl.load(act_ids + head)
        tq, tq_low, tq_high = load_times(q_relative, q_row, m0, lq, BLOCK_M)
        if SUMS:
            dk_sum = tl.zeros([BLOCK_N, D_PAD], tl.float32)
            dv_sum = tl.zeros([BLOCK_N, DV_PAD], tl.float32)

        for x in tl.range(0, blocks):
            n0 = key_block(x, walk_head, walk_first, CONTEXT) * BLOCK_N
            k_tile = load_rows(k, k_row, n0, h, kv_head, stride_kn, stride_kh, BLOCK_N, D, D_PAD, TMA)
            v_tile = load_rows(v, k_row, n0, h, kv_head, stride_vn, stride_vh, BLOCK_N, DV, DV_PAD, TMA)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            j = n0 + tl.arange(0, BLOCK_N)
            if BIAS:
                tk, tk_low, tk_high = load_times(k_relative, k_row, n0, h, BLOCK_N)
                s = add_bias(
                    s * scale, p[:, None], i[:, None], j[None, :], n0 - p_max, tl.minimum(n0 + BLOCK_N, h) - 1 - p_min,
                    tq[:, None], tk[None, :], tq_low, tq_high, tk_low, tk_high, lq, h, q_row, k_row, head,
                    bias_position, bias_time, time_index, time_edges, q_times, k_times, stride_bp, stride_bt, radius, edges,
                    TIME_STEPS, FAST > 0,
                )  # fmt: skip
            if SOFTMAX:
                step = LOG2E if BIAS else scale * LOG2E
                prob = tl.exp2(s * step - lse_i[:, None])
                if (n0 < free0) | (n0 + BLOCK_N > free1):
                    seen = (j < h)[None, :] & visible(p[:, None], j[None, :], c, left, right, CAUSAL, WINDOW, CONTEXT)
                    prob = tl.where(seen, prob, 0.0)
                ds = prob * (dp - delta_i[:, None])
            else:
                if not BIAS:
                    s = s * scale
                prob, slope = activate_with_slope(s, act_id, ACT, ACT_SET, FAST)
                ds = slope * dp
                if CAUSAL or WINDOW:
                    if (n0 < free0) | (n0 + BLOCK_N > free1):
                        seen = (j < h)[None, :] & visible(p[:, None], j[None, :], c, left, right, CAUSAL, WINDOW, CONTEXT)
                        ds = tl.where(seen, ds, 0.0)
            ds16 = ds.to(k_tile.dtype)
            acc = tl.dot(ds16, k_tile, acc, input_precision=PRECISION)
            if EMIT:
                dv_tile = tl.dot(tl.trans(prob.to(do_tile.dtype)), do_tile, input_precision=PRECISION) * dv_scale
                store_rows(dv, k_row, n0, h, kv_head, stride_dvn, stride_dvh, dv_tile, BLOCK_N, DV, DV_PAD)
                dk_tile = tl.dot(tl.trans(ds16), q_tile, input_precision=PRECISION) * ds_scale
                store_rows(dk, k_row, n0, h, kv_head, stride_dkn, stride_dkh, dk_tile, BLOCK_N, D, D_PAD)
                if SUMS:
                    dk_sum += tl.where((j < h)[:, None], dk_tile, 0.0)
                    dv_sum += tl.where((j < h)[:, None], dv_tile, 0.0)
        if SUMS:
            column = tl.arange(0, D_PAD)
            to = (sample.to(tl.int64) * H + head) * D + column
            tl.store(dk_sums + to, tl.sum(dk_sum, 0), column < D)
            tl.store(dv_sums + to, tl.sum(dv_sum, 0), column < D)

        if TARGETS:
            if m1 > lq - t:
                candidate = (i >= lq - t) & (i < lq)
                own_row = q_row if kv_index is not None else k_row + h - (lq - t)
                k_own = load_own(target_k, own_row, i, candidate, kv_head, stride_tkn, stride_tkh, D, D_PAD)
                ds_i = tl.load(ds_own + head.to(tl.int64) * rows + out_row + i, candidate, 0.0)
                acc += ds_i[:, None] * k_own.to(tl.float32)

        if not BROADCAST:
            store_rows(dq, q_row, m0, lq, head, stride_dqn, stride_dqh, acc * ds_scale, BLOCK_M, D, D_PAD)
    if BROADCAST:
        partial = (pid // (H * row_blocks)).to(tl.int64) * q_len
        m0 = (pid // H) % row_blocks * BLOCK_M
        store_rows(dq, partial, m0, q_len, pid % H, stride_dqn, stride_dqh, acc * ds_scale, BLOCK_M, D, D_PAD)
