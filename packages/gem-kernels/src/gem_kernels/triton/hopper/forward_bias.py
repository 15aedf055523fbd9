"""Forward pass on Hopper with relative bias by position and time, and candidates; see `forward` for what is alike.

A fourth partition prepares the bias of a tile before its keys are there: relative times of the keys, and for each consumer the first and
the last bucket that its rows can have with them (-1 where times are cut off, see `gem_kernels.triton.attention.bias_tables`).

The work list is ``table [tiles, 8]`` int32: first query row, query rows, first key row, history keys h, first row within the sample,
shift (position less row), candidates.
"""

# ruff: noqa: SIM102, SIM113 - a constexpr condition stands alone, so that what it guards is not compiled when it is false;
# the compiler knows no enumerate

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate
from gem_kernels.triton.attention.bias import add_buckets, add_far, add_position, add_strip, bucket_range, uncut
from gem_kernels.triton.attention.bias_tables import FAR
from gem_kernels.triton.attention.masks import sample_geometry
from gem_kernels.triton.hopper.common import alive, fill_flat, fill_rows, folded_value, load_box, make_barriers, store_box

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@triton.jit
def bias_table_kernel(table, tiles, count, q_offsets, k_offsets, num_targets, ROWS: tl.constexpr):
    """Spells out the entries of a tile list, one a program."""
    item = tl.program_id(0)
    if item < tl.load(count):
        entry = tl.load(tiles + item)
        sample = (entry >> 32).to(tl.int32)
        q_row, _out_row, lq, k_row, h, t, _c = sample_geometry(sample, q_offsets, k_offsets, num_targets, None, None, 0)
        to = table + item * 8
        tl.store(to, q_row.to(tl.int32))
        tl.store(to + 1, lq)
        tl.store(to + 2, k_row.to(tl.int32))
        tl.store(to + 3, h)
        tl.store(to + 4, ((entry & 0xFFFFFFFF) * ROWS).to(tl.int32))
        tl.store(to + 5, h + t - lq)
        tl.store(to + 6, t)


@gluon.jit
def read_entry(table, item, total, H: gl.constexpr):
    """(first row, rows, first key row, history keys, start, shift, candidates) of an item; anything past the end."""
    at = table + gl.maximum(gl.minimum(item, total - 1), 0) // H * 8
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5), gl.load(at + 6)


@gluon.jit
def key_blocks(m1, h, shift, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Blocks of history keys that rows below m1 see."""
    end = h
    if CAUSAL:
        end = gl.minimum(h, gl.maximum(gl.minimum(m1 - 1 + shift, h) + 1, 0))
    return (end + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _producer(
    q, k, v, table, total, q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % H
        row, lq, k_row, h, m0, shift, _t = read_entry(table, item, total, H)
        last = key_blocks(gl.minimum(m0 + 128, lq), h, shift, BLOCK_N, CAUSAL)
        slot = tile % 2
        mbarrier.wait(q_empty.index(slot), (tile // 2 & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), 2 * 128 * D)
        for half in gl.static_range(2):
            load_box(q, row, lq, m0 + half * 64, head * D, q_full.index(slot), q_slots.index(2 * slot + half), 64, D)
        tile += 1
        for x in range(last):
            n0 = (last - 1 - x) * BLOCK_N
            stage = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), 2 * BLOCK_N * D)
            load_box(k, k_row, h, n0, head // GROUP * D, k_full.index(stage), k_slots.index(stage), BLOCK_N, D)
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), 2 * BLOCK_N * D)
            load_box(v, k_row, h, n0, head // GROUP * D, v_full.index(stage), v_slots.index(stage), BLOCK_N, D)
            step += 1


@gluon.jit
def _range_of(t, live):
    return gl.min(gl.where(live, t, FAR), 0), gl.max(gl.where(live, t, -FAR), 0)


@gluon.jit
def _buckets(q_low, q_high, k_low, k_high, index, edges, STEPS: gl.constexpr):
    first = -1 + 0 * q_low
    last = first
    if uncut(q_low, q_high, k_low, k_high):
        first, last = bucket_range(q_low, q_high, k_low, k_high, index, edges, STEPS)
    return first, last


@gluon.jit
def clock(
    table, total, time_slots, bucket_slots, q_relative, k_relative, time_index, edges, k_full, k_empty,
    H: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TIME_STEPS: gl.constexpr,
):  # fmt: skip
    """Times and buckets of every tile of keys, beside it."""
    q_layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    k_layout: gl.constexpr = gl.BlockedLayout([BLOCK_N // 32], [32], [1], [0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    step = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        row, lq, k_row, h, m0, shift, _t = read_entry(table, item, total, H)
        last = key_blocks(gl.minimum(m0 + 128, lq), h, shift, BLOCK_N, CAUSAL)
        i = m0 + gl.arange(0, 64, layout=q_layout)
        low_0, high_0 = _range_of(gl.load(q_relative + row + i, i < lq, 0), i < lq)
        low_1, high_1 = _range_of(gl.load(q_relative + row + i + 64, i + 64 < lq, 0), i + 64 < lq)
        for x in range(last):
            j = (last - 1 - x) * BLOCK_N + gl.arange(0, BLOCK_N, layout=k_layout)
            t = gl.load(k_relative + k_row + j, j < h, 0)
            k_low, k_high = _range_of(t, j < h)
            first_0, last_0 = _buckets(low_0, high_0, k_low, k_high, time_index, edges, TIME_STEPS)
            first_1, last_1 = _buckets(low_1, high_1, k_low, k_high, time_index, edges, TIME_STEPS)
            stage = step % STAGES
            mbarrier.wait(k_empty.index(stage), (step // STAGES & 1) ^ 1)
            time_slots.index(stage).store(t)
            bucket_slots.index(4 * stage).store(gl.full([1], first_0, gl.int32, one))
            bucket_slots.index(4 * stage + 1).store(gl.full([1], last_0, gl.int32, one))
            bucket_slots.index(4 * stage + 2).store(gl.full([1], first_1, gl.int32, one))
            bucket_slots.index(4 * stage + 3).store(gl.full([1], last_1, gl.int32, one))
            mbarrier.arrive(k_full.index(stage), count=1)
            step += 1


@gluon.jit
def read_number(slots, n):
    """Element ``n`` of numbers in shared memory, as a scalar."""
    return gl.max(slots.index(n).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _consumer(
    out, lse, table, total, q_slots, k_slots, v_slots, o_buffer, time_slots, bucket_slots,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    position, pairs, time, time_index, time_edges, q_times, k_times, q_relative, own_scores, own_v,
    act_ids, rows, radius, edges, scale, out_scale, stride_p, stride_t, stride_vn, stride_vh,
    WHO: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr,
    ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STRIP: gl.constexpr, PLUS: gl.constexpr, PLUS_TYPES: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_slots.dtype
    step = 0
    tile = 0
    row, lq, k_row, h, m0, shift, t = read_entry(table, gl.program_id(0), total, H)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % H
        h = alive(h)
        n_row, n_lq, n_k_row, n_h, n_m0, n_shift, n_t = read_entry(table, item + gl.num_programs(0), total, H)
        last = key_blocks(gl.minimum(m0 + 128, lq), h, shift, BLOCK_N, CAUSAL)
        own = m0 + WHO * 64
        slot = tile % 2
        mbarrier.wait(q_full.index(slot), tile // 2 & 1)
        end = last * 0
        if own < lq:
            end = key_blocks(gl.minimum(own + 64, lq), h, shift, BLOCK_N, CAUSAL)
        for _x in range(last - end):
            stage = step % STAGES
            mbarrier.wait(k_full.index(stage), step // STAGES & 1)
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.wait(v_full.index(stage), step // STAGES & 1)
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1
        if own < lq:
            m1 = gl.minimum(own + 64, lq)
            p_min = gl.minimum(own + shift, h)
            p_max = gl.minimum(m1 - 1 + shift, h)
            q_tile = q_slots.index(2 * slot + WHO)
            act_id = 0
            if act_ids is not None:
                act_id = gl.load(act_ids + head)
            i = own + gl.arange(0, 64, layout=row_layout)
            p = gl.minimum(i + shift, h)
            tq = gl.load(q_relative + row + i, i < lq, 0)
            table_p = position + head.to(gl.int64) * stride_p
            pairs_p = pairs + head.to(gl.int64) * (2 * stride_p)
            table_t = time + head.to(gl.int64) * stride_t
            m_i = gl.full([64], float("-inf"), gl.float32, row_layout)
            l_i = gl.full([64], 0.0, gl.float32, row_layout)
            acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            for x in range(end):
                n0 = (end - 1 - x) * BLOCK_N
                stage = step % STAGES
                phase = step // STAGES & 1
                mbarrier.wait(k_full.index(stage), phase)
                s = gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout)
                s = warpgroup_mma(q_tile, k_slots.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
                tk = time_slots.index(stage).load(column_layout)
                first = read_number(bucket_slots, 4 * stage + 2 * WHO)
                final = read_number(bucket_slots, 4 * stage + 2 * WHO + 1)
                j = n0 + gl.arange(0, BLOCK_N, layout=column_layout)
                s = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(k_empty.index(stage), count=1)
                n1 = gl.minimum(n0 + BLOCK_N, h)
                if STRIP:
                    s = add_strip(
                        s * scale, p[:, None], j[None, :], n0 - p_max, n1 - 1 - p_min, table_p, pairs_p, n0 - own - shift, m1 <= lq - t,
                        radius, PLUS, PLUS_TYPES, BLOCK_N // 2,
                    )  # fmt: skip
                else:
                    s = add_position(s * scale, p[:, None], j[None, :], n0 - p_max, n1 - 1 - p_min, table_p, radius, True)
                if first >= 0:
                    s = add_buckets(s, tq[:, None], tk[None, :], first, final, table_t, time_index, edges, True)
                else:
                    s = add_far(s, i[:, None], j[None, :], lq, h, row, k_row, table_t, time_edges, q_times, k_times, edges)
                masked = n0 + BLOCK_N > h
                if CAUSAL:
                    masked = n0 + BLOCK_N > gl.minimum(h, p_min + 1)
                if SOFTMAX:
                    if masked:
                        seen = (j < h)[None, :] & (p[:, None] >= (j[None, :] if CAUSAL else p[:, None]))
                        s = gl.where(seen, s, float("-inf"))
                    m_new = gl.maximum(m_i, gl.max(s, 1) * LOG2E)
                    m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
                    weight = gl.exp2(s * LOG2E - m_safe[:, None])
                    alpha = gl.exp2(m_i - m_safe)
                    l_i = l_i * alpha + gl.sum(weight, 1)
                    acc = acc * gl.convert_layout(alpha, o_row_layout, assert_trivial=True)[:, None]
                    m_i = m_new
                else:
                    if FOLDED:
                        weight = folded_value(s, 1.0, FOLDED)
                    else:
                        weight = activate(s, act_id, ACT, ACT_SET, FAST)
                    if CAUSAL:
                        if masked:
                            weight = gl.where(p[:, None] >= j[None, :], weight, 0.0)
                p16 = gl.convert_layout(weight.to(dtype), gl.DotOperandLayout(0, o_layout, 2), assert_trivial=True)
                mbarrier.wait(v_full.index(stage), phase)
                acc = warpgroup_mma(p16, v_slots.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(stage), count=1)
                step += 1
            mbarrier.arrive(q_empty.index(slot), count=1)
            if own_scores is not None:
                if m1 > lq - t:
                    candidate = (i >= lq - t) & (i < lq)
                    score = gl.load(own_scores + head.to(gl.int64) * rows + row + i, candidate, 0.0)
                    if SOFTMAX:
                        score = gl.where(candidate, score * LOG2E, float("-inf"))
                        m_new = gl.maximum(m_i, score)
                        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
                        alpha = gl.exp2(m_i - m_safe)
                        share = gl.exp2(score - m_safe)
                        l_i = l_i * alpha + share
                        acc = acc * gl.convert_layout(alpha, o_row_layout, assert_trivial=True)[:, None]
                        m_i = m_new
                    elif FOLDED:
                        share = folded_value(score, 1.0, FOLDED)
                    else:
                        share = activate(score, act_id, ACT, ACT_SET, FAST).to(gl.float32)
                    r = own + gl.arange(0, 64, layout=o_row_layout)
                    c = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
                    at = own_v + (k_row + h - (lq - t) + r).to(gl.int64)[:, None] * stride_vn + head // GROUP * stride_vh + c[None, :]
                    v_own = gl.load(at, ((r >= lq - t) & (r < lq))[:, None], 0.0)
                    acc += gl.convert_layout(share, o_row_layout, assert_trivial=True)[:, None] * v_own.to(gl.float32)
            if SOFTMAX:
                live = l_i > 0
                factor = gl.where(live, out_scale / l_i, 0.0)
                acc = acc * gl.convert_layout(factor, o_row_layout, assert_trivial=True)[:, None]
                value = gl.where(live, (m_i + gl.log2(l_i)) * LN2, float("-inf"))
                gl.store(lse + head.to(gl.int64) * rows + row + i, value, i < lq)
            else:
                acc = acc * out_scale
            tma.store_wait(0)
            o_tile = o_buffer.index(WHO)
            o_tile.store(acc.to(dtype))
            fence_async_shared()
            store_box(out, row, lq, own, head * D, o_tile, 64, D)
        else:
            # No row of this half belongs to the sample.
            mbarrier.arrive(q_empty.index(slot), count=1)
        tile += 1
        row, lq, k_row, h, m0, shift, t = n_row, n_lq, n_k_row, n_h, n_m0, n_shift, n_t
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "rows", "radius", "edges"])
def hopper_bias_fwd_kernel(
    q, k, v, out_box, out, lse, table, tile_count, q_offsets,
    position, pairs, time, time_index, time_edges, q_times, k_times, q_relative, k_relative, own_scores, own_v, act_ids,
    batch, rows, radius, edges, scale, out_scale, stride_on, stride_p, stride_t, stride_vn, stride_vh,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, TIME_STEPS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STRIP: gl.constexpr, PLUS: gl.constexpr, PLUS_TYPES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    used = gl.load(q_offsets + batch).to(gl.int64)
    fill_rows(out, used, rows.to(gl.int64), stride_on, 0.0, H * D, num_warps)
    if SOFTMAX:
        for head in range(H):
            fill_flat(lse + head * rows.to(gl.int64), used, rows.to(gl.int64), float("-inf"), num_warps)
    total = gl.load(tile_count) * H
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_slots = gl.allocate_shared_memory(dtype, [4, 64, D], tile)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    o_buffer = gl.allocate_shared_memory(dtype, [2, 64, D], tile)
    time_slots = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], flat)
    bucket_slots = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 1], flat)
    q_full, q_empty = make_barriers(2, 1), make_barriers(2, 2)
    k_full, k_empty = make_barriers(STAGES, 2), make_barriers(STAGES, 2)
    v_full, v_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    out_box, lse, table, total, q_slots, k_slots, v_slots, o_buffer, time_slots, bucket_slots,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    position, pairs, time, time_index, time_edges, q_times, k_times, q_relative, own_scores, own_v,
                    act_ids, rows, radius, edges, scale, out_scale, stride_p, stride_t, stride_vn, stride_vh,
                    0, H, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, BLOCK_N, STAGES, STRIP, PLUS, PLUS_TYPES,
                ),
            ),
            (
                _consumer,
                (
                    out_box, lse, table, total, q_slots, k_slots, v_slots, o_buffer, time_slots, bucket_slots,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    position, pairs, time, time_index, time_edges, q_times, k_times, q_relative, own_scores, own_v,
                    act_ids, rows, radius, edges, scale, out_scale, stride_p, stride_t, stride_vn, stride_vh,
                    1, H, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, BLOCK_N, STAGES, STRIP, PLUS, PLUS_TYPES,
                ),
            ),
            (
                _producer,
                (
                    q, k, v, table, total, q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    H, GROUP, D, CAUSAL, BLOCK_N, STAGES,
                ),
            ),
            (
                clock,
                (
                    table, total, time_slots, bucket_slots, q_relative, k_relative, time_index, edges, k_full, k_empty,
                    H, CAUSAL, BLOCK_N, STAGES, TIME_STEPS,
                ),
            ),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )  # fmt: skip
