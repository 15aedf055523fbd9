"""Backward pass of `gdpa` on Hopper for samples of up to 128 keys: a program has all keys of a (sample, head), 64 a warpgroup.

    Sᵀ = K Qᵀ, dPᵀ = V dOᵀ  ->  Pᵀ, dSᵀ, in registers  ->  dV += Pᵀ dO, dK += dSᵀ Q, and what these 64 keys give to dQ = dS K

No warpgroup waits for the other's dS: the first one writes its share of dQ (with ADDS, adds it to what is
there), the second one adds its own by TMA once the first one's has arrived, always in this order. So the second one falls a tile behind,
and the products of one run while the other applies the activation. dK and dV leave through the slots of K and V, of which the next item
has others.
"""

# ruff: noqa: SIM102, SIM113 - a constexpr condition stands alone, so that what it guards is not compiled when it is false;
# the compiler knows no enumerate

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.hopper.common import (
    add_box,
    add_column_sums,
    alive,
    fill_rows,
    finish_stores,
    folded_value_and_slope,
    item_at,
    items,
    load_box,
    make_barriers,
    read_tile,
    store_box,
)  # fmt: skip


@gluon.jit
def _own_items(starts, total, H: gl.constexpr):
    """How many items this program has: with ``starts``, those of its group, of its head."""
    if starts is None:
        return items(total)
    else:
        group = starts + gl.program_id(0) // H
        return gl.load(group + 1) - gl.load(group)


@gluon.jit
def _own_item(starts, n, H: gl.constexpr):
    """The n-th of them."""
    if starts is None:
        return item_at(n)
    else:
        return (gl.load(starts + gl.program_id(0) // H) + n) * H + gl.program_id(0) % H


@gluon.jit
def _producer(
    q, k, v, dout, table, starts, total, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty,
    H: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    for n in range(_own_items(starts, total, H)):
        item = _own_item(starts, n, H)
        head = item % H
        row, lk, q_row, lq, _n0 = read_tile(table, item, total, H)
        slot = tile % 2
        mbarrier.wait(k_empty.index(slot), (tile // 2 & 1) ^ 1)
        mbarrier.expect(k_full.index(slot), 4 * 128 * D)
        for half in gl.static_range(2):
            load_box(k, row, lk, half * 64, head * D, k_full.index(slot), k_slots.index(2 * slot + half), 64, D)
            load_box(v, row, lk, half * 64, head * D, k_full.index(slot), v_slots.index(2 * slot + half), 64, D)
        tile += 1
        for x in range((lq + 63) // 64):
            stage = step % STAGES
            mbarrier.wait(q_empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(q_full.index(stage), 4 * 64 * D)
            load_box(q, q_row, lq, x * 64, head * D, q_full.index(stage), q_slots.index(stage), 64, D)
            load_box(dout, q_row, lq, x * 64, head * D, q_full.index(stage), do_slots.index(stage), 64, D)
            step += 1


@gluon.jit
def _storer(dk, dv, table, starts, total, k_slots, v_slots, k_empty, done, H: gl.constexpr, D: gl.constexpr):
    tile = 0
    for n in range(_own_items(starts, total, H)):
        item = _own_item(starts, n, H)
        row, lk, _q_row, _lq, _n0 = read_tile(table, item, total, H)
        slot = tile % 2
        mbarrier.wait(done.index(slot), tile // 2 & 1)
        for half in gl.static_range(2):
            store_box(dk, row, lk, half * 64, item % H * D, k_slots.index(2 * slot + half), 64, D)
            store_box(dv, row, lk, half * 64, item % H * D, v_slots.index(2 * slot + half), 64, D)
        tma.store_wait(0)
        mbarrier.arrive(k_empty.index(slot), count=1)
        tile += 1


@gluon.jit
def _consumer(
    dq, table, starts, total, q_slots, do_slots, k_slots, v_slots, staging, q_full, q_empty, k_full, done, first,
    act_ids, dk_sums, dv_sums, scale, ds_scale, dv_scale,
    WHO: gl.constexpr, H: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr,
    FOLDED: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = q_slots.dtype
    HALF: gl.constexpr = D // 2
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    share = staging.index(WHO)
    left = share.slice(0, HALF, dim=1)
    # dS waits where the right half of dQ is put, once that is multiplied.
    right = share.slice(HALF, HALF, dim=1)
    step = 0
    tile = 0
    _row, lk, q_row, lq, _n0 = read_tile(table, _own_item(starts, 0, H), total, H)
    for n in range(_own_items(starts, total, H)):
        item = _own_item(starts, n, H)
        head = item % H
        lq = alive(lq)
        _n_row, n_lk, n_q_row, n_lq, _n_n0 = read_tile(table, _own_item(starts, n + 1, H), total, H)
        slot = tile % 2
        k_tile = k_slots.index(2 * slot + WHO)
        v_tile = v_slots.index(2 * slot + WHO)
        act_id = 0
        if act_ids is not None:
            act_id = gl.load(act_ids + head)
        dk_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
        dv_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
        mbarrier.wait(k_full.index(slot), tile // 2 & 1)
        for x in range((lq + 63) // 64):
            stage = step % STAGES
            q_tile = q_slots.index(stage)
            do_tile = do_slots.index(stage)
            zero = gl.full([64, 64], 0.0, gl.float32, s_layout)
            mbarrier.wait(q_full.index(stage), step // STAGES & 1)
            s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            if FOLDED:
                p, slope = folded_value_and_slope(s, scale, FOLDED)
            else:
                p, slope = activate_with_slope(s * scale, act_id, ACT, ACT_SET, FAST)
            p16 = gl.convert_layout(p.to(dtype), p_layout, assert_trivial=True)
            dv_acc = warpgroup_mma(p16, do_tile, dv_acc, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp,))
            ds = (slope * dp).to(dtype)
            if WHO == 0:
                if x > 0:
                    finish_stores(x)
                    mbarrier.arrive(first.index((step + 1) % 2), count=1)
            else:
                tma.store_wait(0)
            right.store(ds)
            fence_async_shared()
            ds16 = gl.convert_layout(ds, p_layout, assert_trivial=True)
            zero_dq = gl.full([64, HALF], 0.0, gl.float32, dq_layout)
            dq_part = warpgroup_mma(right.permute((1, 0)), k_tile.slice(0, HALF, dim=1), zero_dq, use_acc=False, is_async=True)
            dk_acc = warpgroup_mma(ds16, q_tile, dk_acc, is_async=True)
            dv_acc, dq_part = warpgroup_mma_wait(1, deps=(dv_acc, dq_part))
            left.store((dq_part * ds_scale).to(dtype))
            dq_part = warpgroup_mma(right.permute((1, 0)), k_tile.slice(HALF, HALF, dim=1), zero_dq, use_acc=False, is_async=True)
            dk_acc, dq_part = warpgroup_mma_wait(0, deps=(dk_acc, dq_part))
            mbarrier.arrive(q_empty.index(stage), count=1)
            right.store((dq_part * ds_scale).to(dtype))
            fence_async_shared()
            if WHO == 0:
                if ADDS:
                    add_box(dq, q_row, lq, x * 64, head * D, share, 64, D)
                else:
                    store_box(dq, q_row, lq, x * 64, head * D, share, 64, D)
            else:
                mbarrier.wait(first.index(step % 2), step // 2 & 1)
                add_box(dq, q_row, lq, x * 64, head * D, share, 64, D)
            step += 1
        if WHO == 0:
            if lq > 0:
                finish_stores(lq)
                mbarrier.arrive(first.index((step + 1) % 2), count=1)
        v_tile.store((dv_acc * dv_scale).to(dtype))
        k_tile.store((dk_acc * ds_scale).to(dtype))
        fence_async_shared()
        if dk_sums is not None:
            to = ((gl.program_id(0) * 2 + WHO) * (4 * H) + head) * D
            add_column_sums(dk_sums + to, k_tile, lk - WHO * 64, H * D)
            add_column_sums(dv_sums + to, v_tile, lk - WHO * 64, H * D)
        mbarrier.arrive(done.index(slot), count=1)
        tile += 1
        lk, q_row, lq = n_lk, n_q_row, n_lq
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "rows", "k_rows"])
def hopper_bwd_few_kernel(
    q, k, v, dout, dq_box, dk_box, dv_box, dq, dk, dv, table, starts, tile_count, q_offsets, k_offsets, act_ids, dk_sums, dv_sums,
    batch, rows, k_rows, scale, ds_scale, dv_scale, stride_dq, stride_dk,
    H: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr,
    ADDS: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """``starts``: where the groups of H programs begin in ``table`` (`gem_kernels.triton.attention.balance`); None: all take turns.
    ``dk_sums``, ``dv_sums`` ``[8 · programs, H · D]`` fp32, or None: to each program's rows the columns of its tiles are added."""
    used = gl.load(k_offsets + batch).to(gl.int64)
    fill_rows(dk, used, k_rows.to(gl.int64), stride_dk, 0.0, H * D, num_warps)
    fill_rows(dv, used, k_rows.to(gl.int64), stride_dk, 0.0, H * D, num_warps)
    fill_rows(dq, gl.load(q_offsets + batch).to(gl.int64), rows.to(gl.int64), stride_dq, 0.0, H * D, num_warps)
    total = gl.load(tile_count) * H
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    k_slots = gl.allocate_shared_memory(dtype, [4, 64, D], tile)
    v_slots = gl.allocate_shared_memory(dtype, [4, 64, D], tile)
    q_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    do_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    staging = gl.allocate_shared_memory(dtype, [2, 64, D], tile)
    q_full, q_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    k_full, k_empty, done = make_barriers(2, 1), make_barriers(2, 1), make_barriers(2, 2)
    first = make_barriers(2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    dq_box, table, starts, total, q_slots, do_slots, k_slots, v_slots, staging, q_full, q_empty, k_full, done, first,
                    act_ids, dk_sums, dv_sums, scale, ds_scale, dv_scale, 0, H, D, ACT, ACT_SET, FAST, FOLDED, ADDS, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    dq_box, table, starts, total, q_slots, do_slots, k_slots, v_slots, staging, q_full, q_empty, k_full, done, first,
                    act_ids, dk_sums, dv_sums, scale, ds_scale, dv_scale, 1, H, D, ACT, ACT_SET, FAST, FOLDED, ADDS, STAGES,
                ),
            ),
            (
                _producer,
                (q, k, v, dout, table, starts, total, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, H, D, STAGES),
            ),
            (_storer, (dk_box, dv_box, table, starts, total, k_slots, v_slots, k_empty, done, H, D)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
