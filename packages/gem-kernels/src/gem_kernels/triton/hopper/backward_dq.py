"""Backward pass on Hopper, query side: the counterpart of `forward`, with Q and dO held and K and V streamed.

    S = Q Kᵀ, dP = dO Vᵀ  ->  dS, in registers  ->  dQ += dS K          three products a tile

For softmax the kernel also leaves delta = rowsum(O ∘ dO) in memory, which the key side reads; it therefore runs first. dQ leaves through
the slot of Q: 64 rows are a slot, because the rows of a slice of a larger one do not lie as a box of 64 rows wants them. With a shared Q
(no q_offsets) a sample's dQ is written where its output rows are; the caller adds the samples up. With SHORT a last
tile that has keys in its first half alone is a step of half the size.

With TRANSPOSED the rows are keys and the columns queries: given K and V to hold, Q and dO to stream, the kernel computes dK of `gdpa`,
which needs nothing else of a column. Heads of 256 columns leave room for three slots, which K and V share.

With WALK a program has a run of tiles of sequences with themselves, each of whose rows see few keys, and all programs have as many: past
the tiles of a sequence K and V pass by once, and each warpgroup gives a tile of them back when none of its rows to come sees it. Q and dO
then have a slot for every 64 rows.
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.hopper.common import (
    alive,
    column_range,
    fill_rows,
    first_rows,
    folded_value_and_slope,
    item_at,
    items,
    let_next_begin,
    load_box,
    make_barriers,
    own_run,
    pass_over,
    prefetch,
    prefetch_rows,
    read_first,
    read_run,
    read_tile,
    ring_slot,
    seen_by,
    store_box,
    whole_tiles,
)

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load_columns(
    k, v, k_slots, v_slots, k_full, k_empty, v_full, v_empty, step, first, last, k_row, lk, column,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles ``first`` .. ``last`` of K and V; the step after them."""
    for x in range(first, last):
        stage, phase = ring_slot(step, 0, STAGES, D > 128)
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), 2 * BLOCK_N * D)
        load_box(k, k_row, lk, x * BLOCK_N, column, k_full.index(stage), k_slots.index(stage), BLOCK_N, D)
        stage, phase = ring_slot(step, 1, STAGES, D > 128)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), 2 * BLOCK_N * D)
        load_box(v, k_row, lk, x * BLOCK_N, column, v_full.index(stage), v_slots.index(stage), BLOCK_N, D)
        step += 1
    return step


@gluon.jit
def _fetch_rows(out, lse, all_rows, row, lq, m0, head, stride_on, stride_oh, D: gl.constexpr):
    """O and lse of a tile, which the consumers read themselves when they get to it, into the L2 cache."""
    prefetch_rows(out, row, lq, m0, stride_on, head.to(gl.int64) * stride_oh, 128, D)
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    prefetch((lse + head.to(gl.int64) * all_rows + row + gl.minimum(m0 + 4 * lane, lq - 1)).to(gl.int64, bitcast=True))


@gluon.jit
def _producer(
    q, k, v, dout, table, tiles, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty, left, right,
    out, lse, all_rows, stride_on, stride_oh,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, WALK: gl.constexpr, BROADCAST: gl.constexpr, SOFTMAX: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    if WALK:
        at, until = own_run(tiles, H)
        while at < until:
            row, lq, k_row, lk, start, parts = read_run(table, at, until, tiles)
            head = at // tiles
            begin = start * 0
            for part in range(parts):
                m0 = start + part * 128
                m1 = gl.minimum(m0 + 128, lq)
                first, last, _free0, _free1 = column_range(m0, m1, lq, lk, left, right, BLOCK_N, CAUSAL, WINDOW, TRANSPOSED)
                for half in gl.static_range(2):
                    slot = tile % HELD
                    mbarrier.wait(q_empty.index(slot), (tile // HELD & 1) ^ 1)
                    mbarrier.expect(q_full.index(slot), 4 * 64 * D)
                    load_box(q, row, lq, m0 + half * 64, head * D, q_full.index(slot), q_slots.index(slot), 64, D)
                    load_box(dout, row, lq, m0 + half * 64, head * D, q_full.index(slot), do_slots.index(slot), 64, D)
                    tile += 1
                if SOFTMAX:
                    _fetch_rows(out, lse, all_rows, row, lq, m0, head, stride_on, stride_oh, D)
                # what the tile before did not ask for
                first = gl.where(part == 0, first, alive(begin))
                begin = last
                step = _load_columns(
                    k, v, k_slots, v_slots, k_full, k_empty, v_full, v_empty, step, first, last, k_row, lk, head * D, D, BLOCK_N, STAGES
                )
            at += parts
    else:
        total = tiles * H
        for n in range(items(total)):
            item = item_at(n)
            head = item % H
            row, lq, k_row, lk, m0 = read_tile(table, item, total, H)
            m1 = gl.minimum(m0 + 128, lq)
            first, last, _free0, _free1 = column_range(m0, m1, lq, lk, left, right, BLOCK_N, CAUSAL, WINDOW, TRANSPOSED)
            slot = tile % HELD
            mbarrier.wait(q_empty.index(slot), (tile // HELD & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), 4 * 128 * D)
            for half in gl.static_range(2):
                q_row = 0 if BROADCAST else row
                load_box(q, q_row, lq, m0 + half * 64, head * D, q_full.index(slot), q_slots.index(2 * slot + half), 64, D)
                load_box(dout, row, lq, m0 + half * 64, head * D, q_full.index(slot), do_slots.index(2 * slot + half), 64, D)
            tile += 1
            if SOFTMAX:
                _fetch_rows(out, lse, all_rows, row, lq, m0, head, stride_on, stride_oh, D)
            step = _load_columns(
                k, v, k_slots, v_slots, k_full, k_empty, v_full, v_empty, step, first, last, k_row, lk, head // GROUP * D,
                D, BLOCK_N, STAGES,
            )  # fmt: skip


@gluon.jit
def _store_tile(
    dq, q_slots, q_empty, done, tile, row, lq, start, column, D: gl.constexpr, HELD: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """Write TOGETHER slots of dQ that the consumers have filled, and give them back."""
    slot = tile % HELD
    mbarrier.wait(done.index(slot), tile // HELD & 1)
    for half in gl.static_range(TOGETHER):
        store_box(dq, row, lq, start + half * 64, column, q_slots.index(TOGETHER * slot + half), 64, D)
    tma.store_wait(0)
    mbarrier.arrive(q_empty.index(slot), count=1)


@gluon.jit
def _storer(dq, table, tiles, q_slots, q_empty, done, H: gl.constexpr, D: gl.constexpr, HELD: gl.constexpr, WALK: gl.constexpr):
    tile = 0
    if WALK:
        at, until = own_run(tiles, H)
        while at < until:
            row, lq, _k_row, _lk, start, parts = read_run(table, at, until, tiles)
            for half in range(2 * parts):
                _store_tile(dq, q_slots, q_empty, done, tile, row, lq, start + half * 64, at // tiles * D, D, HELD, 1)
                tile += 1
            at += parts
    else:
        total = tiles * H
        for n in range(items(total)):
            item = item_at(n)
            row, lq, _k_row, _lk, start = read_tile(table, item, total, H)
            _store_tile(dq, q_slots, q_empty, done, tile, row, lq, start, item % H * D, D, HELD, 2)
            tile += 1


@gluon.jit
def _score(tile, slots, full, step, second: gl.constexpr, s, STAGES: gl.constexpr, N: gl.constexpr):
    """The product of a held tile with the first N rows of the streamed one of a step, under way in place of ``s [64, N]``."""
    stage, phase = ring_slot(step, second, STAGES, tile.shape[1] > 128)
    mbarrier.wait(full.index(stage), phase)
    return warpgroup_mma(tile, first_rows(slots.index(stage), N).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _add_tile(
    s, dp, acc, q_tile, do_tile, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
    step, x, i, lse_i, delta_i, lq, lk, free0, free1, left, right, scale, act_id, last_use,
    SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, TRANSPOSED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    AHEAD: gl.constexpr, NEXT: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Adds to dQ what tile ``x`` gives, which is given back after its last use. AHEAD 1: its S is under way, and with NEXT that of the next
    tile is then; 2: S and dP. Only the first ``N`` rows of the tile count."""
    D: gl.constexpr = q_tile.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    n0 = x * BLOCK_N
    stage, _phase = ring_slot(step, 0, STAGES, D > 128)
    v_stage, _v_phase = ring_slot(step, 1, STAGES, D > 128)
    if AHEAD == 2:
        s, dp = warpgroup_mma_wait(0, deps=(s, dp))
        mbarrier.arrive(v_empty.index(v_stage), count=1, pred=last_use)
    else:
        if AHEAD:
            s = warpgroup_mma_wait(0, deps=(s,))
        else:
            s = _score(q_tile, k_slots, k_full, step, 0, s, STAGES, N)
        dp = _score(do_tile, v_slots, v_full, step, 1, dp, STAGES, N)
        if not AHEAD:
            s = warpgroup_mma_wait(1, deps=(s,))
    j = n0 + gl.arange(0, N, layout=gl.SliceLayout(0, s_layout))
    masked = (n0 < free0) | (n0 + N > free1)
    if SOFTMAX:
        slope = gl.exp2(s * (scale * LOG2E) - lse_i[:, None])
        if masked:
            slope = gl.where(seen_by(i, j, lq, lk, left, right, CAUSAL, WINDOW, TRANSPOSED, True), slope, 0.0)
    else:
        if FOLDED:
            _value, slope = folded_value_and_slope(s, scale, FOLDED)
        else:
            _value, slope = activate_with_slope(s * scale, act_id, ACT, ACT_SET, FAST)
        if CAUSAL or WINDOW:
            if masked:
                slope = gl.where(seen_by(i, j, lq, lk, left, right, CAUSAL, WINDOW, TRANSPOSED, False), slope, 0.0)
    if AHEAD < 2:
        dp = warpgroup_mma_wait(0, deps=(dp,))
        mbarrier.arrive(v_empty.index(v_stage), count=1, pred=last_use)
    ds = slope * (dp - delta_i[:, None]) if SOFTMAX else slope * dp
    ds16 = gl.convert_layout(ds.to(k_slots.dtype), p_layout, assert_trivial=True)
    acc = warpgroup_mma(ds16, first_rows(k_slots.index(stage), N), acc, is_async=True)
    if NEXT:
        s = _score(q_tile, k_slots, k_full, step + 1, 0, s, STAGES, N)
        if AHEAD == 2:
            dp = _score(do_tile, v_slots, v_full, step + 1, 1, dp, STAGES, N)
        acc = warpgroup_mma_wait(AHEAD, deps=(acc,))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(k_empty.index(stage), count=1, pred=last_use)
    return s, dp, acc


@gluon.jit
def _row_sums(o_rows, do_tile, lse_i, delta, i, lq, delta_scale, wide: gl.constexpr):
    """lse in powers of two, and delta, which is stored."""
    sums = gl.sum(o_rows.to(gl.float32) * do_tile.load(wide).to(gl.float32), 1)
    delta_i = gl.convert_layout(sums, i.type.layout) * delta_scale
    gl.store(delta + i, delta_i, i < lq)
    # A row that sees no key must give P = 2^(S - inf) = 0.
    return gl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E), delta_i


@gluon.jit
def _read_rows(out, lse, row, own, lq, head, stride_on, stride_oh, D: gl.constexpr, row_layout: gl.constexpr, wide: gl.constexpr):
    """O and lse of 64 rows from ``own`` on, zeros outside the sample."""
    r = own + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    c = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
    at = out + (row + r).to(gl.int64)[:, None] * stride_on + head.to(gl.int64) * stride_oh + c[None, :]
    i = own + gl.arange(0, 64, layout=row_layout)
    return gl.load(at, (r < lq)[:, None], 0.0), gl.load(lse + i, i < lq, float("-inf"))


@gluon.jit
def _walking_consumer(
    out, lse, delta, table, tiles, q_slots, do_slots, k_slots, v_slots, q_full, done, k_full, k_empty, v_full, v_empty,
    act_ids, rows, left, right, scale, ds_scale, delta_scale, stride_on, stride_oh,
    WHO: gl.constexpr, H: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, AHEAD: gl.constexpr, SHORT: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_slots.dtype
    item_step = 0
    tile = WHO
    at, until = own_run(tiles, H)
    while at < until:
        row, lq, _k_row, lk, start, parts = read_run(table, at, until, tiles)
        head = at // tiles
        act_id = 0
        if act_ids is not None:
            act_id = gl.load(act_ids + head)
        m1 = gl.minimum(start + 128 * parts, lq)
        first, last, _free0, _free1 = column_range(start, m1, lq, lk, left, right, BLOCK_N, CAUSAL, WINDOW, TRANSPOSED)
        at_row = head.to(gl.int64) * rows + row
        given = first
        if SOFTMAX:
            o_rows, lse_i = _read_rows(out, lse + at_row, row, start + WHO * 64, lq, head, stride_on, stride_oh, D, row_layout, wide)
        for part in range(parts):
            own = start + part * 128 + WHO * 64
            slot = tile % HELD
            step = item_step + given - first
            if own < lq:
                m1 = gl.minimum(own + 64, lq)
                begin, end, free0, free1 = column_range(own, m1, lq, lk, left, right, BLOCK_N, CAUSAL, WINDOW, TRANSPOSED)
                # Tiles from here on are held for the next 64 rows.
                m1 = gl.minimum(own + 192, lq)
                keep, _end, _free0, _free1 = column_range(own + 128, m1, lq, lk, left, right, BLOCK_N, CAUSAL, WINDOW, TRANSPOSED)
                keep = gl.where((part + 1 < parts) & (own + 128 < lq), keep, last)
                q_tile = q_slots.index(slot)
                do_tile = do_slots.index(slot)
                i = own + gl.arange(0, 64, layout=row_layout)
                lse_x = 0.0
                delta_x = 0.0
                mbarrier.wait(q_full.index(slot), tile // HELD & 1)
                if SOFTMAX:
                    lse_x, delta_x = _row_sums(o_rows, do_tile, lse_i, delta + at_row, i, lq, delta_scale, wide)
                acc = gl.full([64, D], 0.0, gl.float32, o_layout)
                step = pass_over(begin - given, step, k_full, k_empty, v_full, v_empty, STAGES, False)
                if begin < end:
                    s = gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout)
                    dp = s
                    for x in range(begin, end):
                        s, dp, acc = _add_tile(
                            s, dp, acc, q_tile, do_tile, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
                            step, x, i, lse_x, delta_x, lq, lk, free0, free1, left, right, scale, act_id, x < keep,
                            SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, TRANSPOSED, BLOCK_N, STAGES, 0, False, BLOCK_N,
                        )  # fmt: skip
                        step += 1
                step = pass_over(keep - end, step, k_full, k_empty, v_full, v_empty, STAGES, False)
                given = keep
                if SOFTMAX:
                    # They are on their way while dQ is stored and the next tile is waited for.
                    o_rows, lse_i = _read_rows(out, lse + at_row, row, own + 128, lq, head, stride_on, stride_oh, D, row_layout, wide)
                q_tile.store((acc * ds_scale).to(dtype))
                fence_async_shared()
            else:
                # No row of this half belongs to the sample.
                mbarrier.wait(q_full.index(slot), tile // HELD & 1)
                step = pass_over(last - given, step, k_full, k_empty, v_full, v_empty, STAGES, False)
                given = last
            mbarrier.arrive(done.index(slot), count=1)
            tile += 2
        item_step += last - first
        at += parts


@gluon.jit
def _consumer(
    out, lse, delta, table, tiles, q_slots, do_slots, k_slots, v_slots, q_full, done, k_full, k_empty, v_full, v_empty,
    act_ids, rows, left, right, scale, ds_scale, delta_scale, stride_on, stride_oh,
    WHO: gl.constexpr, H: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, AHEAD: gl.constexpr, SHORT: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    half_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N // 2, 16])
    half_rows: gl.constexpr = gl.SliceLayout(1, half_layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_slots.dtype
    # With the first products ahead of the row sums, reading O earlier costs more than it gives.
    READS_AHEAD: gl.constexpr = SOFTMAX and AHEAD < 2
    step = 0
    total = tiles * H
    row, lq, _k_row, lk, start = read_first(table, total, H)
    if READS_AHEAD:
        head = item_at(0) % H
        at_row = head.to(gl.int64) * rows + row
        o_rows, lse_i = _read_rows(out, lse + at_row, row, start + WHO * 64, lq, head, stride_on, stride_oh, D, row_layout, wide)
    for n in range(items(total)):
        item = item_at(n)
        head = item % H
        lk = alive(lk)
        n_row, n_lq, _n_k_row, n_lk, n_start = read_tile(table, item_at(n + 1), total, H)
        n_head = item_at(n + 1) % H
        n_lse = lse
        if READS_AHEAD:
            n_lse = lse + n_head.to(gl.int64) * rows + n_row
        m1 = gl.minimum(start + 128, lq)
        first, last, _free0, _free1 = column_range(start, m1, lq, lk, left, right, BLOCK_N, CAUSAL, WINDOW, TRANSPOSED)
        own = start + WHO * 64
        slot = n % HELD
        if own < lq:
            m1 = gl.minimum(own + 64, lq)
            begin, end, free0, free1 = column_range(own, m1, lq, lk, left, right, BLOCK_N, CAUSAL, WINDOW, TRANSPOSED)
            whole = end
            if SHORT:
                whole = whole_tiles(begin, end, lk, BLOCK_N)
            i = own + gl.arange(0, 64, layout=row_layout)
            q_tile = q_slots.index(2 * slot + WHO)
            do_tile = do_slots.index(2 * slot + WHO)
            act_id = 0
            if act_ids is not None:
                act_id = gl.load(act_ids + head)
            at_row = head.to(gl.int64) * rows + row
            lse_s = 0.0
            delta_s = 0.0
            if SOFTMAX and AHEAD == 2:
                o_rows, lse_i = _read_rows(out, lse + at_row, row, own, lq, head, stride_on, stride_oh, D, row_layout, wide)
            mbarrier.wait(q_full.index(slot), n // HELD & 1)
            if READS_AHEAD:
                lse_s, delta_s = _row_sums(o_rows, do_tile, lse_i, delta + at_row, i, lq, delta_scale, wide)
            acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            if CAUSAL or WINDOW:
                step = pass_over(begin - first, step, k_full, k_empty, v_full, v_empty, STAGES, D > 128)
            if begin < end:
                s = gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout)
                dp = s
                if AHEAD:
                    s = _score(q_tile, k_slots, k_full, step, 0, s, STAGES, BLOCK_N)
                if AHEAD == 2:
                    dp = _score(do_tile, v_slots, v_full, step, 1, dp, STAGES, BLOCK_N)
                lse_x = lse_s
                delta_x = delta_s
                if SOFTMAX and AHEAD == 2:
                    lse_x, delta_x = _row_sums(o_rows, do_tile, lse_i, delta + at_row, i, lq, delta_scale, wide)
                for x in range(begin, whole - 1 if AHEAD else whole):
                    s, dp, acc = _add_tile(
                        s, dp, acc, q_tile, do_tile, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
                        step, x, i, lse_x, delta_x, lq, lk, free0, free1, left, right, scale, act_id, True,
                        SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, TRANSPOSED, BLOCK_N, STAGES, AHEAD, AHEAD > 0, BLOCK_N,
                    )  # fmt: skip
                    step += 1
                if AHEAD:
                    x = end - 1
                    _s, _dp, acc = _add_tile(
                        s, dp, acc, q_tile, do_tile, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
                        step, x, i, lse_x, delta_x, lq, lk, free0, free1, left, right, scale, act_id, True,
                        SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, TRANSPOSED, BLOCK_N, STAGES, AHEAD, False, BLOCK_N,
                    )  # fmt: skip
                    step += 1
                if SHORT:
                    if SOFTMAX:
                        lse_x = gl.convert_layout(lse_x, half_rows, assert_trivial=True)
                        delta_x = gl.convert_layout(delta_x, half_rows, assert_trivial=True)
                    i_x = gl.convert_layout(i, half_rows, assert_trivial=True)
                    s = gl.full([64, BLOCK_N // 2], 0.0, gl.float32, half_layout)
                    dp = s
                    for x in range(whole, end):
                        s, dp, acc = _add_tile(
                            s, dp, acc, q_tile, do_tile, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
                            step, x, i_x, lse_x, delta_x, lq, lk, free0, free1, left, right, scale, act_id, True,
                            SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, TRANSPOSED, BLOCK_N, STAGES, 0, False, BLOCK_N // 2,
                        )  # fmt: skip
                        step += 1
            else:
                if SOFTMAX and AHEAD == 2:
                    _row_sums(o_rows, do_tile, lse_i, delta + at_row, i, lq, delta_scale, wide)
            if CAUSAL or WINDOW:
                step = pass_over(last - end, step, k_full, k_empty, v_full, v_empty, STAGES, D > 128)
            if READS_AHEAD:
                # They are on their way while dQ is stored and the next tile is waited for.
                o_rows, lse_i = _read_rows(out, n_lse, n_row, n_start + WHO * 64, n_lq, n_head, stride_on, stride_oh, D, row_layout, wide)
            q_tile.store((acc * ds_scale).to(dtype))
            fence_async_shared()
        else:
            # No row of this half belongs to the sample.
            mbarrier.wait(q_full.index(slot), n // HELD & 1)
            if READS_AHEAD:
                o_rows, lse_i = _read_rows(out, n_lse, n_row, n_start + WHO * 64, n_lq, n_head, stride_on, stride_oh, D, row_layout, wide)
            step = pass_over(last - first, step, k_full, k_empty, v_full, v_empty, STAGES, D > 128)
        mbarrier.arrive(done.index(slot), count=1)
        row, lq, lk, start = n_row, n_lq, n_lk, n_start


@gluon.jit(do_not_specialize=["batch", "rows", "left", "right"])
def hopper_bwd_dq_kernel(
    q, k, v, dout, dq_box, dq, out, lse, delta, table, tile_count, q_offsets, act_ids, batch, rows, left, right,
    scale, ds_scale, delta_scale, stride_on, stride_oh, stride_dq,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, WALK: gl.constexpr, AHEAD: gl.constexpr, SHORT: gl.constexpr,
    TRANSPOSED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    if q_offsets is not None:
        fill_rows(dq, gl.load(q_offsets + batch).to(gl.int64), rows.to(gl.int64), stride_dq, 0.0, H * D, num_warps)
    let_next_begin()
    tiles = gl.load(tile_count)
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    q_slots = gl.allocate_shared_memory(dtype, [HELD if WALK else 2 * HELD, 64, D], tile)
    do_slots = gl.allocate_shared_memory(dtype, [HELD if WALK else 2 * HELD, 64, D], tile)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    v_slots = k_slots
    if D <= 128:
        v_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    q_full, q_empty, done = make_barriers(HELD, 1), make_barriers(HELD, 1), make_barriers(HELD, 1 if WALK else 2)
    k_full, k_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    v_full, v_empty = k_full, k_empty
    if D <= 128:
        v_full, v_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _walking_consumer if WALK else _consumer,
                (
                    out, lse, delta, table, tiles, q_slots, do_slots, k_slots, v_slots,
                    q_full, done, k_full, k_empty, v_full, v_empty,
                    act_ids, rows, left, right, scale, ds_scale, delta_scale, stride_on, stride_oh,
                    0, H, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, BLOCK_N, STAGES, HELD, AHEAD, SHORT, TRANSPOSED,
                ),
            ),
            (
                _walking_consumer if WALK else _consumer,
                (
                    out, lse, delta, table, tiles, q_slots, do_slots, k_slots, v_slots,
                    q_full, done, k_full, k_empty, v_full, v_empty,
                    act_ids, rows, left, right, scale, ds_scale, delta_scale, stride_on, stride_oh,
                    1, H, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, WINDOW, BLOCK_N, STAGES, HELD, AHEAD, SHORT, TRANSPOSED,
                ),
            ),
            (
                _producer,
                (
                    q, k, v, dout, table, tiles, q_slots, do_slots, k_slots, v_slots,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, left, right, out, lse, rows, stride_on, stride_oh,
                    H, GROUP, D, CAUSAL, WINDOW, BLOCK_N, STAGES, HELD, WALK, q_offsets is None, SOFTMAX, TRANSPOSED,
                ),
            ),
            (_storer, (dq_box, table, tiles, q_slots, q_empty, done, H, D, HELD, WALK)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
