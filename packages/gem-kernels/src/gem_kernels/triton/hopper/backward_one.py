"""Backward pass on Hopper in one kernel: a program has all keys of a (sample, head), one tile of 128 after the other, 64 a warpgroup.

    Sᵀ = K Qᵀ, dPᵀ = V dOᵀ  ->  Pᵀ, dSᵀ, in registers  ->  dV += Pᵀ dO, dK += dSᵀ Q, and what these 64 keys give to dQ = dS K

Five products a tile of 64 rows. Where both warpgroups have a share of a row's dQ, the first one leaves its own in shared memory and the
second one adds its own to that; the sum leaves by TMA. The first 128 keys that a row sees write it (with ADDS, add it to what is there),
the following ones add theirs, in the order of the keys, rounded to the dtype each time: memory adds at a fifth of its rate of stores.
dK and dV leave through the slots of K and V, of which the next key tile has others. For softmax delta = rowsum(O ∘ dO) is in memory
beforehand.

Barriers that nobody waits for in some steps have more slots than the warpgroups are ever steps, or key tiles, apart.
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

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
    near,
    pass_over_rows,
    query_range,
    read_tile,
    statistics,
    store_box,
)  # fmt: skip


@gluon.jit
def _producer(
    q, k, v, dout, table, total, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, left, right,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    for n in range(items(total)):
        item = item_at(n)
        kv_head = item % HKV
        row, lk, q_row, lq, _n0 = read_tile(table, item, total, HKV)
        for part in range(key_parts(lk)):
            n0 = part * 128
            first, last = query_range(n0, gl.minimum(n0 + 128, lk), lq, lk, left, right, 64, CAUSAL, WINDOW, True)
            slot = tile % 2
            mbarrier.wait(k_empty.index(slot), (tile // 2 & 1) ^ 1)
            mbarrier.expect(k_full.index(slot), 4 * 128 * D)
            for half in gl.static_range(2):
                at = n0 + half * 64
                load_box(k, row, lk, at, kv_head * D, k_full.index(slot), k_slots.index(2 * slot + half), 64, D)
                load_box(v, row, lk, at, kv_head * D, k_full.index(slot), v_slots.index(2 * slot + half), 64, D)
            tile += 1
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                for x in range(first, last):
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
def _pass_over(count, step, q_full, q_empty, taken, STAGES: gl.constexpr):
    """`pass_over_rows` of the second warpgroup, which takes no share there."""
    for _x in range(count):
        mbarrier.arrive(taken.index(step % 8), count=1)
        step = pass_over_rows(1, step, q_full, q_empty, STAGES)
    return step


@gluon.jit
def _seen(m0, own, shift, left, right, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, layout: gl.constexpr):
    """Which query rows from ``m0`` on see the keys from ``own`` on, bounds of the sample apart."""
    i = m0 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    j = own + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    return near(j[:, None], i[None, :] + shift, left, right, CAUSAL, WINDOW)


@gluon.jit
def _other(share, both, layout: gl.constexpr, MASKED: gl.constexpr):
    """The other warpgroup's share of dQ, 0 where it has none."""
    found = share.load(layout).to(gl.float32)
    if MASKED:
        found = gl.where(both, found, 0.0)
    return found


@gluon.jit
def _consumer(
    dq, table, total, q_slots, do_slots, k_slots, v_slots, staging, lse_slots, delta_slots,
    q_full, q_empty, k_full, done, given, taken, turn,
    act_ids, left, right, scale, ds_scale, dv_scale,
    WHO: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr,
    ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, ADDS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = q_slots.dtype
    HALF: gl.constexpr = D // 2
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    share = staging.index(WHO)
    left_half = share.slice(0, HALF, dim=1)
    # dS waits where the right half of dQ is put, once that is multiplied.
    right_half = share.slice(HALF, HALF, dim=1)
    unseen = gl.where(scale == 0.0, 0.0, -1e6 / scale)
    step = 0
    tile = 0
    _row, lk, q_row, lq, _n0 = read_tile(table, item_at(0), total, HKV)
    for n in range(items(total)):
        item = item_at(n)
        kv_head = item % HKV
        lq = alive(lq)
        lk = alive(lk)
        shift = lk - lq
        _n_row, n_lk, n_q_row, n_lq, _n_n0 = read_tile(table, item_at(n + 1), total, HKV)
        for part in range(key_parts(lk)):
            n0 = part * 128
            own = n0 + WHO * 64
            first, last = query_range(n0, gl.minimum(n0 + 128, lk), lq, lk, left, right, 64, CAUSAL, WINDOW, True)
            slot = tile % 2
            # Of these rows both warpgroups have a share; the first one's last such step.
            both0, _both = query_range(n0 + 64, gl.minimum(n0 + 128, lk), lq, lk, left, right, 64, CAUSAL, WINDOW)
            both0 = gl.where(n0 + 64 < lk, both0, lq)
            _both, both1 = query_range(n0, gl.minimum(n0 + 64, lk), lq, lk, left, right, 64, CAUSAL, WINDOW, True)
            shared = first * 0 - 1
            mbarrier.wait(k_full.index(slot), tile // 2 & 1)
            # Of no keys at all the first warpgroup writes the zeros.
            if WHO == 0 or own < lk:
                k_tile = k_slots.index(2 * slot + WHO)
                v_tile = v_slots.index(2 * slot + WHO)
                j1 = gl.minimum(own + 64, lk)
                begin, end = query_range(own, j1, lq, lk, left, right, 64, CAUSAL, WINDOW, True)
                dk_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
                dv_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
                for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                    act_id = 0
                    if act_ids is not None:
                        act_id = gl.load(act_ids + head)
                    if WHO == 1:
                        if CAUSAL or WINDOW:
                            step = _pass_over(begin - first, step, q_full, q_empty, taken, STAGES)
                    for x in range(begin, end):
                        stage = step % STAGES
                        m0 = x * 64
                        q_tile = q_slots.index(stage)
                        do_tile = do_slots.index(stage)
                        zero = gl.full([64, 64], 0.0, gl.float32, s_layout)
                        mbarrier.wait(q_full.index(stage), step // STAGES & 1)
                        s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                        dp = warpgroup_mma(v_tile, do_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
                        s = warpgroup_mma_wait(1, deps=(s,))
                        free = True
                        if CAUSAL or WINDOW:
                            p_min = m0 + shift
                            p_max = gl.minimum(m0 + 64, lq) - 1 + shift
                            free = (own >= p_max - left) & (j1 - 1 <= p_min + right)
                            if CAUSAL:
                                free = free & (j1 - 1 <= p_min)
                            if FOLDED:
                                # See `backward_dkdv`.
                                if free == 0:
                                    s = gl.where(_seen(m0, own, shift, left, right, CAUSAL, WINDOW, s_layout), s, unseen)
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
                        if (CAUSAL or WINDOW) and not FOLDED:
                            if free == 0:
                                seen = _seen(m0, own, shift, left, right, CAUSAL, WINDOW, s_layout)
                                p = gl.where(seen, p, 0.0)
                                slope = gl.where(seen, slope, 0.0)
                        p16 = gl.convert_layout(p.to(dtype), p_layout, assert_trivial=True)
                        dv_acc = warpgroup_mma(p16, do_tile, dv_acc, is_async=True)
                        dp = warpgroup_mma_wait(1, deps=(dp,))
                        if SOFTMAX:
                            dp = dp - delta_slots.index(stage).load(column_layout)[None, :]
                        ds = (slope * dp).to(dtype)
                        both = (x >= both0) & (x < both1)
                        tma.store_wait(0)
                        if WHO == 0:
                            mbarrier.wait(taken.index((shared + 8) % 8), shared // 8 & 1, pred=shared >= 0)
                        right_half.store(ds)
                        fence_async_shared()
                        ds16 = gl.convert_layout(ds, p_layout, assert_trivial=True)
                        zero_dq = gl.full([64, HALF], 0.0, gl.float32, dq_layout)
                        k_left = k_tile.slice(0, HALF, dim=1)
                        k_right = k_tile.slice(HALF, HALF, dim=1)
                        part_dq = warpgroup_mma(right_half.permute((1, 0)), k_left, zero_dq, use_acc=False, is_async=True)
                        dk_acc = warpgroup_mma(ds16, q_tile, dk_acc, is_async=True)
                        dv_acc, part_dq = warpgroup_mma_wait(1, deps=(dv_acc, part_dq))
                        part_dq = part_dq * ds_scale
                        if WHO == 1:
                            mbarrier.wait(given.index(step % 8), step // 8 & 1, pred=both)
                            part_dq += _other(staging.index(0).slice(0, HALF, dim=1), both, dq_layout, CAUSAL or WINDOW)
                        left_half.store(part_dq.to(dtype))
                        part_dq = warpgroup_mma(right_half.permute((1, 0)), k_right, zero_dq, use_acc=False, is_async=True)
                        dk_acc, part_dq = warpgroup_mma_wait(0, deps=(dk_acc, part_dq))
                        mbarrier.arrive(q_empty.index(stage), count=1)
                        part_dq = part_dq * ds_scale
                        if WHO == 1:
                            part_dq += _other(staging.index(0).slice(HALF, HALF, dim=1), both, dq_layout, CAUSAL or WINDOW)
                            mbarrier.arrive(taken.index(step % 8), count=1)
                        right_half.store(part_dq.to(dtype))
                        leaves = True
                        if WHO == 0:
                            mbarrier.arrive(given.index(step % 8), count=1)
                            mbarrier.wait(turn.index((tile + 3) % 4), (tile + 3) // 4 + 1 & 1, pred=(x == begin) & (part > 0))
                            shared = gl.where(both, step, shared)
                            leaves = both == 0
                        if leaves:
                            fence_async_shared()
                            writes = n0 == 0
                            if WINDOW:
                                writes = n0 == gl.maximum(m0 + shift - left, 0) // 128 * 128
                            if ADDS:
                                writes = n0 < 0
                            if writes:
                                store_box(dq, q_row, lq, m0, head * D, share, 64, D)
                            else:
                                add_box(dq, q_row, lq, m0, head * D, share, 64, D)
                        step += 1
                    if WHO == 0:
                        if CAUSAL or WINDOW:
                            for _x in range(last - end):
                                mbarrier.arrive(given.index(step % 8), count=1)
                                step = pass_over_rows(1, step, q_full, q_empty, STAGES)
                v_tile.store((dv_acc * dv_scale).to(dtype))
                k_tile.store((dk_acc * ds_scale).to(dtype))
                fence_async_shared()
            else:
                # No key of this half belongs to the sample: keep the ring going.
                step = _pass_over((last - first) * GROUP, step, q_full, q_empty, taken, STAGES)
            mbarrier.arrive(done.index(slot), count=1)
            if WHO == 0:
                mbarrier.wait(taken.index((shared + 8) % 8), shared // 8 & 1, pred=shared >= 0)
            else:
                finish_stores(part)
                mbarrier.arrive(turn.index(tile % 4), count=1)
            tile += 1
        lk, q_row, lq = n_lk, n_q_row, n_lq
    tma.store_wait(0)


@gluon.jit
def _statistics(
    lse, delta, table, total, lse_slots, delta_slots, q_full, q_empty, rows, left, right,
    HKV: gl.constexpr, GROUP: gl.constexpr, SOFTMAX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    if SOFTMAX:
        statistics(
            lse, delta, table, total, lse_slots, delta_slots, q_full, q_empty, rows, left, right,
            HKV, GROUP, CAUSAL, WINDOW, STAGES, True,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["batch", "rows", "k_rows", "left", "right"])
def hopper_bwd_one_kernel(
    q, k, v, dout, dq_box, dk_box, dv_box, dq, dk, dv, lse, delta, table, tile_count, q_offsets, k_offsets, act_ids,
    batch, rows, k_rows, left, right, scale, ds_scale, dv_scale, stride_dq, stride_dk,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, ADDS: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
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
    staging = gl.allocate_shared_memory(dtype, [2, 64, D], tile)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_slots = gl.allocate_shared_memory(gl.float32, [STAGES, 64], flat)
    delta_slots = gl.allocate_shared_memory(gl.float32, [STAGES, 64], flat)
    q_full, q_empty = make_barriers(STAGES, 2 if SOFTMAX else 1), make_barriers(STAGES, 2)
    k_full, k_empty, done = make_barriers(2, 1), make_barriers(2, 1), make_barriers(2, 2)
    given, taken, turn = make_barriers(8, 1), make_barriers(8, 1), make_barriers(4, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    dq_box, table, total, q_slots, do_slots, k_slots, v_slots, staging, lse_slots, delta_slots,
                    q_full, q_empty, k_full, done, given, taken, turn, act_ids, left, right, scale, ds_scale, dv_scale,
                    0, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, ADDS, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    dq_box, table, total, q_slots, do_slots, k_slots, v_slots, staging, lse_slots, delta_slots,
                    q_full, q_empty, k_full, done, given, taken, turn, act_ids, left, right, scale, ds_scale, dv_scale,
                    1, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, ADDS, STAGES,
                ),
            ),
            (
                _producer,
                (
                    q, k, v, dout, table, total, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, left, right,
                    HKV, GROUP, D, CAUSAL, WINDOW, STAGES,
                ),
            ),
            (
                _statistics,
                (
                    lse, delta, table, total, lse_slots, delta_slots, q_full, q_empty, rows, left, right,
                    HKV, GROUP, SOFTMAX, CAUSAL, WINDOW, STAGES,
                ),
            ),
            (_storer, (dk_box, dv_box, table, total, k_slots, v_slots, k_empty, done, HKV, D)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )  # fmt: skip
