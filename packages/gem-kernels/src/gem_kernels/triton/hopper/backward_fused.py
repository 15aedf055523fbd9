"""Backward pass on Hopper for short keys, in one kernel: a program has all keys of a (sample, head), one tile of 128 after the other. Two
warpgroups, each with 64 keys of the tile, share tiles of 64 query rows.

    Sᵀ = K Qᵀ, dPᵀ = V dOᵀ  ->  Pᵀ, dSᵀ, in registers  ->  dV += Pᵀ dO, dK += dSᵀ Q
    dSᵀ of both warpgroups meets in shared memory      ->  dQ = dS K, 64 columns of it a warpgroup      five products a tile

The first key tile writes dQ, the following ones add theirs by TMA, in order, each time rounded to the dtype: for few tiles. dK and dV leave
through the staging buffer of dQ, so that the next K and V can be on their way meanwhile. delta = rowsum(O ∘ dO) is in memory beforehand.
Summing dQ in fp32 for longer keys was slower than the two kernels that compute two products more.
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
    fast_gelu_and_slope,
    fill_flat,
    finish_stores,
    key_parts,
    load_box,
    make_barriers,
    read_tile,
    statistics,
    store_box,
)  # fmt: skip


@gluon.jit
def _producer(
    q, k, v, dout, table, total, q_slots, do_slots, k_slot, v_slot, q_full, q_empty, do_full, do_empty,
    k_full, k_empty, v_full, v_empty,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head = item % HKV
        row, lk, q_row, lq, _n0 = read_tile(table, item, total, HKV)
        for part in range(key_parts(lk)):
            mbarrier.wait(k_empty.index(0), tile & 1 ^ 1)
            mbarrier.expect(k_full.index(0), 2 * 128 * D)
            load_box(k, row, lk, part * 128, kv_head * D, k_full.index(0), k_slot.index(0), 128, D)
            mbarrier.wait(v_empty.index(0), tile & 1 ^ 1)
            mbarrier.expect(v_full.index(0), 2 * 128 * D)
            load_box(v, row, lk, part * 128, kv_head * D, v_full.index(0), v_slot.index(0), 128, D)
            tile += 1
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                for x in range((lq + 63) // 64):
                    stage = step % STAGES
                    phase = (step // STAGES & 1) ^ 1
                    mbarrier.wait(q_empty.index(stage), phase)
                    mbarrier.expect(q_full.index(stage), 2 * 64 * D)
                    load_box(q, q_row, lq, x * 64, head * D, q_full.index(stage), q_slots.index(stage), 64, D)
                    mbarrier.wait(do_empty.index(stage), phase)
                    mbarrier.expect(do_full.index(stage), 2 * 64 * D)
                    load_box(dout, q_row, lq, x * 64, head * D, do_full.index(stage), do_slots.index(stage), 64, D)
                    step += 1


@gluon.jit
def _consumer(
    dq, dk, dv, table, total, q_slots, do_slots, k_slot, v_slot, ds_slots, staging, lse_slots, delta_slots,
    q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty, ds_full, ds_empty,
    act_ids, scale, ds_scale, dv_scale,
    WHO: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr,
    ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = D // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = q_slots.dtype
    half_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HALF], dtype)
    k_tile = k_slot.index(0).slice(WHO * 64, 64)
    v_tile = v_slot.index(0).slice(WHO * 64, 64)
    k_half = k_slot.index(0).slice(WHO * HALF, HALF, dim=1)
    rows_out = staging.index(WHO)
    dq_part = rows_out._reinterpret(dtype, [64, HALF], half_tile)
    step = 0
    tile = 0
    row, lk, q_row, lq, _n0 = read_tile(table, gl.program_id(0), total, HKV)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head = item % HKV
        lq = alive(lq)
        lk = alive(lk)
        n_row, n_lk, n_q_row, n_lq, _n_n0 = read_tile(table, item + gl.num_programs(0), total, HKV)
        for part in range(key_parts(lk)):
            own = part * 128 + WHO * 64
            if part > 0:
                own = finish_stores(own)
            dk_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            dv_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            mbarrier.wait(k_full.index(0), tile & 1)
            mbarrier.wait(v_full.index(0), tile & 1)
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                act_id = 0
                if act_ids is not None:
                    act_id = gl.load(act_ids + head)
                for x in range((lq + 63) // 64):
                    m0 = x * 64
                    stage = step % STAGES
                    phase = step // STAGES & 1
                    q_tile = q_slots.index(stage)
                    do_tile = do_slots.index(stage)
                    zero = gl.full([64, 64], 0.0, gl.float32, s_layout)
                    mbarrier.wait(q_full.index(stage), phase)
                    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                    mbarrier.wait(do_full.index(stage), phase)
                    dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(1, deps=(s,))
                    if SOFTMAX:
                        lse_i = lse_slots.index(stage).load(column_layout)
                        # Keys past the end are zero rows: P <= 1 keeps their dS finite.
                        p = gl.exp2(gl.minimum(s * (scale * LOG2E) - lse_i[None, :], 0.0))
                        slope = p
                    else:
                        if FOLDED:
                            p, slope = fast_gelu_and_slope(s, scale)
                        else:
                            p, slope = activate_with_slope(s * scale, act_id, ACT, ACT_SET, FAST)
                    p16 = gl.convert_layout(p.to(dtype), p_layout, assert_trivial=True)
                    dv_acc = warpgroup_mma(p16, do_tile, dv_acc, is_async=True)
                    dp = warpgroup_mma_wait(1, deps=(dp,))
                    if SOFTMAX:
                        dp = dp - delta_slots.index(stage).load(column_layout)[None, :]
                    ds = slope * dp
                    ds = ds.to(dtype)
                    buffer = step % BUFFERS
                    mbarrier.wait(ds_empty.index(buffer), (step // BUFFERS & 1) ^ 1)
                    ds_slots.index(buffer).slice(WHO * 64, 64).store(ds)
                    fence_async_shared()
                    mbarrier.arrive(ds_full.index(buffer), count=1)
                    ds16 = gl.convert_layout(ds, p_layout, assert_trivial=True)
                    dk_acc = warpgroup_mma(ds16, q_tile, dk_acc, is_async=True)
                    dv_acc = warpgroup_mma_wait(1, deps=(dv_acc,))
                    mbarrier.arrive(do_empty.index(stage), count=1)
                    mbarrier.wait(ds_full.index(buffer), step // BUFFERS & 1)
                    dq_zero = gl.full([64, HALF], 0.0, gl.float32, dq_layout)
                    dq_tile = warpgroup_mma(ds_slots.index(buffer).permute((1, 0)), k_half, dq_zero, use_acc=False, is_async=True)
                    dk_acc = warpgroup_mma_wait(1, deps=(dk_acc,))
                    mbarrier.arrive(q_empty.index(stage), count=1)
                    dq_tile = warpgroup_mma_wait(0, deps=(dq_tile,))
                    mbarrier.arrive(ds_empty.index(buffer), count=1)
                    tma.store_wait(0)
                    dq_part.store((dq_tile * ds_scale).to(dtype))
                    fence_async_shared()
                    if part == 0:
                        store_box(dq, q_row, lq, m0, head * D + WHO * HALF, dq_part, 64, HALF)
                    else:
                        add_box(dq, q_row, lq, m0, head * D + WHO * HALF, dq_part, 64, HALF)
                    step += 1
            mbarrier.arrive(v_empty.index(0), count=1)
            mbarrier.arrive(k_empty.index(0), count=1)
            tma.store_wait(0)
            rows_out.store((dv_acc * dv_scale).to(dtype))
            fence_async_shared()
            store_box(dv, row, lk, own, kv_head * D, rows_out, 64, D)
            dk16 = (dk_acc * ds_scale).to(dtype)
            tma.store_wait(0)
            rows_out.store(dk16)
            fence_async_shared()
            store_box(dk, row, lk, own, kv_head * D, rows_out, 64, D)
            tile += 1
        row, lk, q_row, lq = n_row, n_lk, n_q_row, n_lq
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "rows", "k_rows"])
def hopper_bwd_kernel(
    q, k, v, dout, dq_box, dk_box, dv_box, dq, dk, dv, lse, delta, table, tile_count, q_offsets, k_offsets, act_ids,
    batch, rows, k_rows, scale, ds_scale, dv_scale,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    used = gl.load(k_offsets + batch).to(gl.int64) * (HKV * D)
    fill_flat(dk, used, k_rows.to(gl.int64) * (HKV * D), 0.0, num_warps)
    fill_flat(dv, used, k_rows.to(gl.int64) * (HKV * D), 0.0, num_warps)
    H: gl.constexpr = HKV * GROUP
    fill_flat(dq, gl.load(q_offsets + batch).to(gl.int64) * (H * D), rows.to(gl.int64) * (H * D), 0.0, num_warps)
    total = gl.load(tile_count) * HKV
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    k_slot = gl.allocate_shared_memory(dtype, [1, 128, D], tile)
    v_slot = gl.allocate_shared_memory(dtype, [1, 128, D], tile)
    q_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    do_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    ds_slots = gl.allocate_shared_memory(dtype, [BUFFERS, 128, 64], gl.NVMMASharedLayout.get_default_for([128, 64], dtype))
    staging = gl.allocate_shared_memory(dtype, [2, 64, D], tile)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_slots = gl.allocate_shared_memory(gl.float32, [STAGES, 64], flat)
    delta_slots = gl.allocate_shared_memory(gl.float32, [STAGES, 64], flat)
    q_full, q_empty = make_barriers(STAGES, 2 if SOFTMAX else 1), make_barriers(STAGES, 2)
    do_full, do_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    k_full, k_empty = make_barriers(1, 1), make_barriers(1, 2)
    v_full, v_empty = make_barriers(1, 1), make_barriers(1, 2)
    ds_full, ds_empty = make_barriers(BUFFERS, 2), make_barriers(BUFFERS, 2)
    fence_async_shared()
    if SOFTMAX:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        dq_box, dk_box, dv_box, table, total, q_slots, do_slots, k_slot, v_slot, ds_slots, staging, lse_slots, delta_slots,
                        q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty, ds_full, ds_empty,
                        act_ids, scale, ds_scale, dv_scale,
                        0, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, STAGES, BUFFERS,
                    ),
                ),
                (
                    _consumer,
                    (
                        dq_box, dk_box, dv_box, table, total, q_slots, do_slots, k_slot, v_slot, ds_slots, staging, lse_slots, delta_slots,
                        q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty, ds_full, ds_empty,
                        act_ids, scale, ds_scale, dv_scale,
                        1, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, STAGES, BUFFERS,
                    ),
                ),
                (
                    _producer,
                    (
                        q, k, v, dout, table, total, q_slots, do_slots, k_slot, v_slot, q_full, q_empty, do_full, do_empty,
                        k_full, k_empty, v_full, v_empty,
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
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (
                        dq_box, dk_box, dv_box, table, total, q_slots, do_slots, k_slot, v_slot, ds_slots, staging, lse_slots, delta_slots,
                        q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty, ds_full, ds_empty,
                        act_ids, scale, ds_scale, dv_scale,
                        0, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, STAGES, BUFFERS,
                    ),
                ),
                (
                    _consumer,
                    (
                        dq_box, dk_box, dv_box, table, total, q_slots, do_slots, k_slot, v_slot, ds_slots, staging, lse_slots, delta_slots,
                        q_full, q_empty, do_full, do_empty, k_full, k_empty, v_full, v_empty, ds_full, ds_empty,
                        act_ids, scale, ds_scale, dv_scale,
                        1, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, STAGES, BUFFERS,
                    ),
                ),
                (
                    _producer,
                    (
                        q, k, v, dout, table, total, q_slots, do_slots, k_slot, v_slot, q_full, q_empty, do_full, do_empty,
                        k_full, k_empty, v_full, v_empty,
                        HKV, GROUP, D, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
