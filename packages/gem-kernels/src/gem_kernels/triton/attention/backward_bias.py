"""Gradients of the bias tables, dS summed by clamped distance and by time bucket, and of Q where that is wanted too.

A program serves one head throughout and adds into rows of ``partial [programs · rows, width]`` that are its alone; the caller adds them
up. The result is the same in every run. Row: PAD + 2R+1 + PAD distances, T buckets, and T sums from an edge on, of which entry b counts
for bucket b and against bucket b - 1.

With LANES (Hopper, half precision) a row belongs to each warp and one to the program. Every tile's diagonals and buckets are summed in
registers (`warp_sums`), and a tile beyond the table's ends adds to the entries beyond them.

Otherwise a program has one row, and additions to one address are ordered by a barrier a block. Row r of dS is shifted left by r (a gather
inside the tile), which turns diagonals into columns, and the columns are summed:

    dS    a b c d          shifted    . a b c d        sums    e   a+f ...      BLOCK_M + BLOCK_N - 1 values a block
          e f g h                     e f g h .                                 instead of BLOCK_M · BLOCK_N

Candidate rows share position h: their part is summed over rows. S, P and dS are computed as in `backward_dq`.
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.attention.bias import add_bias, bucket_range, load_times, own_bucket, uncut
from gem_kernels.triton.attention.masks import key_block, key_walk, sample_geometry, visible
from gem_kernels.triton.attention.tiles import load_own, load_rows, store_rows, zero_slack

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_by_distance(values, distance, table, radius):
    """Add ``values [W]`` at clamped ``distance [W]`` (all different): both clamped ends as one sum each, so that no address repeats."""
    tl.atomic_add(table, tl.sum(tl.where(distance <= -radius, values, 0.0), 0), sem="relaxed")
    tl.debug_barrier()
    tl.atomic_add(table + 2 * radius, tl.sum(tl.where((distance >= radius) & (distance > -radius), values, 0.0), 0), sem="relaxed")
    tl.atomic_add(table + distance + radius, values, (distance > -radius) & (distance < radius), sem="relaxed")


@triton.jit
def add_from_edges(
    ds, difference, first, last, rows, index, buckets, PAIRS: tl.constexpr, REACHING: tl.constexpr, REACHING_TYPES: tl.constexpr
):  # fmt: skip
    """Add the tile's sum to bucket ``first`` of the warps' rows, and its sums from each of its edges on behind the buckets."""
    edge = first * 0
    to = rows + first
    for bucket in range(first, last + 1):
        tl.inline_asm_elementwise(
            REACHING, REACHING_TYPES, [ds, difference, edge, to.to(tl.int64)], dtype=tl.int8, is_pure=False, pack=PAIRS
        )
        edge = tl.load(index + bucket, bucket < last, 0)
        to = rows + buckets + bucket + 1


@triton.jit
def add_from_far_edges(
    ds, ti, tj, rows, time_edges, edges, PAIRS: tl.constexpr, REACHING: tl.constexpr, REACHING_TYPES: tl.constexpr
):  # fmt: skip
    """`add_from_edges` of times in 64 bits (see `bias.add_time`), from all edges."""
    to = rows
    from_here = (edges * 0).to(tl.int64)
    for edge in range(0, edges + 1):
        reaches = tl.where((tj <= ti - from_here) | (tj >= ti + from_here), 1, 0)
        tl.inline_asm_elementwise(REACHING, REACHING_TYPES, [ds, reaches, 1, to.to(tl.int64)], dtype=tl.int8, is_pure=False, pack=PAIRS)
        from_here = tl.maximum(tl.load(time_edges + edge, edge < edges, 0), 0)
        to = rows + edges + 1 + edge + 1


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


@triton.jit(do_not_specialize=["batch", "left", "right", "radius", "edges", "width"])
def attention_bwd_bias_kernel(
    q, k, v, out, dout, lse, delta, dq, partial,
    q_offsets, k_offsets, num_targets, ds_own, target_k, context_len, kv_index,
    bias_position, bias_time, time_index, time_edges, q_times, k_times, q_relative, k_relative, act_ids,
    tiles, tile_count,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on, stride_oh, stride_don, stride_doh,
    stride_dqn, stride_dqh, stride_tkn, stride_tkh, stride_bp, stride_bt,
    batch, rows: tl.int64, left, right, radius, edges, width, scale, ds_scale, delta_scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    SOFTMAX: tl.constexpr, ACT: tl.constexpr, ACT_SET: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TIME_STEPS: tl.constexpr, PAD: tl.constexpr,
    LANES: tl.constexpr, DIAGONALS: tl.constexpr, COLUMNS: tl.constexpr, SUMS_TYPES: tl.constexpr,
    REACHING: tl.constexpr, REACHING_TYPES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    TARGETS: tl.constexpr = num_targets is not None
    CONTEXT: tl.constexpr = context_len is not None
    SPAN: tl.constexpr = 2 * (BLOCK_M if BLOCK_M > BLOCK_N else BLOCK_N)
    ROWS: tl.constexpr = BLOCK_M // 16 + 1 if LANES else 1
    PAIRS: tl.constexpr = BLOCK_N // 2
    if dq is not None:
        zero_slack(dq, q_offsets, batch, rows, stride_dqn, stride_dqh, H, D, D_PAD)
    pid = tl.program_id(0)
    head = pid % H
    kv_head = head // GROUP
    # Of the rows of warps, the first; then the program's.
    warp_distance = partial + pid.to(tl.int64) * width * ROWS + PAD
    warp_bucket = warp_distance + 2 * radius + 1 + PAD
    by_distance = warp_distance + width * (ROWS - 1)
    by_bucket = warp_bucket + width * (ROWS - 1)
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
        blocks, walk_head, walk_first, free0, free1 = key_walk(m0, m1, shift, h, c, left, right, BLOCK_N, CAUSAL, WINDOW, CONTEXT)
        q_tile = load_rows(q, q_row, m0, lq, head, stride_qn, stride_qh, BLOCK_M, D, D_PAD, TMA)
        do_tile = load_rows(dout, out_row, m0, lq, head, stride_don, stride_doh, BLOCK_M, DV, DV_PAD, TMA)
        lse_i = tl.zeros([BLOCK_M], tl.float32)
        delta_i = lse_i
        at = head.to(tl.int64) * rows + out_row + i
        if SOFTMAX:
            if dq is not None:
                o_tile = load_rows(out, out_row, m0, lq, head, stride_on, stride_oh, BLOCK_M, DV, DV_PAD, False)
                delta_i = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1) * delta_scale
                tl.store(delta + at, delta_i, i < lq)
            else:
                delta_i = tl.load(delta + at, i < lq, 0.0)
            lse_i = tl.load(lse + at, i < lq, float("-inf"))
            lse_i = tl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E)
        act_id = 0
        if act_ids is not None:
            act_id = tl.load(act_ids + head)
        tq, tq_low, tq_high = load_times(q_relative, q_row, m0, lq, BLOCK_M)
        acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)

        for x in tl.range(0, blocks):
            n0 = key_block(x, walk_head, walk_first, CONTEXT) * BLOCK_N
            n1 = tl.minimum(n0 + BLOCK_N, h)
            j = n0 + tl.arange(0, BLOCK_N)
            k_tile = load_rows(k, k_row, n0, h, kv_head, stride_kn, stride_kh, BLOCK_N, D, D_PAD, TMA)
            v_tile = load_rows(v, k_row, n0, h, kv_head, stride_vn, stride_vh, BLOCK_N, DV, DV_PAD, TMA)
            tk, tk_low, tk_high = load_times(k_relative, k_row, n0, h, BLOCK_N)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            s = add_bias(
                s * scale, p[:, None], i[:, None], j[None, :], n0 - p_max, n1 - 1 - p_min,
                tq[:, None], tk[None, :], tq_low, tq_high, tk_low, tk_high, lq, h, q_row, k_row, head,
                bias_position, bias_time, time_index, time_edges, q_times, k_times, stride_bp, stride_bt, radius, edges,
                TIME_STEPS, FAST > 0,
            )  # fmt: skip
            if SOFTMAX:
                ds = tl.exp2(s * LOG2E - lse_i[:, None]) * (dp - delta_i[:, None])
            else:
                _prob, slope = activate_with_slope(s, act_id, ACT, ACT_SET, FAST)
                ds = slope * dp
            if (n0 < free0) | (n0 + BLOCK_N > free1):
                seen = (j < h)[None, :] & visible(p[:, None], j[None, :], c, left, right, CAUSAL, WINDOW, CONTEXT)
                ds = tl.where(seen, ds, 0.0)
            if dq is not None:
                acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)

            past = ds
            if TARGETS:
                if m1 > lq - t:
                    past = tl.where((i < lq - t)[:, None], ds, 0.0)
                    if LANES:
                        to = warp_distance + radius + tl.maximum(n0 - h, -radius - BLOCK_N)
                        tl.inline_asm_elementwise(
                            COLUMNS, SUMS_TYPES, [ds - past, to.to(tl.int64)], dtype=tl.int8, is_pure=False, pack=PAIRS
                        )
                    else:
                        _add_by_distance(tl.sum(ds - past, 0), j - h, by_distance, radius)
                        tl.debug_barrier()
            diagonal = n0 - m0 - shift
            if LANES:
                diagonal = tl.minimum(tl.maximum(diagonal, 1 - radius - BLOCK_N), radius + BLOCK_M - 1)
                tl.inline_asm_elementwise(
                    DIAGONALS, SUMS_TYPES, [past, (warp_distance + radius + diagonal).to(tl.int64)],
                    dtype=tl.int8, is_pure=False, pack=PAIRS,
                )  # fmt: skip
            elif (n0 - p_max >= radius) | (n1 - 1 - p_min <= -radius):
                end = tl.where(n0 - p_max >= radius, 2 * radius, 0)
                tl.atomic_add(by_distance + end, tl.sum(tl.sum(past, 1), 0), sem="relaxed")
            else:
                offset = tl.arange(0, SPAN) - (BLOCK_M - 1)
                column = offset[None, :] + tl.arange(0, BLOCK_M)[:, None]
                inside = (column >= 0) & (column < BLOCK_N)
                shifted = tl.gather(past, tl.minimum(tl.maximum(column, 0), BLOCK_N - 1), 1)
                sums = tl.sum(tl.where(inside, shifted, 0.0), 0)
                _add_by_distance(sums, offset + diagonal, by_distance, radius)
            if bias_time is not None:
                if uncut(tq_low, tq_high, tk_low, tk_high):
                    first, last = bucket_range(tq_low, tq_high, tk_low, tk_high, time_index, edges, TIME_STEPS)
                    difference = tl.abs(tq[:, None] - tk[None, :])
                    if LANES:
                        add_from_edges(ds, difference, first, last, warp_bucket, time_index, edges + 1, PAIRS, REACHING, REACHING_TYPES)
                    else:
                        _add_by_bucket(ds, difference, first, last, by_bucket, time_index)
                else:
                    ti = tl.load(q_times + q_row + i, i < lq, 0).to(tl.int64)[:, None]
                    tj = tl.load(k_times + k_row + j, j < h, 0).to(tl.int64)[None, :]
                    if LANES:
                        add_from_far_edges(ds, ti, tj, warp_bucket, time_edges, edges, PAIRS, REACHING, REACHING_TYPES)
                    else:
                        _add_by_bucket(ds, tl.abs(ti - tj), 0, edges, by_bucket, time_edges)
            if not LANES:
                tl.debug_barrier()

        if TARGETS:
            if m1 > lq - t:
                candidate = (i >= lq - t) & (i < lq)
                own_row = q_row if kv_index is not None else k_row + h - (lq - t)
                ds_i = tl.load(ds_own + at, candidate, 0.0)
                tl.atomic_add(by_distance + radius, tl.sum(ds_i, 0), sem="relaxed")
                if bias_time is not None:
                    bucket = own_bucket(own_row, q_row, i, candidate, time_edges, q_times, k_times, edges, TIME_STEPS, kv_index is not None)
                    lowest = tl.min(tl.where(candidate, bucket, 1 << 30), 0)
                    for b in range(lowest, tl.max(tl.where(candidate, bucket, -1), 0) + 1):
                        tl.atomic_add(by_bucket + b, tl.sum(tl.where(bucket == b, ds_i, 0.0), 0), sem="relaxed")
                tl.debug_barrier()
                if dq is not None:
                    k_own = load_own(target_k, own_row, i, candidate, kv_head, stride_tkn, stride_tkh, D, D_PAD)
                    acc += ds_i[:, None] * k_own.to(tl.float32)
        if dq is not None:
            store_rows(dq, q_row, m0, lq, head, stride_dqn, stride_dqh, acc * ds_scale, BLOCK_M, D, D_PAD)
