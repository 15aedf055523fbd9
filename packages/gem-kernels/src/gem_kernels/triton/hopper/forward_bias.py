"""Forward pass on Hopper with relative bias by position and time, and candidates; see `forward` for what is alike, and `bias_codes` for the
work list and how the bias is added.

    consumer    bias of tile 1 | S1 += Q Kᵀ | P1 | O += P1 V, meanwhile bias of tile 2 | S2 += Q Kᵀ | ...

S is added to the bias of its tile, over the scale of the scores, which is looked up while the tile before is multiplied with V; with CHAIN
the next item's first S is multiplied while O is stored.

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
    biased_rows,
    codes_of,
    key_blocks,
    lane_entry,
    load_codes,
    prefetch_codes,
    prefetch_entry,
    read_entry,
    row_entries,
)
from gem_kernels.triton.hopper.common import fill_flat, fill_rows, folded_value, load_box, make_barriers, pass_over, store_box
from gem_kernels.triton.hopper.forward import _finish

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _producer(
    q, k, v, table, codes, total, q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, CHAIN: gl.constexpr,
    FETCH: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % H
        row, lq, k_row, h, m0, shift, _t = read_entry(table, item, total, H)
        last = key_blocks(gl.minimum(m0 + 128, lq), h, shift, 64, CAUSAL)
        if CHAIN:
            last = gl.maximum(last, 1)
        slot = tile % 2
        mbarrier.wait(q_empty.index(slot), (tile // 2 & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), 2 * 128 * D)
        for half in gl.static_range(2):
            load_box(q, row, lq, m0 + half * 64, head * D, q_full.index(slot), q_slots.index(2 * slot + half), 64, D)
        tile += 1
        units = codes_of(codes, table, item, H, 0)
        for x in range(last):
            n0 = (last - 1 - x) * 64
            stage = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            if FETCH:
                prefetch_codes(units + n0 // 64 * UNIT, 64)
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), 2 * 64 * D)
            load_box(k, k_row, h, n0, head // GROUP * D, k_full.index(stage), k_slots.index(stage), 64, D)
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), 2 * 64 * D)
            load_box(v, k_row, h, n0, head // GROUP * D, v_full.index(stage), v_slots.index(stage), 64, D)
            step += 1
    if CHAIN:
        if step > 0:
            # What consumers multiply in vain.
            row, lq, k_row, h, m0, _shift, _t = read_entry(table, total, total, H)
            slot = tile % 2
            mbarrier.wait(q_empty.index(slot), (tile // 2 & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), 2 * 128 * D)
            for half in gl.static_range(2):
                load_box(q, row, lq, m0 + half * 64, 0, q_full.index(slot), q_slots.index(2 * slot + half), 64, D)
            stage = step % STAGES
            mbarrier.wait(k_empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(k_full.index(stage), 2 * 64 * D)
            load_box(k, k_row, h, 0, 0, k_full.index(stage), k_slots.index(stage), 64, D)


@gluon.jit
def _biased_scores(
    code, q_tile, k_slots, k_full, step, n0, p, straight, pairs_p, table_t, entry, radius, gain,
    STAGES: gl.constexpr, LANES: gl.constexpr, FOLLOW: gl.constexpr,
):  # fmt: skip
    """S of the tile of a step under way, added to the bias."""
    if FOLLOW:
        s = biased_rows(code, p, n0, straight, pairs_p, radius, table_t, entry, gain, LANES, False)
    else:
        layout: gl.constexpr = code.type.layout
        s = row_entries(p, n0, pairs_p, radius, layout)
        s = add_entries(s, code, table_t, entry, gain, LANES)
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), step // STAGES & 1)
    return warpgroup_mma(q_tile, k_slots.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _add_tile(
    s, m_i, l_i, acc, k_slots, v_slots, q_empty, k_full, k_empty, v_full, v_empty, step, n0, p, p_min, h, scale, act_id,
    next_q, q_full, tile, at, next_n0, next_p, straight, pairs_p, table_t, entry, radius, skip,
    SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, LANES: gl.constexpr, FOLLOW: gl.constexpr, NEXT: gl.constexpr,
):  # fmt: skip
    """Adds the tile of a step, whose S is under way, to a row's maximum, sum and result. The S of the next tile is under way then, with
    NEXT 1 of the same item and with 2 of the next one; its bias is looked up while this tile's P V is multiplied."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, acc.shape[1], 16])
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    stage = step % STAGES
    if NEXT:
        code = load_codes(at, s_layout)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if NEXT == 2:
        mbarrier.arrive(q_empty.index(tile % 2), count=1)
    j = n0 + gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
    masked = n0 + 64 > h
    if CAUSAL:
        masked = n0 + 64 > gl.minimum(h, p_min + 1)
    if SOFTMAX:
        if masked:
            seen = (j < h)[None, :] & (p[:, None] >= (j[None, :] if CAUSAL else p[:, None]))
            s = gl.where(seen, s, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(s, 1) * (scale * LOG2E))
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        weight = gl.exp2(s * (scale * LOG2E) - m_safe[:, None])
        alpha = gl.exp2(m_i - m_safe)
        l_i = l_i * alpha + gl.sum(weight, 1)
        acc = acc * gl.convert_layout(alpha, o_row_layout, assert_trivial=True)[:, None]
        m_i = m_new
    else:
        if FOLDED:
            weight = folded_value(s, scale, FOLDED)
        else:
            weight = activate(s * scale, act_id, ACT, ACT_SET, FAST)
        if CAUSAL:
            if masked:
                weight = gl.where(p[:, None] >= j[None, :], weight, 0.0)
    p16 = gl.convert_layout(weight.to(v_slots.dtype), gl.DotOperandLayout(0, o_layout, 2), assert_trivial=True)
    mbarrier.wait(v_full.index(stage), step // STAGES & 1)
    acc = warpgroup_mma(p16, v_slots.index(stage), acc, is_async=True)
    step += 1
    if NEXT == 2:
        mbarrier.wait(q_full.index((tile + 1) % 2), (tile + 1) // 2 & 1)
        step = pass_over(skip, step, k_full, k_empty, v_full, v_empty, STAGES, False)
    if NEXT:
        s = _biased_scores(
            code, next_q, k_slots, k_full, step, next_n0, next_p, straight, pairs_p, table_t, entry, radius, 1 / scale,
            STAGES, LANES, FOLLOW,
        )  # fmt: skip
        acc = warpgroup_mma_wait(1, deps=(acc,))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    return s, m_i, l_i, acc, step


@gluon.jit
def _store_item(
    acc, m_i, l_i, out, lse, o_tile, own_scores, own_v, row, lq, k_row, h, t, own, i, head, act_id, rows, scale, out_scale,
    stride_vn, stride_vh,
    GROUP: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    """Adds candidates' own pairs, and stores rows ``i`` of a sample."""
    D: gl.constexpr = acc.shape[1]
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    if own_scores is not None:
        if (gl.minimum(own + 64, lq) > lq - t) & (own < lq):
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
                share = folded_value(score / scale, scale, FOLDED)
            else:
                share = activate(score, act_id, ACT, ACT_SET, FAST).to(gl.float32)
            r = own + gl.arange(0, 64, layout=o_row_layout)
            c = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
            at = own_v + (k_row + h - (lq - t) + r).to(gl.int64)[:, None] * stride_vn + head // GROUP * stride_vh + c[None, :]
            v_own = gl.load(at, ((r >= lq - t) & (r < lq))[:, None], 0.0)
            acc += gl.convert_layout(share, o_row_layout, assert_trivial=True)[:, None] * v_own.to(gl.float32)
    acc = _finish(lse, m_i, l_i, acc, head.to(gl.int64) * rows + row, i, lq, out_scale, SOFTMAX)
    tma.store_wait(0)
    o_tile.store(acc.to(o_tile.dtype))
    fence_async_shared()
    store_box(out, row, lq, own, head * D, o_tile, 64, D)


@gluon.jit
def _blocks(m0, lq, h, shift, WHO: gl.constexpr, CAUSAL: gl.constexpr):
    """Blocks of keys that a consumer's rows see, one at least, and how many more the item has."""
    last = gl.maximum(key_blocks(gl.minimum(m0 + 128, lq), h, shift, 64, CAUSAL), 1)
    end = gl.maximum(key_blocks(gl.minimum(m0 + WHO * 64 + 64, lq), h, shift, 64, CAUSAL), 1)
    return end, last - end


@gluon.jit
def _chain(
    out, lse, table, total, q_slots, k_slots, v_slots, o_buffer,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    pairs, time, codes, own_scores, own_v,
    act_ids, rows, radius, edges, scale, out_scale, stride_p, stride_t, stride_vn, stride_vh,
    WHO: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr,
    ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, LANES: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    first = gl.program_id(0)
    if first < total:
        row, lq, _k_row, h, m0, shift, t = read_entry(table, first, total, H)
        end, skip = _blocks(m0, lq, h, shift, WHO, CAUSAL)
        step = pass_over(skip, first * 0, k_full, k_empty, v_full, v_empty, STAGES, False)
        tile = first * 0
        p = gl.minimum(m0 + WHO * 64 + gl.arange(0, 64, layout=row_layout) + shift, h)
        head = first % H
        pairs_p = pairs + head.to(gl.int64) * (2 * stride_p)
        table_t = time + head.to(gl.int64) * stride_t
        entry = p * 0.0
        if LANES:
            entry = lane_entry(table_t, edges, row_layout) / scale
        code = load_codes(codes_of(codes, table, first, H, WHO) + (end - 1) * UNIT, s_layout)
        mbarrier.wait(q_full.index(0), 0)
        s = _biased_scores(
            code, q_slots.index(WHO), k_slots, k_full, step, (end - 1) * 64, p, 0, pairs_p, table_t, entry, radius, 1 / scale,
            STAGES, LANES, False,
        )  # fmt: skip
        for item in range(first, total, gl.num_programs(0)):
            head = item % H
            row, lq, k_row, h, m0, shift, t = read_entry(table, item, total, H)
            own = m0 + WHO * 64
            end, skip = _blocks(m0, lq, h, shift, WHO, CAUSAL)
            p_min = gl.minimum(own + shift, h)
            act_id = 0
            if act_ids is not None:
                act_id = gl.load(act_ids + head)
            i = own + gl.arange(0, 64, layout=row_layout)
            p = gl.minimum(i + shift, h)
            pairs_p = pairs + head.to(gl.int64) * (2 * stride_p)
            table_t = time + head.to(gl.int64) * stride_t
            m_i = gl.full([64], float("-inf"), gl.float32, row_layout)
            l_i = gl.full([64], 0.0, gl.float32, row_layout)
            acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            units = codes_of(codes, table, item, H, WHO)
            q_tile = q_slots.index(tile % 2 * 2 + WHO)
            for x in range(end - 1):
                n0 = (end - 1 - x) * 64
                s, m_i, l_i, acc, step = _add_tile(
                    s, m_i, l_i, acc, k_slots, v_slots, q_empty, k_full, k_empty, v_full, v_empty, step, n0, p, p_min, h, scale, act_id,
                    q_tile, q_full, tile, units + (n0 // 64 - 1) * UNIT, n0 - 64, p, 0, pairs_p, table_t, entry, radius, 0,
                    SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, STAGES, LANES, False, 1,
                )  # fmt: skip
            # Past the last item a tile is multiplied in vain.
            next_item = gl.minimum(item + gl.num_programs(0), total - 1)
            _row, n_lq, _k_row, n_h, n_m0, n_shift, _t = read_entry(table, next_item, total, H)
            if FETCH:
                prefetch_entry(table, next_item + gl.num_programs(0), total, H)
            n_end, n_skip = _blocks(n_m0, n_lq, n_h, n_shift, WHO, CAUSAL)
            n_skip = gl.where(item + gl.num_programs(0) < total, n_skip, 0)
            n_p = gl.minimum(n_m0 + WHO * 64 + gl.arange(0, 64, layout=row_layout) + n_shift, n_h)
            n_head = next_item % H
            n_table = time + n_head.to(gl.int64) * stride_t
            if LANES:
                entry = lane_entry(n_table, edges, row_layout) / scale
            s, m_i, l_i, acc, step = _add_tile(
                s, m_i, l_i, acc, k_slots, v_slots, q_empty, k_full, k_empty, v_full, v_empty, step, end * 0, p, p_min, h, scale, act_id,
                q_slots.index((tile + 1) % 2 * 2 + WHO), q_full, tile, codes_of(codes, table, next_item, H, WHO) + (n_end - 1) * UNIT,
                (n_end - 1) * 64, n_p, 0, pairs + n_head.to(gl.int64) * (2 * stride_p), n_table, entry, radius, n_skip,
                SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, STAGES, LANES, False, 2,
            )  # fmt: skip
            tile += 1
            _store_item(
                acc, m_i, l_i, out, lse, o_buffer.index(WHO), own_scores, own_v, row, lq, k_row, h, t, own, i, head, act_id, rows,
                scale, out_scale, stride_vn, stride_vh, GROUP, SOFTMAX, ACT, ACT_SET, FAST, FOLDED,
            )  # fmt: skip
        warpgroup_mma_wait(0, deps=(s,))
        tma.store_wait(0)


@gluon.jit
def _by_items(
    out, lse, table, total, q_slots, k_slots, v_slots, o_buffer,
    q_full, q_empty, k_full, k_empty, v_full, v_empty,
    pairs, time, codes, own_scores, own_v,
    act_ids, rows, radius, edges, scale, out_scale, stride_p, stride_t, stride_vn, stride_vh,
    WHO: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr,
    ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, LANES: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    """`_chain`, but that no S of an item is multiplied before the item before is stored, and that the bias is looked up with fewer loads
    and some branches."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    step = 0
    tile = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % H
        row, lq, k_row, h, m0, shift, t = read_entry(table, item, total, H)
        if FETCH:
            prefetch_entry(table, item + gl.num_programs(0), total, H)
        last = key_blocks(gl.minimum(m0 + 128, lq), h, shift, 64, CAUSAL)
        own = m0 + WHO * 64
        slot = tile % 2
        mbarrier.wait(q_full.index(slot), tile // 2 & 1)
        end = last * 0
        if own < lq:
            end = key_blocks(gl.minimum(own + 64, lq), h, shift, 64, CAUSAL)
        step = pass_over(last - end, step, k_full, k_empty, v_full, v_empty, STAGES, False)
        if own < lq:
            p_min = gl.minimum(own + shift, h)
            q_tile = q_slots.index(2 * slot + WHO)
            act_id = 0
            if act_ids is not None:
                act_id = gl.load(act_ids + head)
            i = own + gl.arange(0, 64, layout=row_layout)
            p = gl.minimum(i + shift, h)
            straight = (own + 63 + shift <= h).to(gl.int32)
            pairs_p = pairs + head.to(gl.int64) * (2 * stride_p)
            table_t = time + head.to(gl.int64) * stride_t
            entry = i * 0.0
            if LANES:
                entry = lane_entry(table_t, edges, row_layout) / scale
            m_i = gl.full([64], float("-inf"), gl.float32, row_layout)
            l_i = gl.full([64], 0.0, gl.float32, row_layout)
            acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            units = codes_of(codes, table, item, H, WHO)
            if end > 0:
                code = load_codes(units + (end - 1) * UNIT, s_layout)
                s = _biased_scores(
                    code, q_tile, k_slots, k_full, step, (end - 1) * 64, p, straight, pairs_p, table_t, entry, radius,
                    1 / scale, STAGES, LANES, True,
                )  # fmt: skip
                for x in range(end - 1):
                    n0 = (end - 1 - x) * 64
                    s, m_i, l_i, acc, step = _add_tile(
                        s, m_i, l_i, acc, k_slots, v_slots, q_empty, k_full, k_empty, v_full, v_empty, step, n0, p, p_min, h, scale, act_id,
                        q_tile, q_full, tile, units + (n0 // 64 - 1) * UNIT, n0 - 64, p, straight, pairs_p, table_t, entry, radius, 0,
                        SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, STAGES, LANES, True, 1,
                    )  # fmt: skip
                _s, m_i, l_i, acc, step = _add_tile(
                    s, m_i, l_i, acc, k_slots, v_slots, q_empty, k_full, k_empty, v_full, v_empty, step, end * 0, p, p_min, h, scale,
                    act_id, q_tile, q_full, tile, units, 0, p, straight, pairs_p, table_t, entry, radius, 0,
                    SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, STAGES, LANES, True, 0,
                )  # fmt: skip
            mbarrier.arrive(q_empty.index(slot), count=1)
            _store_item(
                acc, m_i, l_i, out, lse, o_buffer.index(WHO), own_scores, own_v, row, lq, k_row, h, t, own, i, head, act_id, rows,
                scale, out_scale, stride_vn, stride_vh, GROUP, SOFTMAX, ACT, ACT_SET, FAST, FOLDED,
            )  # fmt: skip
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
    STAGES: gl.constexpr, LANES: gl.constexpr, CHAIN: gl.constexpr, FETCH: gl.constexpr, num_warps: gl.constexpr,
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
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    o_buffer = gl.allocate_shared_memory(dtype, [2, 64, D], tile)
    q_full, q_empty = make_barriers(2, 1), make_barriers(2, 2)
    k_full, k_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    v_full, v_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _chain if CHAIN else _by_items,
                (
                    out_box, lse, table, total, q_slots, k_slots, v_slots, o_buffer,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    pairs, time, codes, own_scores, own_v,
                    act_ids, rows, radius, edges, scale, out_scale, stride_p, stride_t, stride_vn, stride_vh,
                    0, H, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, STAGES, LANES, FETCH,
                ),
            ),
            (
                _chain if CHAIN else _by_items,
                (
                    out_box, lse, table, total, q_slots, k_slots, v_slots, o_buffer,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    pairs, time, codes, own_scores, own_v,
                    act_ids, rows, radius, edges, scale, out_scale, stride_p, stride_t, stride_vn, stride_vh,
                    1, H, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, STAGES, LANES, FETCH,
                ),
            ),
            (
                _producer,
                (
                    q, k, v, table, codes, total, q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                    H, GROUP, D, CAUSAL, STAGES, CHAIN, FETCH,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
