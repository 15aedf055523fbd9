"""Backward pass on Hopper for short keys, in one kernel: a program has all keys of a (sample, head), one tile of 128 after the other. Two
warpgroups, each with 64 keys of the tile, share tiles of 64 query rows.

    Sᵀ = K Qᵀ, dPᵀ = V dOᵀ  ->  Pᵀ, dSᵀ, in registers  ->  dV += Pᵀ dO, dK += dSᵀ Q
    dSᵀ of both warpgroups meets in shared memory      ->  dQ = dS K, 64 columns of it a warpgroup      five products a tile

dQ is multiplied before dK, so that it leaves while dK is multiplied. The first key tile writes dQ, the following ones add theirs by TMA, in
order, each time rounded to the dtype: for few tiles. dK and dV leave through the slots of K and V, of which the next tile has others.
delta = rowsum(O ∘ dO) is in memory beforehand. Summing dQ in fp32 for longer keys was slower than the two kernels that compute two products
more.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.hopper.common import (
    LOG2E,
    add_box,
    alive,
    fill_rows,
    finish_stores,
    folded_value_and_slope,
    item_at,
    items,
    key_parts,
    load_box,
    make_barriers,
    read_tile,
    statistics,
    store_box,
)  # fmt: skip


@gluon.jit
def _producer(
    q, k, v, dout, table, total, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    for n in range(items(total)):
        item = item_at(n)
        kv_head = item % HKV
        row, lk, q_row, lq, _n0 = read_tile(table, item, total, HKV)
        for part in range(key_parts(lk)):
            slot = tile % 2
            mbarrier.wait(k_empty.index(slot), (tile // 2 & 1) ^ 1)
            mbarrier.expect(k_full.index(slot), 4 * 128 * D)
            for half in gl.static_range(2):
                at = part * 128 + half * 64
                load_box(k, row, lk, at, kv_head * D, k_full.index(slot), k_slots.index(2 * slot + half), 64, D)
                load_box(v, row, lk, at, kv_head * D, k_full.index(slot), v_slots.index(2 * slot + half), 64, D)
            tile += 1
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                for x in range((lq + 63) // 64):
                    stage = step % STAGES
                    mbarrier.wait(q_empty.index(stage), (step // STAGES & 1) ^ 1)
                    mbarrier.expect(q_full.index(stage), 4 * 64 * D)
                    load_box(q, q_row, lq, x * 64, head * D, q_full.index(stage), q_slots.index(stage), 64, D)
                    load_box(dout, q_row, lq, x * 64, head * D, q_full.index(stage), do_slots.index(stage), 64, D)
                    step += 1


@gluon.jit
def _storer(dk, dv, table, total, k_slots, v_slots, k_empty, done, HKV: gl.constexpr, D: gl.constexpr):
    tile = 0
    for n in range(items(total)):
        item = item_at(n)
        row, lk, _q_row, _lq, _n0 = read_tile(table, item, total, HKV)
        for part in range(key_parts(lk)):
            slot = tile % 2
            mbarrier.wait(done.index(slot), tile // 2 & 1)
            for half in gl.static_range(2):
                at = part * 128 + half * 64
                store_box(dk, row, lk, at, item % HKV * D, k_slots.index(2 * slot + half), 64, D)
                store_box(dv, row, lk, at, item % HKV * D, v_slots.index(2 * slot + half), 64, D)
            tma.store_wait(0)
            mbarrier.arrive(k_empty.index(slot), count=1)
            tile += 1


@gluon.jit
def _previous_step(step, q_empty, STAGES: gl.constexpr):
    """Wait until both consumers are through with the step before ``step``, so also with its dS and with K."""
    last = step + STAGES - 1
    mbarrier.wait(q_empty.index(last % STAGES), (last // STAGES & 1) ^ 1)


@gluon.jit
def _consumer(
    dq, table, total, q_slots, do_slots, k_slots, v_slots, ds_slots, staging, lse_slots, delta_slots,
    q_full, q_empty, k_full, done, ds_full,
    act_ids, scale, ds_scale, dv_scale,
    WHO: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr,
    ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = D // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = q_slots.dtype
    dq_part = staging.index(WHO)
    step = 0
    tile = 0
    _row, lk, q_row, lq, _n0 = read_tile(table, item_at(0), total, HKV)
    for n in range(items(total)):
        item = item_at(n)
        kv_head = item % HKV
        lq = alive(lq)
        lk = alive(lk)
        _n_row, n_lk, n_q_row, n_lq, _n_n0 = read_tile(table, item_at(n + 1), total, HKV)
        for part in range(key_parts(lk)):
            adds = part
            if part > 0:
                adds = finish_stores(part)
            slot = tile % 2
            k_tile = k_slots.index(2 * slot + WHO)
            v_tile = v_slots.index(2 * slot + WHO)
            k_left = k_slots.index(2 * slot).slice(WHO * HALF, HALF, dim=1)
            k_right = k_slots.index(2 * slot + 1).slice(WHO * HALF, HALF, dim=1)
            dk_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            dv_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            mbarrier.wait(k_full.index(slot), tile // 2 & 1)
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                act_id = 0
                if act_ids is not None:
                    act_id = gl.load(act_ids + head)
                for x in range((lq + 63) // 64):
                    stage = step % STAGES
                    q_tile = q_slots.index(stage)
                    do_tile = do_slots.index(stage)
                    zero = gl.full([64, 64], 0.0, gl.float32, s_layout)
                    mbarrier.wait(q_full.index(stage), step // STAGES & 1)
                    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                    dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(1, deps=(s,))
                    if SOFTMAX:
                        lse_i = lse_slots.index(stage).load(column_layout)
                        # Keys past the end are zero rows: P <= 1 keeps their dS finite.
                        p = gl.exp2(gl.minimum(s * (scale * LOG2E) - lse_i[None, :], 0.0))
                        slope = p
                    else:
                        if FOLDED:
                            p, slope = folded_value_and_slope(s, scale, FOLDED)
                        else:
                            p, slope = activate_with_slope(s * scale, act_id, ACT, ACT_SET, FAST)
                    p16 = gl.convert_layout(p.to(dtype), p_layout, assert_trivial=True)
                    dv_acc = warpgroup_mma(p16, do_tile, dv_acc, is_async=True)
                    dp = warpgroup_mma_wait(1, deps=(dp,))
                    if SOFTMAX:
                        dp = dp - delta_slots.index(stage).load(column_layout)[None, :]
                    ds = (slope * dp).to(dtype)
                    _previous_step(step, q_empty, STAGES)
                    ds_slots.index(WHO).store(ds)
                    fence_async_shared()
                    mbarrier.arrive(ds_full.index(0), count=1)
                    ds16 = gl.convert_layout(ds, p_layout, assert_trivial=True)
                    mbarrier.wait(ds_full.index(0), step & 1)
                    dq_tile = gl.full([64, HALF], 0.0, gl.float32, dq_layout)
                    dq_tile = warpgroup_mma(ds_slots.index(0).permute((1, 0)), k_left, dq_tile, use_acc=False, is_async=True)
                    dq_tile = warpgroup_mma(ds_slots.index(1).permute((1, 0)), k_right, dq_tile, is_async=True)
                    dk_acc = warpgroup_mma(ds16, q_tile, dk_acc, is_async=True)
                    dv_acc, dq_tile = warpgroup_mma_wait(1, deps=(dv_acc, dq_tile))
                    tma.store_wait(0)
                    dq_part.store((dq_tile * ds_scale).to(dtype))
                    fence_async_shared()
                    if adds == 0:
                        store_box(dq, q_row, lq, x * 64, head * D + WHO * HALF, dq_part, 64, HALF)
                    else:
                        add_box(dq, q_row, lq, x * 64, head * D + WHO * HALF, dq_part, 64, HALF)
                    dk_acc = warpgroup_mma_wait(0, deps=(dk_acc,))
                    mbarrier.arrive(q_empty.index(stage), count=1)
                    step += 1
            v_tile.store((dv_acc * dv_scale).to(dtype))
            # The other warpgroup's last dQ has read these keys.
            _previous_step(step, q_empty, STAGES)
            k_tile.store((dk_acc * ds_scale).to(dtype))
            fence_async_shared()
            mbarrier.arrive(done.index(slot), count=1)
            tile += 1
        lk, q_row, lq = n_lk, n_q_row, n_lq
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "rows", "k_rows"])
def hopper_bwd_kernel(
    q, k, v, dout, dq_box, dk_box, dv_box, dq, dk, dv, lse, delta, table, tile_count, q_offsets, k_offsets, act_ids,
    batch, rows, k_rows, scale, ds_scale, dv_scale, stride_dq, stride_dk,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    used = gl.load(k_offsets + batch).to(gl.int64)
    fill_rows(dk, used, k_rows.to(gl.int64), stride_dk, 0.0, HKV * D, num_warps)
    fill_rows(dv, used, k_rows.to(gl.int64), stride_dk, 0.0, HKV * D, num_warps)
    fill_rows(dq, gl.load(q_offsets + batch).to(gl.int64), rows.to(gl.int64), stride_dq, 0.0, HKV * GROUP * D, num_warps)
    total = gl.load(tile_count) * HKV
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    k_slots = gl.allocate_shared_memory(dtype, [4, 64, D], tile)
    v_slots = gl.allocate_shared_memory(dtype, [4, 64, D], tile)
    q_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    do_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    ds_slots = gl.allocate_shared_memory(dtype, [2, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype))
    staging = gl.allocate_shared_memory(dtype, [2, 64, D // 2], gl.NVMMASharedLayout.get_default_for([64, D // 2], dtype))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_slots = gl.allocate_shared_memory(gl.float32, [STAGES, 64], flat)
    delta_slots = gl.allocate_shared_memory(gl.float32, [STAGES, 64], flat)
    q_full, q_empty = make_barriers(STAGES, 2 if SOFTMAX else 1), make_barriers(STAGES, 2)
    k_full, k_empty, done = make_barriers(2, 1), make_barriers(2, 1), make_barriers(2, 2)
    ds_full = make_barriers(1, 2)
    fence_async_shared()
    if SOFTMAX:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        dq_box, table, total, q_slots, do_slots, k_slots, v_slots, ds_slots, staging, lse_slots, delta_slots,
                        q_full, q_empty, k_full, done, ds_full, act_ids, scale, ds_scale, dv_scale,
                        0, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, STAGES,
                    ),
                ),
                (
                    _consumer,
                    (
                        dq_box, table, total, q_slots, do_slots, k_slots, v_slots, ds_slots, staging, lse_slots, delta_slots,
                        q_full, q_empty, k_full, done, ds_full, act_ids, scale, ds_scale, dv_scale,
                        1, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, STAGES,
                    ),
                ),
                (
                    _producer,
                    (
                        q, k, v, dout, table, total, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty,
                        HKV, GROUP, D, STAGES,
                    ),
                ),
                (
                    statistics,
                    (
                        lse, delta, table, total, lse_slots, delta_slots, q_full, q_empty, rows, 0, 0,
                        HKV, GROUP, False, False, STAGES, True,
                    ),
                ),
                (_storer, (dk_box, dv_box, table, total, k_slots, v_slots, k_empty, done, HKV, D)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        dq_box, table, total, q_slots, do_slots, k_slots, v_slots, ds_slots, staging, lse_slots, delta_slots,
                        q_full, q_empty, k_full, done, ds_full, act_ids, scale, ds_scale, dv_scale,
                        0, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, STAGES,
                    ),
                ),
                (
                    _consumer,
                    (
                        dq_box, table, total, q_slots, do_slots, k_slots, v_slots, ds_slots, staging, lse_slots, delta_slots,
                        q_full, q_empty, k_full, done, ds_full, act_ids, scale, ds_scale, dv_scale,
                        1, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, STAGES,
                    ),
                ),
                (
                    _producer,
                    (
                        q, k, v, dout, table, total, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty,
                        HKV, GROUP, D, STAGES,
                    ),
                ),
                (_storer, (dk_box, dv_box, table, total, k_slots, v_slots, k_empty, done, HKV, D)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
