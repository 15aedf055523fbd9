"""Gradients of the bias tables: dS summed by clamped distance and by time bucket.

A program serves one head throughout and adds into a row of ``partial [programs, 2R+1 + T]`` that is its alone; the caller sums the rows.
Within a program additions to one address are ordered by a barrier a block, so the result is the same in every run.

Distances of a block of history rows are constant along diagonals. Row r of dS is shifted left by r (a gather inside the tile), which turns
diagonals into columns, and the columns are summed:

    dS    a b c d          shifted    . a b c d        sums    e   a+f ...      BLOCK_M + BLOCK_N - 1 values a block
          e f g h                     e f g h .                                 instead of BLOCK_M · BLOCK_N

Candidate rows share position h: their part is summed over rows. S, P and dS are recomputed as in `backward_dq`.
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.attention.bias import bucket_range, load_times, own_bucket, pair_bias
from gem_kernels.triton.attention.masks import key_block, key_walk, sample_geometry, visible
from gem_kernels.triton.attention.tiles import load_rows

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_by_distance(values, distance, table, radius):
    """Add ``values [W]`` at clamped ``distance [W]`` (all different): both clamped ends as one sum each, so that no address repeats."""
    tl.atomic_add(table, tl.sum(tl.where(distance <= -radius, values, 0.0), 0), sem="relaxed")
    tl.debug_barrier()
    tl.atomic_add(table + 2 * radius, tl.sum(tl.where((distance >= radius) & (distance > -radius), values, 0.0), 0), sem="relaxed")
    tl.atomic_add(table + distance + radius, values, (distance > -radius) & (distance < radius), sem="relaxed")


@triton.jit
def _add_by_bucket(values, difference, first, last, table, edges):
    """Add ``values [M, N]`` at the bucket of ``difference``, all of which lie in buckets first .. last."""
    if first == last:
        tl.atomic_add(table + first, tl.sum(tl.sum(values, 1), 0), sem="relaxed")
    else:
        for bucket in range(first, last + 1):
            part = values
            if bucket > first:
                part = tl.where(difference >= tl.load(edges + bucket - 1), part, 0.0)
            if bucket < last:
                part = tl.where(difference < tl.load(edges + bucket), part, 0.0)
            tl.atomic_add(table + bucket, tl.sum(tl.sum(part, 1), 0), sem="relaxed")


@triton.jit(do_not_specialize=["left", "right", "radius", "edges", "width"])
def attention_bwd_bias_kernel(
    q, k, v, dout, lse, delta, partial,
    q_offsets, k_offsets, num_targets, ds_own, context_len, kv_index,
    bias_position, bias_time, time_edges, q_times, k_times, act_ids,
    tiles, tile_count,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_don, stride_doh,
    stride_bp, stride_bt,
    rows: tl.int64, left, right, radius, edges, width, scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TIME_STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    TARGETS: tl.constexpr = num_targets is not None
    CONTEXT: tl.constexpr = context_len is not None
    SPAN: tl.constexpr = 2 * (BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N)
    pid = tl.program_id(0)
    head = pid % H
    kv_head = head // GROUP
    by_distance = partial + pid.to(tl.int64) * width
    by_bucket = by_distance + 2 * radius + 1
    total = tl.load(tile_count) * H
    for item in tl.range(pid, total, tl.num_programs(0)):
        entry = tl.load(tiles + item // H)
        sample = (entry >> 32).to(tl.int32)
        m0 = (entry & 0xFFFFFFFF).to(tl.int32) * BLOCK_M
        q_row, out_row, lq, k_row, h, t, c = sample_geometry(sample, q_offsets, k_offsets, num_targets, context_len, kv_index, 0)
        shift = h + t - lq
        m1 = tl.minimum(m0 + BLOCK_M, lq)
        i = m0 + tl.arange(0, BLOCK_M)
        p = tl.minimum(i + shift, h)
        p_min = tl.minimum(m0 + shift, h)
        p_max = tl.minimum(m1 - 1 + shift, h)
        blocks, walk_head, walk_first, _free0, _free1 = key_walk(m0, m1, shift, h, c, left, right, BLOCK_N, CAUSAL, WINDOW, CONTEXT)
        q_tile = load_rows(q, q_row, m0, lq, head, stride_qn, stride_qh, BLOCK_M, D, D_PAD, TMA)
        do_tile = load_rows(dout, out_row, m0, lq, head, stride_don, stride_doh, BLOCK_M, DV, DV_PAD, TMA)
        lse_i = tl.zeros([BLOCK_M], tl.float32)
        delta_i = lse_i
        if SOFTMAX:
            at = head.to(tl.int64) * rows + out_row + i
            delta_i = tl.load(delta + at, i < lq, 0.0)
            lse_i = tl.load(lse + at, i < lq, float("-inf"))
            lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E)
        act_id = 0
        if act_ids is not None:
            act_id = tl.load(act_ids + head)
        tq, tq_low, tq_high = load_times(q_times, q_row, m0, lq, BLOCK_M)

        if TARGETS:
            if m1 > lq - t:
                candidate = (i >= lq - t) & (i < lq)
                own_row = q_row if kv_index is not None else k_row + h - (lq - t)
                ds_i = tl.load(ds_own + head.to(tl.int64) * rows + out_row + i, candidate, 0.0)
                if bias_position is not None:
                    tl.atomic_add(by_distance + radius, tl.sum(ds_i, 0), sem="relaxed")
                if bias_time is not None:
                    bucket = own_bucket(tq, own_row, i, candidate, time_edges, k_times, edges, TIME_STEPS, kv_index is not None)
                    lowest = tl.min(tl.where(candidate, bucket, 1 << 30), 0)
                    for b in range(lowest, tl.max(tl.where(candidate, bucket, -1), 0) + 1):
                        tl.atomic_add(by_bucket + b, tl.sum(tl.where(bucket == b, ds_i, 0.0), 0), sem="relaxed")
                tl.debug_barrier()

        for x in tl.range(0, blocks):
            n0 = key_block(x, walk_head, walk_first, CONTEXT) * BLOCK_N
            n1 = tl.minimum(n0 + BLOCK_N, h)
            j = n0 + tl.arange(0, BLOCK_N)
            k_tile = load_rows(k, k_row, n0, h, kv_head, stride_kn, stride_kh, BLOCK_N, D, D_PAD, TMA)
            v_tile = load_rows(v, k_row, n0, h, kv_head, stride_vn, stride_vh, BLOCK_N, DV, DV_PAD, TMA)
            tk, tk_low, tk_high = load_times(k_times, k_row, n0, h, BLOCK_N)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale + pair_bias(
                p[:, None], j[None, :], n0 - p_max, n1 - 1 - p_min, tq[:, None], tk[None, :], tq_low, tq_high, tk_low, tk_high, head,
                bias_position, bias_time, time_edges, stride_bp, stride_bt, radius, edges, TIME_STEPS,
            )  # fmt: skip
            ds = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            if SOFTMAX:
                ds = tl.exp2(s * LOG2E - lse_i[:, None]) * (ds - delta_i[:, None])
            else:
                _prob, slope = activate_with_slope(s, act_id, ACT, ACT_SET, FAST)
                ds = slope * ds
            seen = (i < lq)[:, None] & (j < h)[None, :]
            if CAUSAL or WINDOW:
                seen = seen & visible(p[:, None], j[None, :], c, left, right, CAUSAL, WINDOW, CONTEXT)
            ds = tl.where(seen, ds, 0.0)
            if bias_position is not None:
                if (n0 - p_max >= radius) | (n1 - 1 - p_min <= -radius):
                    end = tl.where(n0 - p_max >= radius, 2 * radius, 0)
                    tl.atomic_add(by_distance + end, tl.sum(tl.sum(ds, 1), 0), sem="relaxed")
                else:
                    past = ds
                    if TARGETS:
                        past = tl.where((i < lq - t)[:, None], ds, 0.0)
                        if m1 > lq - t:
                            _add_by_distance(tl.sum(ds - past, 0), j - h, by_distance, radius)
                            tl.debug_barrier()
                    diagonal = tl.arange(0, SPAN) - (BLOCK_M - 1)
                    column = diagonal[None, :] + tl.arange(0, BLOCK_M)[:, None]
                    inside = (column >= 0) & (column < BLOCK_N)
                    shifted = tl.gather(past, tl.minimum(tl.maximum(column, 0), BLOCK_N - 1), 1)
                    sums = tl.sum(tl.where(inside, shifted, 0.0), 0)
                    _add_by_distance(sums, diagonal + (n0 - m0 - shift), by_distance, radius)
            if bias_time is not None:
                first, last, _far = bucket_range(tq_low, tq_high, tk_low, tk_high, time_edges, edges, TIME_STEPS)
                _add_by_bucket(ds, tl.abs(tq[:, None] - tk[None, :]), first, last, by_bucket, time_edges)
            tl.debug_barrier()
