"""Backward pass on Hopper, key side: two warpgroups, each with 64 of a tile's 128 keys, share tiles of 64 query rows.

    Sᵀ = K Qᵀ, dPᵀ = V dOᵀ  ->  Pᵀ, dSᵀ, in registers  ->  dV += Pᵀ dO, dK += dSᵀ Q          four products a tile

With AHEAD the products Sᵀ and dPᵀ of the next tile are under way while this tile's dK is multiplied; the last tile has a step of its own.
With SHORT a last tile of up to 32 query rows is a step of half the size.
The query heads of a group follow one another, so dK and dV are written once, without atomics, through the slots of K and V
(64 rows each: the rows of a slice of a larger slot do not lie as a box of 64 rows wants them).

With WALK a program walks over runs of tiles, past which Q and dO move once: see `backward_dq`.
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.hopper.common import (
    LOG2E,
    alive,
    fill_rows,
    first_rows,
    folded_value_and_slope,
    item_at,
    items,
    load_box,
    make_barriers,
    near,
    own_run,
    pass_over_rows,
    query_range,
    read_run,
    read_tile,
    statistics,
    store_box,
    wait_for_former,
    whole_tiles,
)


@gluon.jit
def _load_rows(
    q, dout, q_slots, do_slots, q_full, q_empty, step, first, last, row, dout_row, lq, column,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles ``first`` .. ``last`` of Q and dO; the step after them."""
    for x in range(first, last):
        stage = step % STAGES
        mbarrier.wait(q_empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(q_full.index(stage), 4 * 64 * D)
        load_box(q, row, lq, x * 64, column, q_full.index(stage), q_slots.index(stage), 64, D)
        load_box(dout, dout_row, lq, x * 64, column, q_full.index(stage), do_slots.index(stage), 64, D)
        step += 1
    return step


@gluon.jit
def _producer(
    q, k, v, dout, table, tiles, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, left, right,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, WALK: gl.constexpr, BROADCAST: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    if WALK:
        at, until = own_run(tiles, HKV)
        while at < until:
            row, lk, q_row, lq, start, parts = read_run(table, at, until, tiles)
            column = at // tiles * D
            begin = start * 0
            for part in range(parts):
                n0 = start + part * 128
                first, last = query_range(n0, gl.minimum(n0 + 128, lk), lq, lk, left, right, 64, CAUSAL, WINDOW)
                for half in gl.static_range(2):
                    slot = tile % HELD
                    mbarrier.wait(k_empty.index(slot), (tile // HELD & 1) ^ 1)
                    mbarrier.expect(k_full.index(slot), 4 * 64 * D)
                    load_box(k, row, lk, n0 + half * 64, column, k_full.index(slot), k_slots.index(slot), 64, D)
                    load_box(v, row, lk, n0 + half * 64, column, k_full.index(slot), v_slots.index(slot), 64, D)
                    tile += 1
                # what the tile before did not ask for
                first = gl.where(part == 0, first, alive(begin))
                begin = last
                step = _load_rows(q, dout, q_slots, do_slots, q_full, q_empty, step, first, last, q_row, q_row, lq, column, D, STAGES)
            at += parts
    else:
        total = tiles * HKV
        for n in range(items(total)):
            item = item_at(n)
            kv_head = item % HKV
            row, lk, q_row, lq, n0 = read_tile(table, item, total, HKV)
            first, last = query_range(n0, gl.minimum(n0 + 128, lk), lq, lk, left, right, 64, CAUSAL, WINDOW)
            slot = tile % HELD
            mbarrier.wait(k_empty.index(slot), (tile // HELD & 1) ^ 1)
            mbarrier.expect(k_full.index(slot), 4 * 128 * D)
            for half in gl.static_range(2):
                load_box(k, row, lk, n0 + half * 64, kv_head * D, k_full.index(slot), k_slots.index(2 * slot + half), 64, D)
                load_box(v, row, lk, n0 + half * 64, kv_head * D, k_full.index(slot), v_slots.index(2 * slot + half), 64, D)
            tile += 1
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                step = _load_rows(
                    q, dout, q_slots, do_slots, q_full, q_empty, step, first, last, 0 if BROADCAST else q_row, q_row, lq, head * D,
                    D, STAGES,
                )  # fmt: skip


@gluon.jit
def _store_tile(
    dk, dv, k_slots, v_slots, k_empty, done, tile, row, lk, start, column, D: gl.constexpr, HELD: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """Write TOGETHER slots of dK and dV that the consumers have filled, and give them back."""
    slot = tile % HELD
    mbarrier.wait(done.index(slot), tile // HELD & 1)
    for half in gl.static_range(TOGETHER):
        store_box(dk, row, lk, start + half * 64, column, k_slots.index(TOGETHER * slot + half), 64, D)
        store_box(dv, row, lk, start + half * 64, column, v_slots.index(TOGETHER * slot + half), 64, D)
    tma.store_wait(0)
    mbarrier.arrive(k_empty.index(slot), count=1)


@gluon.jit
def _storer(
    dk, dv, table, tiles, k_slots, v_slots, k_empty, done, HKV: gl.constexpr, D: gl.constexpr, HELD: gl.constexpr, WALK: gl.constexpr,
    WAITS: gl.constexpr,
):  # fmt: skip
    tile = 0
    if WALK:
        at, until = own_run(tiles, HKV)
        while at < until:
            row, lk, _q_row, _lq, start, parts = read_run(table, at, until, tiles)
            for half in range(2 * parts):
                _store_tile(dk, dv, k_slots, v_slots, k_empty, done, tile, row, lk, start + half * 64, at // tiles * D, D, HELD, 1)
                tile += 1
            at += parts
    else:
        total = tiles * HKV
        for n in range(items(total)):
            item = item_at(n)
            row, lk, _q_row, _lq, start = read_tile(table, item, total, HKV)
            _store_tile(dk, dv, k_slots, v_slots, k_empty, done, tile, row, lk, start, item % HKV * D, D, HELD, 2)
            tile += 1
    if WAITS:
        # What comes next in the stream waits for this kernel, not for the one before it.
        wait_for_former()


@gluon.jit
def _scores(k_tile, v_tile, q_slots, do_slots, q_full, step, s, dp, STAGES: gl.constexpr, N: gl.constexpr):
    """Sᵀ and dPᵀ of the tile of a step, under way in place of ``s`` and ``dp [64, N]``: of its first N rows."""
    stage = step % STAGES
    mbarrier.wait(q_full.index(stage), step // STAGES & 1)
    s = warpgroup_mma(k_tile, first_rows(q_slots.index(stage), N).permute((1, 0)), s, use_acc=False, is_async=True)
    dp = warpgroup_mma(v_tile, first_rows(do_slots.index(stage), N).permute((1, 0)), dp, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _seen(m0, j, shift, left, right, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, layout: gl.constexpr):
    """Which query rows from ``m0`` on see the keys ``j``, bounds of the sample apart."""
    i = m0 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    return near(j[:, None], i[None, :] + shift, left, right, CAUSAL, WINDOW)


@gluon.jit
def _add_tile(
    s, dp, dk_acc, dv_acc, k_tile, v_tile, q_slots, do_slots, lse_slots, delta_slots, q_full, q_empty,
    step, x, own, j, j1, lq, shift, left, right, scale, unseen, act_id, last_use,
    SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr, NEXT: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Adds what tile ``x`` gives to dK and dV, whose Sᵀ and dPᵀ are under way, and gives it back after its last use; with NEXT those of the
    next tile are under way then. Only the first ``N`` rows of the tile count."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, q_slots.shape[2], 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    dtype: gl.constexpr = q_slots.dtype
    m0 = x * 64
    stage = step % STAGES
    if AHEAD:
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
    else:
        s = warpgroup_mma_wait(1, deps=(s,))
    free = True
    if CAUSAL or WINDOW:
        p_min = m0 + shift
        p_max = gl.minimum(m0 + 64, lq) - 1 + shift
        free = (own >= p_max - left) & (j1 - 1 <= p_min + right)
        if CAUSAL:
            free = free & (j1 - 1 <= p_min)
        if FOLDED:
            # Both of these activations and their slopes are 0 there: x is far below 0, where the hardware tanh is -1.
            if free == 0:
                s = gl.where(_seen(m0, j, shift, left, right, CAUSAL, WINDOW, s_layout), s, unseen)
    if SOFTMAX:
        lse_i = first_rows(lse_slots.index(stage), N).load(column_layout)
        p = gl.exp2(s * (scale * LOG2E) - lse_i[None, :])
        slope = p
    else:
        if FOLDED:
            p, slope = folded_value_and_slope(s, scale, FOLDED)
        else:
            p, slope = activate_with_slope(s * scale, act_id, ACT, ACT_SET, FAST)
    if (CAUSAL or WINDOW) and not FOLDED:
        if free == 0:
            seen = _seen(m0, j, shift, left, right, CAUSAL, WINDOW, s_layout)
            p = gl.where(seen, p, 0.0)
            slope = gl.where(seen, slope, 0.0)
    p16 = gl.convert_layout(p.to(dtype), p_layout, assert_trivial=True)
    dv_acc = warpgroup_mma(p16, first_rows(do_slots.index(stage), N), dv_acc, is_async=True)
    if not AHEAD:
        dp = warpgroup_mma_wait(1, deps=(dp,))
    if SOFTMAX:
        dp = dp - first_rows(delta_slots.index(stage), N).load(column_layout)[None, :]
    ds = slope * dp
    ds16 = gl.convert_layout(ds.to(dtype), p_layout, assert_trivial=True)
    dk_acc = warpgroup_mma(ds16, first_rows(q_slots.index(stage), N), dk_acc, is_async=True)
    if NEXT:
        # P's registers are free before the next products need theirs.
        dv_acc = warpgroup_mma_wait(1, deps=(dv_acc,))
        s, dp = _scores(k_tile, v_tile, q_slots, do_slots, q_full, step + 1, s, dp, STAGES, N)
        dk_acc = warpgroup_mma_wait(2, deps=(dk_acc,))
    else:
        dv_acc, dk_acc = warpgroup_mma_wait(0, deps=(dv_acc, dk_acc))
    mbarrier.arrive(q_empty.index(stage), count=1, pred=last_use)
    return s, dp, dk_acc, dv_acc


@gluon.jit
def _walking_consumer(
    table, tiles, q_slots, do_slots, k_slots, v_slots, lse_slots, delta_slots, q_full, q_empty, k_full, done,
    act_ids, left, right, scale, ds_scale, dv_scale,
    WHO: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr,
    ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, AHEAD: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dtype: gl.constexpr = q_slots.dtype
    unseen = gl.where(scale == 0.0, 0.0, -1e6 / scale)
    item_step = 0
    tile = WHO
    at, until = own_run(tiles, HKV)
    while at < until:
        _row, lk, _q_row, lq, start, parts = read_run(table, at, until, tiles)
        act_id = 0
        if act_ids is not None:
            act_id = gl.load(act_ids + at // tiles)
        first, last = query_range(start, gl.minimum(start + 128 * parts, lk), lq, lk, left, right, 64, CAUSAL, WINDOW)
        shift = lk - lq
        given = first
        for part in range(parts):
            own = start + part * 128 + WHO * 64
            slot = tile % HELD
            step = item_step + given - first
            mbarrier.wait(k_full.index(slot), tile // HELD & 1)
            if own < lk:
                k_tile = k_slots.index(slot)
                v_tile = v_slots.index(slot)
                j = own + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
                j1 = gl.minimum(own + 64, lk)
                dk_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
                dv_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
                begin, end = query_range(own, j1, lq, lk, left, right, 64, CAUSAL, WINDOW)
                # Tiles from here on are held for the next 64 keys.
                keep, _end = query_range(own + 128, gl.minimum(own + 192, lk), lq, lk, left, right, 64, CAUSAL, WINDOW)
                keep = gl.where((part + 1 < parts) & (own + 128 < lk), keep, last)
                step = pass_over_rows(begin - given, step, q_full, q_empty, STAGES)
                if begin < end:
                    s = gl.full([64, 64], 0.0, gl.float32, s_layout)
                    dp = s
                    for x in range(begin, end):
                        s, dp = _scores(k_tile, v_tile, q_slots, do_slots, q_full, step, s, dp, STAGES, 64)
                        s, dp, dk_acc, dv_acc = _add_tile(
                            s, dp, dk_acc, dv_acc, k_tile, v_tile, q_slots, do_slots, lse_slots, delta_slots, q_full, q_empty,
                            step, x, own, j, j1, lq, shift, left, right, scale, unseen, act_id, x < keep,
                            SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, STAGES, False, False, 64,
                        )  # fmt: skip
                        step += 1
                step = pass_over_rows(keep - end, step, q_full, q_empty, STAGES)
                given = keep
                k_tile.store((dk_acc * ds_scale).to(dtype))
                v_tile.store((dv_acc * dv_scale).to(dtype))
                fence_async_shared()
            else:
                # No key of this half belongs to the sample: keep the ring going.
                step = pass_over_rows(last - given, step, q_full, q_empty, STAGES)
                given = last
            mbarrier.arrive(done.index(slot), count=1)
            tile += 2
        item_step += last - first
        at += parts


@gluon.jit
def _consumer(
    table, tiles, q_slots, do_slots, k_slots, v_slots, lse_slots, delta_slots, q_full, q_empty, k_full, done,
    act_ids, left, right, scale, ds_scale, dv_scale,
    WHO: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr,
    ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, AHEAD: gl.constexpr, SHORT: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    dtype: gl.constexpr = q_slots.dtype
    unseen = gl.where(scale == 0.0, 0.0, -1e6 / scale)
    step = 0
    total = tiles * HKV
    _row, lk, _q_row, lq, start = read_tile(table, item_at(0), total, HKV)
    for n in range(items(total)):
        item = item_at(n)
        kv_head = item % HKV
        lq = alive(lq)
        _n_row, n_lk, _n_q_row, n_lq, n_start = read_tile(table, item_at(n + 1), total, HKV)
        first, last = query_range(start, gl.minimum(start + 128, lk), lq, lk, left, right, 64, CAUSAL, WINDOW)
        shift = lk - lq
        own = start + WHO * 64
        slot = n % HELD
        mbarrier.wait(k_full.index(slot), n // HELD & 1)
        if own < lk:
            k_tile = k_slots.index(2 * slot + WHO)
            v_tile = v_slots.index(2 * slot + WHO)
            j = own + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            j1 = gl.minimum(own + 64, lk)
            dk_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            dv_acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            begin, end = query_range(own, j1, lq, lk, left, right, 64, CAUSAL, WINDOW)
            whole = end
            if SHORT:
                whole = whole_tiles(begin, end, lq, 64)
            for head in range(kv_head * GROUP, kv_head * GROUP + GROUP):
                act_id = 0
                if act_ids is not None:
                    act_id = gl.load(act_ids + head)
                if CAUSAL or WINDOW:
                    step = pass_over_rows(begin - first, step, q_full, q_empty, STAGES)
                if begin < end:
                    s = gl.full([64, 64], 0.0, gl.float32, s_layout)
                    dp = s
                    if AHEAD:
                        s, dp = _scores(k_tile, v_tile, q_slots, do_slots, q_full, step, s, dp, STAGES, 64)
                    for x in range(begin, whole - 1 if AHEAD else whole):
                        if not AHEAD:
                            s, dp = _scores(k_tile, v_tile, q_slots, do_slots, q_full, step, s, dp, STAGES, 64)
                        s, dp, dk_acc, dv_acc = _add_tile(
                            s, dp, dk_acc, dv_acc, k_tile, v_tile, q_slots, do_slots, lse_slots, delta_slots, q_full, q_empty,
                            step, x, own, j, j1, lq, shift, left, right, scale, unseen, act_id, True,
                            SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, STAGES, AHEAD, AHEAD, 64,
                        )  # fmt: skip
                        step += 1
                    if AHEAD:
                        x = end - 1
                        _s, _dp, dk_acc, dv_acc = _add_tile(
                            s, dp, dk_acc, dv_acc, k_tile, v_tile, q_slots, do_slots, lse_slots, delta_slots, q_full, q_empty,
                            step, x, own, j, j1, lq, shift, left, right, scale, unseen, act_id, True,
                            SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, STAGES, True, False, 64,
                        )  # fmt: skip
                        step += 1
                    if SHORT:
                        s = gl.full([64, 32], 0.0, gl.float32, half_layout)
                        dp = s
                        for x in range(whole, end):
                            s, dp = _scores(k_tile, v_tile, q_slots, do_slots, q_full, step, s, dp, STAGES, 32)
                            s, dp, dk_acc, dv_acc = _add_tile(
                                s, dp, dk_acc, dv_acc, k_tile, v_tile, q_slots, do_slots, lse_slots, delta_slots, q_full, q_empty,
                                step, x, own, j, j1, lq, shift, left, right, scale, unseen, act_id, True,
                                SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, STAGES, False, False, 32,
                            )  # fmt: skip
                            step += 1
                if CAUSAL or WINDOW:
                    step = pass_over_rows(last - end, step, q_full, q_empty, STAGES)
            k_tile.store((dk_acc * ds_scale).to(dtype))
            v_tile.store((dv_acc * dv_scale).to(dtype))
            fence_async_shared()
        else:
            # No key of this half belongs to the sample: keep the ring going.
            step = pass_over_rows((last - first) * GROUP, step, q_full, q_empty, STAGES)
        mbarrier.arrive(done.index(slot), count=1)
        lk, lq, start = n_lk, n_lq, n_start


@gluon.jit(do_not_specialize=["batch", "rows", "k_rows", "left", "right"])
def hopper_bwd_dkdv_kernel(
    q, k, v, dout, dk_box, dv_box, dk, dv, lse, delta, table, tile_count, k_offsets, act_ids,
    batch, rows, k_rows, left, right,
    scale, ds_scale, dv_scale, stride_dk,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
    WALK: gl.constexpr, AHEAD: gl.constexpr, SHORT: gl.constexpr, BROADCAST: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    used = gl.load(k_offsets + batch).to(gl.int64)
    fill_rows(dk, used, k_rows.to(gl.int64), stride_dk, 0.0, HKV * D, num_warps)
    fill_rows(dv, used, k_rows.to(gl.int64), stride_dk, 0.0, HKV * D, num_warps)
    tiles = gl.load(tile_count)
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    k_slots = gl.allocate_shared_memory(dtype, [HELD if WALK else 2 * HELD, 64, D], tile)
    v_slots = gl.allocate_shared_memory(dtype, [HELD if WALK else 2 * HELD, 64, D], tile)
    q_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    do_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_slots = gl.allocate_shared_memory(gl.float32, [STAGES, 64], flat)
    delta_slots = gl.allocate_shared_memory(gl.float32, [STAGES, 64], flat)
    q_full, q_empty = make_barriers(STAGES, 2 if SOFTMAX else 1), make_barriers(STAGES, 2)
    k_full, k_empty, done = make_barriers(HELD, 1), make_barriers(HELD, 1), make_barriers(HELD, 1 if WALK else 2)
    fence_async_shared()
    if SOFTMAX:
        gl.warp_specialize(
            [
                (
                    _walking_consumer if WALK else _consumer,
                    (
                        table, tiles, q_slots, do_slots, k_slots, v_slots, lse_slots, delta_slots, q_full, q_empty, k_full, done,
                        act_ids, left, right, scale, ds_scale, dv_scale,
                        0, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, STAGES, HELD, AHEAD, SHORT,
                    ),
                ),
                (
                    _walking_consumer if WALK else _consumer,
                    (
                        table, tiles, q_slots, do_slots, k_slots, v_slots, lse_slots, delta_slots, q_full, q_empty, k_full, done,
                        act_ids, left, right, scale, ds_scale, dv_scale,
                        1, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, STAGES, HELD, AHEAD, SHORT,
                    ),
                ),
                (
                    _producer,
                    (
                        q, k, v, dout, table, tiles, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, left, right,
                        HKV, GROUP, D, CAUSAL, WINDOW, STAGES, HELD, WALK, BROADCAST,
                    ),
                ),
                (
                    statistics,
                    (
                        lse, delta, table, tiles, lse_slots, delta_slots, q_full, q_empty, rows, left, right,
                        HKV, GROUP, CAUSAL, WINDOW, STAGES, WALK,
                    ),
                ),
                (_storer, (dk_box, dv_box, table, tiles, k_slots, v_slots, k_empty, done, HKV, D, HELD, WALK, False)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _walking_consumer if WALK else _consumer,
                    (
                        table, tiles, q_slots, do_slots, k_slots, v_slots, lse_slots, delta_slots, q_full, q_empty, k_full, done,
                        act_ids, left, right, scale, ds_scale, dv_scale,
                        0, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, STAGES, HELD, AHEAD, SHORT,
                    ),
                ),
                (
                    _walking_consumer if WALK else _consumer,
                    (
                        table, tiles, q_slots, do_slots, k_slots, v_slots, lse_slots, delta_slots, q_full, q_empty, k_full, done,
                        act_ids, left, right, scale, ds_scale, dv_scale,
                        1, HKV, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, STAGES, HELD, AHEAD, SHORT,
                    ),
                ),
                (
                    _producer,
                    (
                        q, k, v, dout, table, tiles, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, left, right,
                        HKV, GROUP, D, CAUSAL, WINDOW, STAGES, HELD, WALK, BROADCAST,
                    ),
                ),
                (_storer, (dk_box, dv_box, table, tiles, k_slots, v_slots, k_empty, done, HKV, D, HELD, WALK, True)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )  # fmt: skip
