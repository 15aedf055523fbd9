"""Backward pass, key side: a program holds rows of K and V and walks over the query blocks that see them.

    Sᵀ = K Qᵀ, dPᵀ = V dOᵀ  ->  Pᵀ, dSᵀ  ->  dV += Pᵀ dO, dK += dSᵀ Q      four products; Pᵀ and dSᵀ stay in registers

One program adds up everything its keys receive: the query heads of a group, and under request sharing the samples of its request (``order``
lists samples by request, ``first`` where each request's begin). So dK and dV are written once, without atomics.

DQ adds the fifth product, dQ += dS K, and makes the query side's kernel superfluous:

- 0: no dQ; `backward_dq` computes it ("split")
- 1: the keys of a sample fit one tile, so each dQ tile is complete and written at once ("kv_resident"); delta is summed here
- 2: one program walks over all key tiles of a sample and adds dQ in an fp32 buffer that is its alone ("sample")
- 3: every key tile is a program, dQ is added with fp32 atomics ("atomic"); order and last bits vary from run to run
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.attention.bias import add_bias, load_times
from gem_kernels.triton.attention.masks import query_block, query_walk, sample_geometry, visible
from gem_kernels.triton.attention.tiles import load_rows, store_box, store_rows, zero_slack

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["batch", "requests", "q_len", "rows", "k_rows", "left", "right", "radius", "edges"])
def attention_bwd_dkdv_kernel(
    q, k, v, dout, lse, delta, dq, dq_box, dk, dv,
    q_offsets, k_offsets, num_targets, context_len, kv_index, order, first,
    bias_position, bias_time, time_index, time_edges, q_times, k_times, q_relative, k_relative, act_ids,
    tiles, tile_count,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_don, stride_doh,
    stride_dqn, stride_dqh, stride_dkn, stride_dkh, stride_dvn, stride_dvh, stride_bp, stride_bt,
    batch, requests, q_len, rows: tl.int64, k_rows: tl.int64, left, right, radius, edges,
    scale, ds_scale, dv_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TIME_STEPS: tl.constexpr, DQ: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    HKV: tl.constexpr = H // GROUP
    zero_slack(dk, k_offsets, requests, k_rows, stride_dkn, stride_dkh, HKV, D, D_PAD)
    zero_slack(dv, k_offsets, requests, k_rows, stride_dvn, stride_dvh, HKV, DV, DV_PAD)
    if DQ == 1 and q_offsets is not None:
        zero_slack(dq, q_offsets, batch, rows, stride_dqn, stride_dqh, H, D, D_PAD)
    total = tl.load(tile_count) * HKV
    for item in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        kv_head = item % HKV
        entry = tl.load(tiles + item // HKV)
        request = (entry >> 32).to(tl.int32)
        n_first = (entry & 0xFFFFFFFF).to(tl.int32) * BLOCK_N
        k_row = tl.load(k_offsets + request).to(tl.int64)
        h = (tl.load(k_offsets + request + 1).to(tl.int64) - k_row).to(tl.int32)
        if num_targets is not None and kv_index is None:
            h -= tl.load(num_targets + request).to(tl.int32)
        n_last = n_first + BLOCK_N
        if DQ == 2:
            n_last = tl.maximum(h, 1)
        for n0 in tl.range(n_first, n_last, BLOCK_N):
            k_tile = load_rows(k, k_row, n0, h, kv_head, stride_kn, stride_kh, BLOCK_N, D, D_PAD, TMA)
            v_tile = load_rows(v, k_row, n0, h, kv_head, stride_vn, stride_vh, BLOCK_N, DV, DV_PAD, TMA)
            dk_acc = tl.zeros([BLOCK_N, D_PAD], tl.float32)
            dv_acc = tl.zeros([BLOCK_N, DV_PAD], tl.float32)
            begin = request
            end = request + 1
            if kv_index is not None:
                begin = tl.load(first + request).to(tl.int32)
                end = tl.load(first + request + 1).to(tl.int32)
            for member in tl.range(begin, end):
                sample = member
                if kv_index is not None:
                    sample = tl.load(order + member).to(tl.int32)
                q_row, out_row, lq, _own_k_row, _own_h, t, c = sample_geometry(
                    sample, q_offsets, k_offsets, num_targets, context_len, kv_index, q_len
                )
                dk_acc, dv_acc = walk_queries(
                    q, dout, lse, delta, dq, dq_box, k_tile, v_tile, dk_acc, dv_acc,
                    q_row, out_row, lq, k_row, h, t, c, n0, kv_head,
                    bias_position, bias_time, time_index, time_edges, q_times, k_times, q_relative, k_relative, act_ids,
                    stride_qn, stride_qh, stride_don, stride_doh, stride_dqn, stride_dqh, stride_bp, stride_bt,
                    rows, left, right, radius, edges, scale, ds_scale,
                    GROUP, D, DV, D_PAD, DV_PAD, SOFTMAX, ACT, ACT_SET, FAST, PRECISION,
                    CAUSAL, WINDOW, context_len is not None, num_targets is not None, TIME_STEPS, DQ, BLOCK_M, BLOCK_N, TMA,
                )  # fmt: skip
            store_rows(dk, k_row, n0, h, kv_head, stride_dkn, stride_dkh, dk_acc * ds_scale, BLOCK_N, D, D_PAD)
            store_rows(dv, k_row, n0, h, kv_head, stride_dvn, stride_dvh, dv_acc * dv_scale, BLOCK_N, DV, DV_PAD)
            if DQ == 2:
                # The next key tile reads dQ back, not necessarily with the thread that wrote it.
                tl.debug_barrier()


@triton.jit
def walk_queries(
    q, dout, lse, delta, dq, dq_box, k_tile, v_tile, dk_acc, dv_acc,
    q_row, out_row, lq, k_row, h, t, c, n0, kv_head,
    bias_position, bias_time, time_index, time_edges, q_times, k_times, q_relative, k_relative, act_ids,
    stride_qn, stride_qh, stride_don, stride_doh, stride_dqn, stride_dqh, stride_bp, stride_bt,
    rows, left, right, radius, edges, scale, ds_scale,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONTEXT: tl.constexpr, TARGETS: tl.constexpr, TIME_STEPS: tl.constexpr,
    DQ: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds to dK and dV of the keys n0 .. n0 + BLOCK_N what the query rows of one sample contribute, all heads of the group."""
    BIAS: tl.constexpr = (bias_position is not None) or (bias_time is not None)
    shift = h + t - lq
    j = n0 + tl.arange(0, BLOCK_N)
    n1 = tl.minimum(n0 + BLOCK_N, h)
    tk, tk_low, tk_high = load_times(k_relative, k_row, n0, h, BLOCK_N)
    blocks, walk_head, walk_first, walk_last, walk_tail = query_walk(
        n0, n1, shift, lq, t, h, c, left, right, BLOCK_M, CAUSAL, WINDOW, CONTEXT, TARGETS
    )
    for step in tl.range(0, blocks * GROUP):
        head = kv_head
        x = step
        if GROUP > 1:
            head = kv_head * GROUP + step // blocks
            x = step % blocks
        m0 = query_block(x, walk_head, walk_first, walk_last, walk_tail, CONTEXT, TARGETS) * BLOCK_M
        i = m0 + tl.arange(0, BLOCK_M)
        q_tile = load_rows(q, q_row, m0, lq, head, stride_qn, stride_qh, BLOCK_M, D, D_PAD, TMA)
        do_tile = load_rows(dout, out_row, m0, lq, head, stride_don, stride_doh, BLOCK_M, DV, DV_PAD, TMA)
        # Small loads come before the products, whose results everything after them waits for.
        lse_i = tl.zeros([BLOCK_M], tl.float32)
        delta_i = lse_i
        if SOFTMAX:
            at = head.to(tl.int64) * rows + out_row + i
            # Rows outside the sample and rows that see no key must give P = 2^(S - inf) = 0.
            lse_i = tl.load(lse + at, i < lq, float("-inf"))
            lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E)
            if DQ != 1:
                delta_i = tl.load(delta + at, i < lq, 0.0)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
        p = tl.minimum(i + shift, h)
        p_min = tl.minimum(m0 + shift, h)
        p_max = tl.minimum(tl.minimum(m0 + BLOCK_M, lq) - 1 + shift, h)
        if BIAS:
            tq, tq_low, tq_high = load_times(q_relative, q_row, m0, lq, BLOCK_M)
            s = add_bias(
                s * scale, p[None, :], i[None, :], j[:, None], n0 - p_max, n1 - 1 - p_min,
                tq[None, :], tk[:, None], tq_low, tq_high, tk_low, tk_high, lq, h, q_row, k_row, head,
                bias_position, bias_time, time_index, time_edges, q_times, k_times, stride_bp, stride_bt, radius, edges,
                TIME_STEPS, FAST > 0,
            )  # fmt: skip
        if SOFTMAX:
            prob = tl.exp2(s * (LOG2E if BIAS else scale * LOG2E) - lse_i[None, :])
            if DQ == 1:
                # All keys of the rows are here, so delta = rowsum(P ∘ dP), without a look at O. A tile that a product under way and
                # registers both use would be overwritten by the pipelined loads: dO must go to products only.
                prob = tl.where((j < h)[:, None], prob, 0.0)
                delta_i = tl.sum(prob * dp, 0)
            slope = prob
            dp = dp - delta_i[None, :]
        else:
            act_id = 0
            if act_ids is not None:
                act_id = tl.load(act_ids + head)
            if not BIAS:
                s = s * scale
            prob, slope = activate_with_slope(s, act_id, ACT, ACT_SET, FAST)
        if CAUSAL or WINDOW:
            free = (n0 >= p_max - left) & (n1 - 1 <= p_min + right)
            if CAUSAL:
                free = free & (n1 - 1 <= p_min)
            if not free:
                seen = visible(p[None, :], j[:, None], c, left, right, CAUSAL, WINDOW, CONTEXT)
                prob = tl.where(seen, prob, 0.0)
                slope = tl.where(seen, slope, 0.0)
        dv_acc = tl.dot(prob.to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
        ds = (slope * dp).to(q_tile.dtype)
        if DQ != 0:
            # Keys past the end are zero rows, but their dS need not be finite. Here and without a branch: after the product ds is in the
            # registers that an unfinished wgmma reads, and ptxas would mask it in place.
            ds = tl.where((j < h)[:, None], ds, 0.0)
        dk_acc = tl.dot(ds, q_tile, dk_acc, input_precision=PRECISION)
        if DQ != 0:
            dq_tile = tl.dot(tl.trans(ds), k_tile, input_precision=PRECISION) * ds_scale
            if DQ == 1:
                if TMA:
                    store_box(dq_box, q_row, m0, lq, head, dq_tile, BLOCK_M, D)
                else:
                    store_rows(dq, q_row, m0, lq, head, stride_dqn, stride_dqh, dq_tile, BLOCK_M, D, D_PAD)
            else:
                d = tl.arange(0, D_PAD)
                to = dq + head.to(tl.int64) * stride_dqh + (q_row + i)[:, None] * stride_dqn + d[None, :]
                mask = (i < lq)[:, None] & (d < D)[None, :]
                if DQ == 2:
                    tl.store(to, tl.load(to, mask, 0.0) + dq_tile, mask)
                else:
                    tl.atomic_add(to, dq_tile, mask, sem="relaxed")
    return dk_acc, dv_acc
