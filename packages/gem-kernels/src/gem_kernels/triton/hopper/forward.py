"""Forward pass on Hopper: two warpgroups, each with 64 query rows of a 128-row tile, share the K and V tiles that a third partition loads.

    producer    Q | K V | K V | K V | ...            one TMA a box, rings of 2 slots each for Q, K and V
    consumer 0  S = Q Kᵀ | softmax step or activation | O += P V | ...
    consumer 1       the same half a step apart: its products run while the other one does its elementwise work

With PARTS > 1 an item is up to PARTS tiles of one sample, for full attention to at most STAGES tiles of keys: these are loaded once and
held until the item's last tile is done.

With TRANSPOSED the rows are keys and the columns queries: given K to hold, Q and dO to stream, the kernel computes dV of `gdpa`.

P goes from the accumulator's registers straight into the next product; with AHEAD the next S is under way while it is multiplied. Key
blocks are walked from the last to the first; tiles that all rows of a warpgroup see wholly are not masked. O leaves through a buffer of its
own, so that the slot of Q is free after the last product; heads of 256 columns leave no room for that and have one slot for both.
Nothing may be changed in a branch while it is an operand of an unfinished wgmma: ptxas does that in place.
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate
from gem_kernels.triton.hopper.common import (
    alive,
    column_range,
    fill_flat,
    fill_rows,
    folded_value,
    item_at,
    items,
    load_box,
    make_barriers,
    parts_of,
    pass_over,
    read_tile,
    seen_by,
    store_box,
)

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _producer(
    q, k, v, table, total, q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty, left, right,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, AHEAD: gl.constexpr, BROADCAST: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    HELD: gl.constexpr = 1 if D > 128 else 2
    step = 0
    tile = 0
    for n in range(items(total)):
        item = item_at(n)
        head = item % H
        row, lq, k_row, lk, start = read_tile(table, item, total, H)
        for part in range(parts_of(lq - start, PARTS)):
            m0 = start + part * 128
            m1 = gl.minimum(m0 + 128, lq)
            first, last, _free0, _free1 = column_range(m0, m1, lq, lk, left, right, BLOCK_N, CAUSAL, WINDOW, TRANSPOSED)
            slot = tile % HELD
            mbarrier.wait(q_empty.index(slot), (tile // HELD & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), 2 * 128 * D)
            for half in gl.static_range(2):
                to = q_slots.index(2 * slot + half)
                load_box(q, 0 if BROADCAST else row, lq, m0 + half * 64, head * D, q_full.index(slot), to, 64, D)
            tile += 1
            if AHEAD == 2:
                last = gl.maximum(last, 1)
            loads = last - first
            if PARTS > 1:
                loads = gl.where(part > 0, 0, loads)
            for x in range(loads):
                n0 = (last - 1 - x) * BLOCK_N
                stage = step % STAGES
                phase = (step // STAGES & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), 2 * BLOCK_N * D)
                load_box(k, k_row, lk, n0, head // GROUP * D, k_full.index(stage), k_slots.index(stage), BLOCK_N, D)
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), 2 * BLOCK_N * D)
                load_box(v, k_row, lk, n0, head // GROUP * D, v_full.index(stage), v_slots.index(stage), BLOCK_N, D)
                step += 1


@gluon.jit
def _scores(q_tile, k_slots, k_full, step, s, STAGES: gl.constexpr):
    """S of the tile of a step, under way in place of ``s``."""
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), step // STAGES & 1)
    return warpgroup_mma(q_tile, k_slots.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)


@gluon.jit
def _add_tile(
    s, m_i, l_i, acc, next_q, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
    step, next_step, n0, i, lq, lk, free0, free1, left, right, scale, act_id, first, adds, last_part,
    SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr,
    POSITIVE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, UNSEEING: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, NEXT: gl.constexpr,
):  # fmt: skip
    """Adds the tile of a step, whose S is under way, to a row's maximum, sum and (``adds``: otherwise it begins) result. With NEXT the S of
    ``next_step`` and ``next_q`` is under way then. UNSEEING: rows may have seen no key yet."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, acc.shape[1], 16])
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    stage = step % STAGES
    # The row maximum may be taken of raw scores where scaling keeps their order.
    step_2 = scale * LOG2E if POSITIVE else LOG2E
    s = warpgroup_mma_wait(0, deps=(s,))
    if last_part:
        mbarrier.arrive(k_empty.index(stage), count=1)
    j = n0 + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
    masked = (n0 < free0) | (n0 + BLOCK_N > free1)
    if SOFTMAX:
        if not POSITIVE:
            s = s * scale
        if masked:
            s = gl.where(seen_by(i, j, lq, lk, left, right, CAUSAL, WINDOW, TRANSPOSED, True), s, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(s, 1) * step_2)
        m_safe = m_new
        if UNSEEING:
            m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s * step_2 - m_safe[:, None])
        alpha = gl.exp2(m_i - m_safe)
        l_i = l_i * alpha + gl.sum(p, 1)
        if not first:
            acc = acc * gl.convert_layout(alpha, o_row_layout, assert_trivial=True)[:, None]
        m_i = m_new
    else:
        if FOLDED:
            p = folded_value(s, scale, FOLDED)
        else:
            p = activate(s * scale, act_id, ACT, ACT_SET, FAST)
        if CAUSAL or WINDOW:
            if masked:
                p = gl.where(seen_by(i, j, lq, lk, left, right, CAUSAL, WINDOW, TRANSPOSED, False), p, 0.0)
    p16 = gl.convert_layout(p.to(v_slots.dtype), gl.DotOperandLayout(0, o_layout, 2), assert_trivial=True)
    mbarrier.wait(v_full.index(stage), step // STAGES & 1)
    acc = warpgroup_mma(p16, v_slots.index(stage), acc, use_acc=adds, is_async=True)
    if NEXT:
        s = _scores(next_q, k_slots, k_full, next_step, p, STAGES)
        acc = warpgroup_mma_wait(1, deps=(acc,))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    if last_part:
        mbarrier.arrive(v_empty.index(stage), count=1)
    return s, m_i, l_i, acc


@gluon.jit
def _finish(lse, m_i, l_i, acc, at, i, lq, out_scale, SOFTMAX: gl.constexpr):
    """The rows' result; their lse is stored from element ``at`` of ``lse`` on."""
    if SOFTMAX:
        live = l_i > 0
        factor = gl.where(live, out_scale / l_i, 0.0)
        gl.store(lse + at + i, gl.where(live, (m_i + gl.log2(l_i)) * LN2, float("-inf")), i < lq)
        return acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)[:, None]
    else:
        return acc * out_scale


@gluon.jit
def _chain_link(
    s, m_i, l_i, acc, x, part, out, lse, q_slots, k_slots, v_slots, o_tile, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    step, tile, tiles, live, row, lq, lk, own, head, act_id, rows, scale, out_scale,
    WHO: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr,
    FOLDED: gl.constexpr, POSITIVE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, NEXT: gl.constexpr,
):  # fmt: skip
    """`_add_tile` of key tile ``x`` and query tile ``part``, which is stored once it has seen all keys; the S after this one may be that of
    the next query tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    ends = x == tiles - 1
    next_x = gl.where(ends, 0, x + 1)
    next_tile = tile + part + ends.to(gl.int32)
    if NEXT:
        mbarrier.wait(q_full.index(next_tile % 2), next_tile // 2 & 1)
    m_i = gl.where(x == 0, float("-inf"), m_i)
    l_i = gl.where(x == 0, 0.0, l_i)
    i = own + part * 128 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
    s, m_i, l_i, acc = _add_tile(
        s, m_i, l_i, acc, q_slots.index(next_tile % 2 * 2 + WHO), k_slots, v_slots, k_full, k_empty, v_full, v_empty,
        step + x, step + next_x, (tiles - 1 - x) * BLOCK_N, i, lq, lk, 0, lk, 0, 0, scale, act_id, x == 0, x > 0, part == live - 1,
        SOFTMAX, ACT, ACT_SET, FAST, FOLDED, POSITIVE, False, False, True, False, BLOCK_N, STAGES, NEXT,
    )  # fmt: skip
    if ends:
        mbarrier.arrive(q_empty.index((tile + part) % 2), count=1)
        result = _finish(lse, m_i, l_i, acc, head.to(gl.int64) * rows + row, i, lq, out_scale, SOFTMAX)
        tma.store_wait(0)
        o_tile.store(result.to(q_slots.dtype))
        fence_async_shared()
        store_box(out, row, lq, own + part * 128, head * D, o_tile, 64, D)
    return s, m_i, l_i, acc, next_x, next_tile - tile


@gluon.jit
def _chain(
    out, lse, q_slots, k_slots, v_slots, o_tile, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    step, tile, row, lq, lk, start, parts, head, act_id, rows, scale, out_scale,
    WHO: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr,
    FOLDED: gl.constexpr, POSITIVE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """All query tiles of an item, whose keys stay in their slots, in one loop over pairs of tiles; the step after it."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    tiles = gl.maximum((lk + BLOCK_N - 1) // BLOCK_N, 1)
    own = start + WHO * 64
    # Query tiles in which this warpgroup has rows: all, or all but the last.
    live = gl.where(own + (parts - 1) * 128 < lq, parts, parts - 1)
    if live > 0:
        s = gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout)
        m_i = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        l_i = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        acc = gl.full([64, D], 0.0, gl.float32, o_layout)
        mbarrier.wait(q_full.index(tile % 2), tile // 2 & 1)
        s = _scores(q_slots.index(tile % 2 * 2 + WHO), k_slots, k_full, step, s, STAGES)
        x = step * 0
        part = step * 0
        for _n in range(live * tiles - 1):
            s, m_i, l_i, acc, x, part = _chain_link(
                s, m_i, l_i, acc, x, part, out, lse, q_slots, k_slots, v_slots, o_tile, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                step, tile, tiles, live, row, lq, lk, own, head, act_id, rows, scale, out_scale,
                WHO, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, POSITIVE, BLOCK_N, STAGES, True,
            )  # fmt: skip
        _chain_link(
            s, m_i, l_i, acc, x, part, out, lse, q_slots, k_slots, v_slots, o_tile, q_full, q_empty, k_full, k_empty, v_full, v_empty,
            step, tile, tiles, live, row, lq, lk, own, head, act_id, rows, scale, out_scale,
            WHO, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, POSITIVE, BLOCK_N, STAGES, False,
        )  # fmt: skip
    if live < parts:
        last = tile + parts - 1
        mbarrier.wait(q_full.index(last % 2), last // 2 & 1)
        mbarrier.arrive(q_empty.index(last % 2), count=1)
    return pass_over(gl.where(live > 0, 0, tiles), step, k_full, k_empty, v_full, v_empty, STAGES, False) + gl.where(live > 0, tiles, 0)


@gluon.jit
def _consumer(
    out, lse, table, total, q_slots, k_slots, v_slots, o_buffer, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    act_ids, rows, left, right, scale, out_scale,
    WHO: gl.constexpr, H: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, POSITIVE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, AHEAD: gl.constexpr, REGS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = q_slots.dtype
    HELD: gl.constexpr = 1 if D > 128 else 2
    step = 0
    tile = 0
    row, lq, _k_row, lk, start = read_tile(table, item_at(0), total, H)
    for n in range(items(total)):
        item = item_at(n)
        head = item % H
        lk = alive(lk)
        n_row, n_lq, _n_k_row, n_lk, n_start = read_tile(table, item_at(n + 1), total, H)
        parts = parts_of(lq - start, PARTS)
        if AHEAD == 2:
            act_id = 0
            if act_ids is not None:
                act_id = gl.load(act_ids + head)
            step = _chain(
                out, lse, q_slots, k_slots, v_slots, o_buffer.index(WHO), q_full, q_empty, k_full, k_empty, v_full, v_empty,
                step, tile, row, lq, lk, start, parts, head, act_id, rows, scale, out_scale,
                WHO, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, POSITIVE, BLOCK_N, STAGES,
            )  # fmt: skip
            tile += parts
        for part in range(0 if AHEAD == 2 else parts):
            m0 = start + part * 128
            m1 = gl.minimum(m0 + 128, lq)
            first, last, _free0, _free1 = column_range(m0, m1, lq, lk, left, right, BLOCK_N, CAUSAL, WINDOW, TRANSPOSED)
            # Keys are given back after the last tile that multiplies them.
            last_part = True if PARTS == 1 else part == parts - 1
            own = m0 + WHO * 64
            slot = tile % HELD
            mbarrier.wait(q_full.index(slot), tile // HELD & 1)
            if own < lq:
                m1 = gl.minimum(own + 64, lq)
                begin, end, free0, free1 = column_range(own, m1, lq, lk, left, right, BLOCK_N, CAUSAL, WINDOW, TRANSPOSED)
                if CAUSAL or WINDOW:
                    step = pass_over(last - end, step, k_full, k_empty, v_full, v_empty, STAGES, False)
                q_tile = q_slots.index(2 * slot + WHO)
                q_held = q_tile
                if REGS:
                    q_held = q_tile.load(gl.DotOperandLayout(0, s_layout, 2))
                act_id = 0
                if act_ids is not None:
                    act_id = gl.load(act_ids + head)
                i = own + gl.arange(0, 64, layout=row_layout)
                m_i = gl.full([64], float("-inf"), gl.float32, row_layout)
                l_i = gl.full([64], 0.0, gl.float32, row_layout)
                acc = gl.full([64, D], 0.0, gl.float32, o_layout)
                if begin < end:
                    s = gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout)
                    if AHEAD:
                        s = _scores(q_held, k_slots, k_full, step, s, STAGES)
                    for x in range(end - begin - 1 if AHEAD else end - begin):
                        if not AHEAD:
                            s = _scores(q_held, k_slots, k_full, step + x, s, STAGES)
                        s, m_i, l_i, acc = _add_tile(
                            s, m_i, l_i, acc, q_held, k_slots, v_slots, k_full, k_empty, v_full, v_empty, step + x, step + x + 1,
                            (end - 1 - x) * BLOCK_N, i, lq, lk, free0, free1, left, right, scale, act_id, x == 0, True, last_part,
                            SOFTMAX, ACT, ACT_SET, FAST, FOLDED, POSITIVE, CAUSAL, WINDOW, CAUSAL or WINDOW, TRANSPOSED,
                            BLOCK_N, STAGES, AHEAD,
                        )  # fmt: skip
                    if AHEAD:
                        _s, m_i, l_i, acc = _add_tile(
                            s, m_i, l_i, acc, q_held, k_slots, v_slots, k_full, k_empty, v_full, v_empty, step + end - begin - 1, step,
                            begin * BLOCK_N, i, lq, lk, free0, free1, left, right, scale, act_id, begin + 1 == end, True, last_part,
                            SOFTMAX, ACT, ACT_SET, FAST, FOLDED, POSITIVE, CAUSAL, WINDOW, CAUSAL or WINDOW, TRANSPOSED,
                            BLOCK_N, STAGES, False,
                        )  # fmt: skip
                if last_part:
                    step += end - begin
                if HELD > 1:
                    mbarrier.arrive(q_empty.index(slot), count=1)
                if CAUSAL or WINDOW:
                    step = pass_over(begin - first, step, k_full, k_empty, v_full, v_empty, STAGES, False)
                acc = _finish(lse, m_i, l_i, acc, head.to(gl.int64) * rows + row, i, lq, out_scale, SOFTMAX)
                if HELD > 1:
                    tma.store_wait(0)
                    o_tile = o_buffer.index(WHO)
                else:
                    o_tile = q_tile
                o_tile.store(acc.to(dtype))
                fence_async_shared()
                store_box(out, row, lq, own, head * D, o_tile, 64, D)
                if HELD == 1:
                    tma.store_wait(0)
                    mbarrier.arrive(q_empty.index(slot), count=1)
            else:
                # No row of this half belongs to the sample.
                mbarrier.arrive(q_empty.index(slot), count=1)
                step = pass_over((last - first) if last_part else 0, step, k_full, k_empty, v_full, v_empty, STAGES, False)
            tile += 1
        row, lq, lk, start = n_row, n_lq, n_lk, n_start
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "rows", "left", "right"])
def hopper_fwd_kernel(
    q, k, v, out_box, out, lse, table, tile_count, q_offsets, act_ids, batch, rows, left, right, scale, out_scale, stride_on,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, POSITIVE: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, AHEAD: gl.constexpr, REGS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    if q_offsets is not None:
        used = gl.load(q_offsets + batch).to(gl.int64)
        fill_rows(out, used, rows.to(gl.int64), stride_on, 0.0, H * D, num_warps)
        if SOFTMAX:
            for head in range(H):
                fill_flat(lse + head * rows.to(gl.int64), used, rows.to(gl.int64), float("-inf"), num_warps)
    total = gl.load(tile_count) * H
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    HELD: gl.constexpr = 1 if D > 128 else 2
    q_slots = gl.allocate_shared_memory(dtype, [2 * HELD, 64, D], tile)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    o_buffer = q_slots
    if HELD > 1:
        o_buffer = gl.allocate_shared_memory(dtype, [2, 64, D], tile)
    q_full, q_empty = make_barriers(HELD, 1), make_barriers(HELD, 2)
    k_full, k_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    v_full, v_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    out_box, lse, table, total, q_slots, k_slots, v_slots, o_buffer, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    act_ids, rows, left, right, scale, out_scale,
                    0, H, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, POSITIVE, CAUSAL, WINDOW, BLOCK_N, STAGES, PARTS, AHEAD, REGS, TRANSPOSED,
                ),
            ),
            (
                _consumer,
                (
                    out_box, lse, table, total, q_slots, k_slots, v_slots, o_buffer, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    act_ids, rows, left, right, scale, out_scale,
                    1, H, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, POSITIVE, CAUSAL, WINDOW, BLOCK_N, STAGES, PARTS, AHEAD, REGS, TRANSPOSED,
                ),
            ),
            (
                _producer,
                (
                    q, k, v, table, total, q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty, left, right,
                    H, GROUP, D, CAUSAL, WINDOW, BLOCK_N, STAGES, PARTS, AHEAD, q_offsets is None, TRANSPOSED,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
