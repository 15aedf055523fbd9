"""Forward pass on Hopper with relative bias by position and time, and candidates; see `forward` for what is alike, and `bias_codes` for the
work list and how the bias is added.

Rows are at positions of their own, and candidates' rows at the end of the history; each of these sees itself besides, in a pair of its own.
"""

# ruff: noqa: SIM102, SIM113 - a constexpr condition stands alone, so that what it guards is not compiled when it is false;
# the compiler knows no enumerate

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate
from gem_kernels.triton.hopper.bias_codes import (
    UNIT,
    add_entries,
    add_rows,
    codes_of,
    key_blocks,
    lane_entry,
    load_codes,
    prefetch_codes,
    prefetch_entry,
    read_entry,
)
from gem_kernels.triton.hopper.common import fill_flat, fill_rows, folded_value, load_box, make_barriers, pass_over, store_box
from gem_kernels.triton.hopper.forward import _finish, _scores

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _producer(
    q, k, v, table, codes, total, q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    FETCH: gl.constexpr,
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
        units = codes_of(codes, table, item, H, 0)
        for x in range(last):
            n0 = (last - 1 - x) * BLOCK_N
            stage = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            if FETCH:
                prefetch_codes(units + n0 // 64 * UNIT, BLOCK_N)
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), 2 * BLOCK_N * D)
            load_box(k, k_row, h, n0, head // GROUP * D, k_full.index(stage), k_slots.index(stage), BLOCK_N, D)
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), 2 * BLOCK_N * D)
            load_box(v, k_row, h, n0, head // GROUP * D, v_full.index(stage), v_slots.index(stage), BLOCK_N, D)
            step += 1


@gluon.jit
def _consumer(
    out, lse, table, total, q_slots, k_slots, v_slots, o_buffer,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    pairs, time, codes, own_scores, own_v,
    act_ids, rows, radius, edges, scale, out_scale, stride_p, stride_t, stride_vn, stride_vh,
    WHO: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr,
    ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LANES: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_slots.dtype
    step = 0
    tile = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % H
        row, lq, k_row, h, m0, shift, t = read_entry(table, item, total, H)
        if FETCH:
            prefetch_entry(table, item + gl.num_programs(0), total, H)
        last = key_blocks(gl.minimum(m0 + 128, lq), h, shift, BLOCK_N, CAUSAL)
        own = m0 + WHO * 64
        slot = tile % 2
        mbarrier.wait(q_full.index(slot), tile // 2 & 1)
        end = last * 0
        if own < lq:
            end = key_blocks(gl.minimum(own + 64, lq), h, shift, BLOCK_N, CAUSAL)
        step = pass_over(last - end, step, k_full, k_empty, v_full, v_empty, STAGES, False)
        if own < lq:
            m1 = gl.minimum(own + 64, lq)
            p_min = gl.minimum(own + shift, h)
            q_tile = q_slots.index(2 * slot + WHO)
            act_id = 0
            if act_ids is not None:
                act_id = gl.load(act_ids + head)
            i = own + gl.arange(0, 64, layout=row_layout)
            p = gl.minimum(i + shift, h)
            pairs_p = pairs + head.to(gl.int64) * (2 * stride_p)
            table_t = time + head.to(gl.int64) * stride_t
            entry = i * 0.0
            if LANES:
                entry = lane_entry(table_t, edges, row_layout)
            m_i = gl.full([64], float("-inf"), gl.float32, row_layout)
            l_i = gl.full([64], 0.0, gl.float32, row_layout)
            acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            units = codes_of(codes, table, item, H, WHO)
            for x in range(end):
                n0 = (end - 1 - x) * BLOCK_N
                stage = step % STAGES
                code = load_codes(units + n0 // 64 * UNIT, s_layout)
                s = _scores(q_tile, k_slots, k_full, step, gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout), STAGES)
                s = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(k_empty.index(stage), count=1)
                j = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
                s = add_rows(s, scale, p, n0, pairs_p, radius)
                s = add_entries(s, code, table_t, entry, LANES)
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
                mbarrier.wait(v_full.index(stage), step // STAGES & 1)
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
            acc = _finish(lse, m_i, l_i, acc, head.to(gl.int64) * rows + row, i, lq, out_scale, SOFTMAX)
            tma.store_wait(0)
            o_tile = o_buffer.index(WHO)
            o_tile.store(acc.to(dtype))
            fence_async_shared()
            store_box(out, row, lq, own, head * D, o_tile, 64, D)
        else:
            # No row of this half belongs to the sample.
            mbarrier.arrive(q_empty.index(slot), count=1)
        tile += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "rows", "radius", "edges"])
def hopper_bias_fwd_kernel(
    q, k, v, out_box, out, lse, table, tile_count, q_offsets,
    pairs, time, codes, own_scores, own_v, act_ids,
    batch, rows, radius, edges, scale, out_scale, stride_on, stride_p, stride_t, stride_vn, stride_vh,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LANES: gl.constexpr, FETCH: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    used = gl.load(q_offsets + batch).to(gl.int64)
    fill_rows(out, used, rows.to(gl.int64), stride_on, 0.0, H * D, num_warps)
    if SOFTMAX:
        for head in range(H):
            fill_flat(lse + head * rows.to(gl.int64), used, rows.to(gl.int64), float("-inf"), num_warps)
    total = gl.load(tile_count) * H
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    q_slots = gl.allocate_shared_memory(dtype, [4, 64, D], tile)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    o_buffer = gl.allocate_shared_memory(dtype, [2, 64, D], tile)
    q_full, q_empty = make_barriers(2, 1), make_barriers(2, 2)
    k_full, k_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    v_full, v_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    out_box, lse, table, total, q_slots, k_slots, v_slots, o_buffer,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    pairs, time, codes, own_scores, own_v,
                    act_ids, rows, radius, edges, scale, out_scale, stride_p, stride_t, stride_vn, stride_vh,
                    0, H, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, BLOCK_N, STAGES, LANES, FETCH,
                ),
            ),
            (
                _consumer,
                (
                    out_box, lse, table, total, q_slots, k_slots, v_slots, o_buffer,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    pairs, time, codes, own_scores, own_v,
                    act_ids, rows, radius, edges, scale, out_scale, stride_p, stride_t, stride_vn, stride_vh,
                    1, H, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, BLOCK_N, STAGES, LANES, FETCH,
                ),
            ),
            (
                _producer,
                (
                    q, k, v, table, codes, total, q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    H, GROUP, D, CAUSAL, BLOCK_N, STAGES, FETCH,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
