"""Backward pass on Hopper with relative bias and candidates, key side; see `backward_dkdv` and `bias_codes` for what is alike.

The rows of dK and dV that are candidates' own are not written here. dPᵀ is multiplied once the bias is there, which takes fewer registers.
"""

# ruff: noqa: SIM102, SIM113 - a constexpr condition stands alone, so that what it guards is not compiled when it is false;
# the compiler knows no enumerate

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.hopper.bias_codes import (
    UNIT,
    biased_columns,
    codes_of,
    lane_entry,
    load_codes,
    prefetch_codes,
    prefetch_entry,
    query_blocks,
    read_entry,
)
from gem_kernels.triton.hopper.common import alive, fill_rows, folded_value_and_slope, load_box, make_barriers, pass_over_rows, store_box

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _producer(
    q, k, v, dout, table, codes, total, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    FETCH: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head = item % HKV
        q_row, lq, row, h, n0, shift, _t = read_entry(table, item, total, HKV)
        first, last = query_blocks(n0, lq, shift, CAUSAL)
        slot = tile % HELD
        mbarrier.wait(k_empty.index(slot), (tile // HELD & 1) ^ 1)
        mbarrier.expect(k_full.index(slot), 4 * 128 * D)
        for half in gl.static_range(2):
            at = n0 + half * 64
            load_box(k, row, h, at, kv_head * D, k_full.index(slot), k_slots.index(2 * slot + half), 64, D)
            load_box(v, row, h, at, kv_head * D, k_full.index(slot), v_slots.index(2 * slot + half), 64, D)
        tile += 1
        units = codes_of(codes, table, item, HKV, 0)
        for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
            for x in range(first, last):
                stage = step % STAGES
                if FETCH:
                    prefetch_codes(units + (x - first) * UNIT, 64)
                mbarrier.wait(q_empty.index(stage), (step // STAGES & 1) ^ 1)
                mbarrier.expect(q_full.index(stage), 4 * 64 * D)
                load_box(q, q_row, lq, x * 64, head * D, q_full.index(stage), q_slots.index(stage), 64, D)
                load_box(dout, q_row, lq, x * 64, head * D, q_full.index(stage), do_slots.index(stage), 64, D)
                step += 1


@gluon.jit
def _storer(dk, dv, table, total, k_slots, v_slots, k_empty, done, HKV: gl.constexpr, D: gl.constexpr, HELD: gl.constexpr):
    tile = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        _q_row, _lq, row, h, n0, _shift, _t = read_entry(table, item, total, HKV)
        column = item % HKV * D
        slot = tile % HELD
        mbarrier.wait(done.index(slot), tile // HELD & 1)
        for half in gl.static_range(2):
            at = n0 + half * 64
            store_box(dk, row, h, at, column, k_slots.index(2 * slot + half), 64, D)
            store_box(dv, row, h, at, column, v_slots.index(2 * slot + half), 64, D)
        tma.store_wait(0)
        mbarrier.arrive(k_empty.index(slot), count=1)
        tile += 1


@gluon.jit
def _statistics(
    lse, delta, table, total, lse_slots, delta_slots, q_full, q_empty, rows,
    HKV: gl.constexpr, GROUP: gl.constexpr, SOFTMAX: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    if SOFTMAX:
        layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
        step = 0
        for item in range(gl.program_id(0), total, gl.num_programs(0)):
            kv_head = item % HKV
            q_row, lq, _k_row, _h, n0, shift, _t = read_entry(table, item, total, HKV)
            first, last = query_blocks(n0, lq, shift, CAUSAL)
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                for x in range(first, last):
                    i = x * 64 + gl.arange(0, 64, layout=layout)
                    stage = step % STAGES
                    at = head.to(gl.int64) * rows + q_row + i
                    lse_i = gl.load(lse + at, i < lq, float("-inf"))
                    delta_i = gl.load(delta + at, i < lq, 0.0)
                    # Rows outside the sample and rows that see no key must give P = 2^(S - inf) = 0.
                    lse_i = gl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E)
                    mbarrier.wait(q_empty.index(stage), (step // STAGES & 1) ^ 1)
                    lse_slots.index(stage).store(lse_i)
                    delta_slots.index(stage).store(delta_i)
                    mbarrier.arrive(q_full.index(stage), count=1)
                    step += 1


@gluon.jit
def _consumer(
    table, total, q_slots, do_slots, k_slots, v_slots, lse_slots, delta_slots, q_full, q_empty, k_full, done,
    pairs, time, codes,
    act_ids, radius, edges, scale, ds_scale, dv_scale, stride_p, stride_t,
    WHO: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr,
    ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, LANES: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = q_slots.dtype
    step = 0
    tile = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head = item % HKV
        _q_row, lq, _k_row, h, n0, shift, _t = read_entry(table, item, total, HKV)
        if FETCH:
            prefetch_entry(table, item + gl.num_programs(0), total, HKV)
        first, last = query_blocks(n0, lq, shift, CAUSAL)
        own = n0 + WHO * 64
        slot = tile % HELD
        mbarrier.wait(k_full.index(slot), tile // HELD & 1)
        if own < h:
            k_tile = k_slots.index(2 * slot + WHO)
            v_tile = v_slots.index(2 * slot + WHO)
            j = own + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            j1 = gl.minimum(own + 64, h)
            units = codes_of(codes, table, item, HKV, WHO) - first.to(gl.int64) * UNIT
            dk_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            dv_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            begin, end = query_blocks(own, lq, shift, CAUSAL)
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                act_id = 0
                if act_ids is not None:
                    act_id = gl.load(act_ids + head)
                pairs_p = pairs + head.to(gl.int64) * (2 * stride_p)
                table_t = time + head.to(gl.int64) * stride_t
                entry = j * 0.0
                if LANES:
                    entry = lane_entry(table_t, edges, gl.SliceLayout(1, s_layout)) / scale
                step = pass_over_rows(begin - first, step, q_full, q_empty, STAGES)
                code = load_codes(units + begin * UNIT, s_layout)
                s = biased_columns(code, j, begin * 64 + shift, h, pairs_p, radius, table_t, entry, 1 / scale, LANES)
                for x in range(begin, end):
                    m0 = x * 64
                    stage = step % STAGES
                    dp = gl.full([64, 64], 0.0, gl.float32, s_layout)
                    mbarrier.wait(q_full.index(stage), step // STAGES & 1)
                    # In each step anew: descriptors of these tiles would be kept for all steps, on the stack.
                    held = alive(2 * slot + WHO)
                    s = warpgroup_mma(k_slots.index(held), q_slots.index(stage).permute((1, 0)), s, is_async=True)
                    i = m0 + gl.arange(0, 64, layout=column_layout)
                    p = gl.minimum(i + shift, h)
                    p_min = gl.minimum(m0 + shift, h)
                    s = warpgroup_mma_wait(0, deps=(s,))
                    if SOFTMAX:
                        prob = gl.exp2(s * (scale * LOG2E) - lse_slots.index(stage).load(column_layout)[None, :])
                        slope = prob
                    elif FOLDED:
                        prob, slope = folded_value_and_slope(s, scale, FOLDED)
                    else:
                        prob, slope = activate_with_slope(s * scale, act_id, ACT, ACT_SET, FAST)
                    if CAUSAL:
                        if j1 - 1 > p_min:
                            seen = j[:, None] <= p[None, :]
                            prob = gl.where(seen, prob, 0.0)
                            slope = gl.where(seen, slope, 0.0)
                    dp = warpgroup_mma(v_slots.index(held), do_slots.index(stage).permute((1, 0)), dp, use_acc=False, is_async=True)
                    p16 = gl.convert_layout(prob.to(dtype), p_layout, assert_trivial=True)
                    dv_acc = warpgroup_mma(p16, do_slots.index(stage), dv_acc, is_async=True)
                    dp = warpgroup_mma_wait(1, deps=(dp,))
                    if SOFTMAX:
                        dp = dp - delta_slots.index(stage).load(column_layout)[None, :]
                    ds16 = gl.convert_layout((slope * dp).to(dtype), p_layout, assert_trivial=True)
                    # Of the next tile; past the last one in vain.
                    code = load_codes(units + (x + 1) * UNIT, s_layout)
                    dk_acc = warpgroup_mma(ds16, q_slots.index(stage), dk_acc, is_async=True)
                    s = biased_columns(code, j, m0 + 64 + shift, h, pairs_p, radius, table_t, entry, 1 / scale, LANES)
                    dv_acc, dk_acc = warpgroup_mma_wait(0, deps=(dv_acc, dk_acc))
                    mbarrier.arrive(q_empty.index(stage), count=1)
                    step += 1
            k_tile.store((dk_acc * ds_scale).to(dtype))
            v_tile.store((dv_acc * dv_scale).to(dtype))
            fence_async_shared()
        else:
            # No key of this half belongs to the sample: keep the ring going.
            step = pass_over_rows((last - first) * GROUP, step, q_full, q_empty, STAGES)
        mbarrier.arrive(done.index(slot), count=1)
        tile += 1


@gluon.jit(do_not_specialize=["batch", "rows", "k_rows", "radius", "edges"])
def hopper_bias_dkdv_kernel(
    q, k, v, dout, dk_box, dv_box, dk, dv, lse, delta, table, tile_count, k_offsets,
    pairs, time, codes, act_ids,
    batch, rows, k_rows, radius, edges, scale, ds_scale, dv_scale, stride_dk, stride_p, stride_t,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, LANES: gl.constexpr, FETCH: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    used = gl.load(k_offsets + batch).to(gl.int64)
    fill_rows(dk, used, k_rows.to(gl.int64), stride_dk, 0.0, HKV * D, num_warps)
    fill_rows(dv, used, k_rows.to(gl.int64), stride_dk, 0.0, HKV * D, num_warps)
    total = gl.load(tile_count) * HKV
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    k_slots = gl.allocate_shared_memory(dtype, [2 * HELD, 64, D], tile)
    v_slots = gl.allocate_shared_memory(dtype, [2 * HELD, 64, D], tile)
    q_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    do_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_slots = gl.allocate_shared_memory(gl.float32, [STAGES, 64], flat)
    delta_slots = gl.allocate_shared_memory(gl.float32, [STAGES, 64], flat)
    q_full, q_empty = make_barriers(STAGES, 2 if SOFTMAX else 1), make_barriers(STAGES, 2)
    k_full, k_empty, done = make_barriers(HELD, 1), make_barriers(HELD, 1), make_barriers(HELD, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    table, total, q_slots, do_slots, k_slots, v_slots, lse_slots, delta_slots,
                    q_full, q_empty, k_full, done,
                    pairs, time, codes,
                    act_ids, radius, edges, scale, ds_scale, dv_scale, stride_p, stride_t,
                    0, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, STAGES, HELD, LANES, FETCH,
                ),
            ),
            (
                _consumer,
                (
                    table, total, q_slots, do_slots, k_slots, v_slots, lse_slots, delta_slots,
                    q_full, q_empty, k_full, done,
                    pairs, time, codes,
                    act_ids, radius, edges, scale, ds_scale, dv_scale, stride_p, stride_t,
                    1, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, STAGES, HELD, LANES, FETCH,
                ),
            ),
            (
                _producer,
                (
                    q, k, v, dout, table, codes, total, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty,
                    HKV, GROUP, D, CAUSAL, STAGES, HELD, FETCH,
                ),
            ),
            (
                _statistics,
                (lse, delta, table, total, lse_slots, delta_slots, q_full, q_empty, rows, HKV, GROUP, SOFTMAX, CAUSAL, STAGES),
            ),
            (_storer, (dk_box, dv_box, table, total, k_slots, v_slots, k_empty, done, HKV, D, HELD)),
        ],
        [4, 1, 1, 1],
        [232, 40, 40, 40],
    )  # fmt: skip
