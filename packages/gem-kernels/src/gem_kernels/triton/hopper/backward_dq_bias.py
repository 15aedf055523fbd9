"""Backward pass on Hopper with relative bias and candidates, query side: dQ, delta, and the gradients of the bias tables.

See `backward_dq` and `forward_bias` for what is alike, and `gem_kernels.triton.attention.backward_bias` for the rows that the tables'
gradients are added to: of a program, one for each of four summing warps, and one for each consumer's candidates.

    consumers   S | dP | dS -> shared memory | dQ += dS K, meanwhile bias of the next tile | ...
    summer                       dS of consumer 0: bins, diagonals | dS of consumer 1 | ...

A summing thread adds dS to bins of its own in shared memory, ``[T, threads]``, which it gives to its warp's row at the program's end; T is
at most 32. The dialect has no such addressing: the bins are declared in PTX. With AHEAD S of the next tile is multiplied beside dQ. SAME:
queries and keys are the same rows at the same times, so that all candidates' own pairs are 0 apart.
"""

# ruff: noqa: SIM102, SIM113 - a constexpr condition stands alone, so that what it guards is not compiled when it is false;
# the compiler knows no enumerate

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.attention.bias import count_edges, own_bucket
from gem_kernels.triton.hopper.bias_codes import (
    UNIT,
    add_to_bins,
    biased_rows,
    codes_of,
    give,
    key_blocks,
    lane_entry,
    load_codes,
    prefetch_codes,
    prefetch_entry,
    read_entry,
    take,
)
from gem_kernels.triton.hopper.common import (
    alive,
    fill_rows,
    folded_value_and_slope,
    load_box,
    make_barriers,
    pass_over,
    prefetch_rows,
    store_box,
)

LOG2E = gl.constexpr(1.4426950408889634)
_THREADS = gl.constexpr(128)
# The first of the summing warps.
_FIRST = gl.constexpr(8)


@gluon.jit
def _declare_bins(x):
    """Address in shared memory of 32 bins for each of the summing warps' threads, less that of thread 0."""
    asm: gl.constexpr = ".shared .align 16 .b8 gem_bins[16384];\nmov.u32 $0, gem_bins;\nsub.u32 $0, $0, 1024;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _declare_given(x, WIDE: gl.constexpr):
    """Address in shared memory of a tile's dS of each consumer."""
    if WIDE:
        asm: gl.constexpr = ".shared .align 16 .b8 gem_given[32768];\nmov.u32 $0, gem_given;"
    else:
        asm: gl.constexpr = ".shared .align 16 .b8 gem_given[16384];\nmov.u32 $0, gem_given;"
    return gl.inline_asm_elementwise(asm, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _own_bins(bins):
    """The thread's, of consumers' threads ``[128]``."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    asm: gl.constexpr = "{ .reg .b32 t; mov.u32 t, %tid.x; mad.lo.u32 $0, t, 4, $1; }"
    return gl.inline_asm_elementwise(
        asm, "=r,r", [gl.full([128], bins, gl.int32, layout)], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _clear_bins(bins, buckets):
    own = _own_bins(bins)
    for b in range(buckets):
        asm: gl.constexpr = "{ .reg .b32 z; mov.b32 z, 0; st.shared.b32 [$1], z; mov.b32 $0, 0; }"
        gl.inline_asm_elementwise(asm, "=r,r", [own + b * (4 * _THREADS)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _give_bins(bins, buckets, rows, width):
    """Add the bins of each warp's threads to its row."""
    own = _own_bins(bins)
    for b in range(buckets):
        asm: gl.constexpr = """
            {
            .reg .b32 t, r;
            .reg .b64 a;
            .reg .f32 v, w;
            .reg .pred p;
            ld.shared.f32 v, [$1];
            shfl.sync.bfly.b32 w, v, 1, 31, 0xffffffff;
            add.f32 v, v, w;
            shfl.sync.bfly.b32 w, v, 2, 31, 0xffffffff;
            add.f32 v, v, w;
            shfl.sync.bfly.b32 w, v, 4, 31, 0xffffffff;
            add.f32 v, v, w;
            shfl.sync.bfly.b32 w, v, 8, 31, 0xffffffff;
            add.f32 v, v, w;
            shfl.sync.bfly.b32 w, v, 16, 31, 0xffffffff;
            add.f32 v, v, w;
            mov.u32 t, %tid.x;
            shr.u32 r, t, 5;
            mul.lo.u32 r, r, $3;
            mad.wide.u32 a, r, 4, $2;
            and.b32 t, t, 31;
            setp.eq.u32 p, t, 0;
            @p red.relaxed.gpu.global.add.f32 [a], v;
            mov.b32 $0, 0;
            }
            """
        gl.inline_asm_elementwise(
            asm, "=r,r,l,r", [own + b * (4 * _THREADS), (rows + b).to(gl.int64), width], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _producer(
    q, k, v, dout, out, table, codes, total, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    stride_on, stride_oh,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % H
        row, lq, k_row, h, m0, shift, _t = read_entry(table, item, total, H)
        last = key_blocks(gl.minimum(m0 + 128, lq), h, shift, 64, CAUSAL)
        slot = tile % HELD
        if SOFTMAX and FETCH:
            prefetch_rows(out, row, lq, m0, stride_on, head.to(gl.int64) * stride_oh, 128, D)
        mbarrier.wait(q_empty.index(slot), (tile // HELD & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), 4 * 128 * D)
        for half in gl.static_range(2):
            at = m0 + half * 64
            load_box(q, row, lq, at, head * D, q_full.index(slot), q_slots.index(2 * slot + half), 64, D)
            load_box(dout, row, lq, at, head * D, q_full.index(slot), do_slots.index(2 * slot + half), 64, D)
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


@gluon.jit
def _storer(dq, table, total, q_slots, q_empty, done, H: gl.constexpr, D: gl.constexpr, HELD: gl.constexpr):
    tile = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        row, lq, _k_row, _h, m0, _shift, _t = read_entry(table, item, total, H)
        slot = tile % HELD
        mbarrier.wait(done.index(slot), tile // HELD & 1)
        for half in gl.static_range(2):
            store_box(dq, row, lq, m0 + half * 64, item % H * D, q_slots.index(2 * slot + half), 64, D)
        tma.store_wait(0)
        mbarrier.arrive(q_empty.index(slot), count=1)
        tile += 1


@gluon.jit
def _biased_scores(
    code, q_tile, k_slots, k_full, step, n0, p, straight, pairs_p, table_t, entry, radius, gain,
    STAGES: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """S of the tile of a step under way, added to the bias."""
    s = biased_rows(code, p, n0, straight, pairs_p, radius, table_t, entry, gain, LANES, True)
    stage = step % STAGES
    mbarrier.wait(k_full.index(stage), step // STAGES & 1)
    return warpgroup_mma(q_tile, k_slots.index(stage).permute((1, 0)), s, is_async=True)


@gluon.jit
def _row_sums(o_rows, do_tile, lse_i, delta, i, lq, delta_scale, wide: gl.constexpr):
    """lse in powers of two, and delta, which is stored."""
    sums = gl.sum(o_rows.to(gl.float32) * do_tile.load(wide).to(gl.float32), 1)
    delta_i = gl.convert_layout(sums, i.type.layout) * delta_scale
    gl.store(delta + i, delta_i, i < lq)
    # A row that sees no key must give P = 2^(S - inf) = 0.
    return gl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E), delta_i


@gluon.jit
def _sum_tables(
    ds, code, n0, own, i, m1, lq, h, shift, t, warp_distance, bins, radius, take_own,
    DIAGONALS: gl.constexpr, COLUMNS: gl.constexpr, SUMS_TYPES: gl.constexpr, BOTH: gl.constexpr, BOTH_TYPES: gl.constexpr,
):  # fmt: skip
    """Add a tile's dS to the gradients of the tables."""
    to = (warp_distance + radius + gl.minimum(gl.maximum(n0 - own - shift, 1 - radius - 64), radius + 63)).to(gl.int64)
    if take_own is None or m1 <= lq - t:
        gl.inline_asm_elementwise(BOTH, BOTH_TYPES, [ds, code, bins, to], dtype=gl.int8, is_pure=False, pack=32)
    else:
        add_to_bins(ds, code, bins)
        history = (i < lq - t)[:, None]
        past = (warp_distance + radius + gl.maximum(n0 - h, -radius - 64)).to(gl.int64)
        gl.inline_asm_elementwise(COLUMNS, SUMS_TYPES, [gl.where(history, 0.0, ds), past], dtype=gl.int8, is_pure=False, pack=32)
        gl.inline_asm_elementwise(DIAGONALS, SUMS_TYPES, [gl.where(history, ds, 0.0), to], dtype=gl.int8, is_pure=False, pack=32)


@gluon.jit
def _add_tile(
    s, acc, units, q_slots, do_slots, held, k_slots, v_slots, k_full, k_empty, v_full, v_empty, given, ds_full, ds_empty, step, count, n0,
    p, p_min, straight, h, pairs_p, table_t, entry, act_id, lse_i, delta_i, radius, scale,
    SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, AHEAD: gl.constexpr, LANES: gl.constexpr, NEXT: gl.constexpr,
):  # fmt: skip
    """dQ with a tile of keys added, and dS given to the summing warps. The bias of the next tile is looked up while dQ is multiplied; with
    AHEAD its S is under way then."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, acc.shape[1], 16])
    stage = step % STAGES
    phase = step // STAGES & 1
    # In each step anew: descriptors of these tiles would be kept for all steps, on the stack.
    held = alive(held)
    q_tile = q_slots.index(held)
    do_tile = do_slots.index(held)
    if NEXT:
        code = load_codes(units + gl.maximum(n0 // 64 - 1, 0) * UNIT, s_layout)
    if AHEAD:
        s = warpgroup_mma_wait(0, deps=(s,))
    else:
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(q_tile, k_slots.index(stage).permute((1, 0)), s, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    dp = gl.full([64, 64], 0.0, gl.float32, s_layout)
    dp = warpgroup_mma(do_tile, v_slots.index(stage).permute((1, 0)), dp, use_acc=False, is_async=True)
    if not AHEAD:
        s = warpgroup_mma_wait(1, deps=(s,))
    j = n0 + gl.arange(0, 64, layout=gl.SliceLayout(0, s_layout))
    if SOFTMAX:
        slope = gl.exp2(s * (scale * LOG2E) - lse_i[:, None])
    elif FOLDED:
        _value, slope = folded_value_and_slope(s, scale, FOLDED)
    else:
        _value, slope = activate_with_slope(s * scale, act_id, ACT, ACT_SET, FAST)
    masked = n0 + 64 > h
    if CAUSAL:
        masked = n0 + 64 > gl.minimum(h, p_min + 1)
    if masked:
        seen = (j < h)[None, :] & (p[:, None] >= (j[None, :] if CAUSAL else p[:, None]))
        slope = gl.where(seen, slope, 0.0)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    ds = slope * (dp - delta_i[:, None]) if SOFTMAX else slope * dp
    ds16 = gl.convert_layout(ds.to(k_slots.dtype), gl.DotOperandLayout(0, o_layout, 2), assert_trivial=True)
    acc = warpgroup_mma(ds16, k_slots.index(stage), acc, is_async=True)
    mbarrier.wait(ds_empty, (count & 1) ^ 1)
    # Softmax: a row's dS add up to 0, so that sums of what has been rounded would be mostly rounding.
    give(ds, given, SOFTMAX)
    mbarrier.arrive(ds_full, count=1)
    if NEXT:
        if AHEAD:
            s = _biased_scores(
                code, q_tile, k_slots, k_full, step + 1, n0 - 64, p, straight, pairs_p, table_t, entry, radius, 1 / scale,
                STAGES, LANES,
            )  # fmt: skip
            acc = warpgroup_mma_wait(1, deps=(acc,))
        else:
            s = biased_rows(code, p, n0 - 64, straight, pairs_p, radius, table_t, entry, 1 / scale, LANES, True)
            # A border that the look-ups are not moved across.
            mbarrier.wait(k_full.index(stage), phase)
            acc, s = warpgroup_mma_wait(0, deps=(acc, s))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    return s, acc


@gluon.jit
def _summer(
    table, codes, total, given, ds_full, ds_empty, partial, bins, radius, edges, width, own_scores,
    H: gl.constexpr, SOFTMAX: gl.constexpr, CAUSAL: gl.constexpr, PAD: gl.constexpr,
    DIAGONALS: gl.constexpr, COLUMNS: gl.constexpr, SUMS_TYPES: gl.constexpr, BOTH: gl.constexpr, BOTH_TYPES: gl.constexpr,
):  # fmt: skip
    """Adds the consumers' dS to the gradients of the tables."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    first: gl.constexpr = _FIRST
    warp_distance = partial + gl.program_id(0).to(gl.int64) * 6 * width + PAD - first * width
    warp_bucket = warp_distance + 2 * radius + 1 + PAD
    count_0 = 0
    count_1 = 0
    _clear_bins(bins, 32)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        _row, lq, _k_row, h, m0, shift, t = read_entry(table, item, total, H)
        last = key_blocks(gl.minimum(m0 + 128, lq), h, shift, 64, CAUSAL)
        end_0 = key_blocks(gl.minimum(m0 + 64, lq), h, shift, 64, CAUSAL)
        end_1 = gl.where(m0 + 64 < lq, last, 0)
        units = codes_of(codes, table, item, H, 0)
        for y in range(2 * last):
            x = last - 1 - y // 2
            who = y % 2
            if x < gl.where(who == 0, end_0, end_1):
                own = m0 + who * 64
                code = load_codes(units + x * UNIT + who * (UNIT // 2), s_layout)
                count = gl.where(who == 0, count_0, count_1)
                mbarrier.wait(ds_full.index(who), count & 1)
                ds = take(given + who * (16384 if SOFTMAX else 8192), SOFTMAX, s_layout)
                mbarrier.arrive(ds_empty.index(who), count=1)
                i = own + gl.arange(0, 64, layout=row_layout)
                m1 = gl.minimum(own + 64, lq)
                _sum_tables(
                    ds, code, x * 64, own, i, m1, lq, h, shift, t, warp_distance, bins, radius, own_scores,
                    DIAGONALS, COLUMNS, SUMS_TYPES, BOTH, BOTH_TYPES,
                )  # fmt: skip
                count_0 += 1 - who
                count_1 += who
    _give_bins(bins, edges + 1, warp_bucket, width)


@gluon.jit
def _consumer(
    out, lse, delta, table, total, q_slots, do_slots, k_slots, v_slots,
    q_full, done, k_full, k_empty, v_full, v_empty, given, ds_full, ds_empty,
    pairs, time, codes, time_edges, q_times, k_times, ds_own, own_k, partial,
    act_ids, bins, rows, radius, edges, width, scale, ds_scale, own_scale, delta_scale,
    stride_on, stride_oh, stride_p, stride_t, stride_kn, stride_kh,
    WHO: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr,
    ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, SAME: gl.constexpr,
    TIME_STEPS: gl.constexpr, PAD: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, AHEAD: gl.constexpr,
    LANES: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_slots.dtype
    step = 0
    tile = 0
    head = gl.program_id(0) % H
    pairs_p = pairs + head.to(gl.int64) * (2 * stride_p)
    table_t = time + head.to(gl.int64) * stride_t
    own_distance = partial + (gl.program_id(0).to(gl.int64) * 6 + 4 + WHO) * width + PAD + radius
    own_buckets = own_distance + radius + 1 + PAD
    own_sum = gl.full([64], 0.0, gl.float32, row_layout)
    count = 0
    entry = lane_entry(table_t, edges, row_layout) / scale
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        row, lq, k_row, h, m0, shift, t = read_entry(table, item, total, H)
        if FETCH:
            prefetch_entry(table, item + gl.num_programs(0), total, H)
        last = key_blocks(gl.minimum(m0 + 128, lq), h, shift, 64, CAUSAL)
        own = m0 + WHO * 64
        slot = tile % HELD
        end = last * 0
        if own < lq:
            end = key_blocks(gl.minimum(own + 64, lq), h, shift, 64, CAUSAL)
        step = pass_over(last - end, step, k_full, k_empty, v_full, v_empty, STAGES, False)
        if own < lq:
            m1 = gl.minimum(own + 64, lq)
            p_min = gl.minimum(own + shift, h)
            q_tile = q_slots.index(2 * slot + WHO)
            do_tile = do_slots.index(2 * slot + WHO)
            act_id = 0
            if act_ids is not None:
                act_id = gl.load(act_ids + head)
            i = own + gl.arange(0, 64, layout=row_layout)
            p = gl.minimum(i + shift, h)
            straight = (own + 63 + shift <= h).to(gl.int32)
            units = codes_of(codes, table, item, H, WHO)
            lse_i = 0.0
            o_rows = 0.0
            delta_i = 0.0
            at_row = head.to(gl.int64) * rows + row
            if SOFTMAX:
                r = own + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
                c = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
                at = out + (row + r).to(gl.int64)[:, None] * stride_on + head.to(gl.int64) * stride_oh + c[None, :]
                o_rows = gl.load(at, (r < lq)[:, None], 0.0)
                lse_i = gl.load(lse + at_row + i, i < lq, float("-inf"))
            acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            if end > 0:
                code = load_codes(units + (end - 1) * UNIT, s_layout)
                if AHEAD:
                    mbarrier.wait(q_full.index(slot), tile // HELD & 1)
                    s = _biased_scores(
                        code, q_tile, k_slots, k_full, step, (end - 1) * 64, p, straight, pairs_p, table_t, entry, radius,
                        1 / scale, STAGES, LANES,
                    )  # fmt: skip
                else:
                    s = biased_rows(code, p, (end - 1) * 64, straight, pairs_p, radius, table_t, entry, 1 / scale, LANES, True)
                    mbarrier.wait(q_full.index(slot), tile // HELD & 1)
                lse_x = lse_i
                delta_x = delta_i
                if SOFTMAX:
                    lse_x, delta_x = _row_sums(o_rows, do_tile, lse_i, delta + at_row, i, lq, delta_scale, wide)
                for x in range(end - 1 if AHEAD else end):
                    s, acc = _add_tile(
                        s, acc, units, q_slots, do_slots, 2 * slot + WHO, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
                        given + WHO * (16384 if SOFTMAX else 8192), ds_full.index(WHO), ds_empty.index(WHO), step, count,
                        (end - 1 - x) * 64, p, p_min, straight, h, pairs_p, table_t, entry, act_id, lse_x, delta_x, radius, scale,
                        SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, STAGES, AHEAD, LANES, True,
                    )  # fmt: skip
                    step += 1
                    count += 1
                if AHEAD:
                    _s, acc = _add_tile(
                        s, acc, units, q_slots, do_slots, 2 * slot + WHO, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
                        given + WHO * (16384 if SOFTMAX else 8192), ds_full.index(WHO), ds_empty.index(WHO), step, count, end * 0,
                        p, p_min, straight, h, pairs_p, table_t, entry, act_id, lse_x, delta_x, radius, scale,
                        SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, STAGES, AHEAD, LANES, False,
                    )  # fmt: skip
                    step += 1
                    count += 1
            else:
                mbarrier.wait(q_full.index(slot), tile // HELD & 1)
                if SOFTMAX:
                    _row_sums(o_rows, do_tile, lse_i, delta + at_row, i, lq, delta_scale, wide)
            if ds_own is not None:
                if m1 > lq - t:
                    candidate = (i >= lq - t) & (i < lq)
                    own_row = k_row + h - (lq - t)
                    ds_i = gl.load(ds_own + head.to(gl.int64) * rows + row + i, candidate, 0.0) * own_scale
                    if SAME:
                        own_sum += ds_i
                    else:
                        gl.atomic_add(own_distance, gl.sum(ds_i, 0), sem="relaxed")
                        bucket = own_bucket(own_row, row, i, candidate, time_edges, q_times, k_times, edges, TIME_STEPS, False)
                        lowest = gl.min(gl.where(candidate, bucket, 1 << 30), 0)
                        for b in range(lowest, gl.max(gl.where(candidate, bucket, -1), 0) + 1):
                            gl.atomic_add(own_buckets + b, gl.sum(gl.where(bucket == b, ds_i, 0.0), 0), sem="relaxed")
                    ro = own + gl.arange(0, 64, layout=o_row_layout)
                    co = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
                    at_k = own_k + (own_row + ro).to(gl.int64)[:, None] * stride_kn + head // GROUP * stride_kh + co[None, :]
                    k_own = gl.load(at_k, ((ro >= lq - t) & (ro < lq))[:, None], 0.0)
                    acc += gl.convert_layout(ds_i, o_row_layout, assert_trivial=True)[:, None] * k_own.to(gl.float32)
            q_tile.store((acc * ds_scale).to(dtype))
            fence_async_shared()
        else:
            # No row of this half belongs to the sample.
            mbarrier.wait(q_full.index(slot), tile // HELD & 1)
        mbarrier.arrive(done.index(slot), count=1)
        tile += 1
    if ds_own is not None:
        if SAME:
            found = gl.sum(own_sum, 0)
            gl.atomic_add(own_distance, found, sem="relaxed")
            gl.atomic_add(own_buckets + count_edges((edges * 0).to(gl.int64), time_edges, edges, TIME_STEPS), found, sem="relaxed")


@gluon.jit(do_not_specialize=["batch", "rows", "radius", "edges", "width"])
def hopper_bias_dq_kernel(
    q, k, v, dout, dq_box, dq, out, lse, delta, table, tile_count, q_offsets,
    pairs, time, codes, time_edges, q_times, k_times, ds_own, own_k, partial, act_ids,
    batch, rows, radius, edges, width, scale, ds_scale, own_scale, delta_scale,
    stride_on, stride_oh, stride_dq, stride_p, stride_t, stride_kn, stride_kh,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, SAME: gl.constexpr, TIME_STEPS: gl.constexpr, PAD: gl.constexpr,
    DIAGONALS: gl.constexpr, COLUMNS: gl.constexpr, SUMS_TYPES: gl.constexpr, BOTH: gl.constexpr, BOTH_TYPES: gl.constexpr,
    STAGES: gl.constexpr, HELD: gl.constexpr, AHEAD: gl.constexpr, LANES: gl.constexpr,
    FETCH: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    fill_rows(dq, gl.load(q_offsets + batch).to(gl.int64), rows.to(gl.int64), stride_dq, 0.0, H * D, num_warps)
    total = gl.load(tile_count) * H
    bins = _declare_bins(total)
    given = _declare_given(total, SOFTMAX)
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    q_slots = gl.allocate_shared_memory(dtype, [2 * HELD, 64, D], tile)
    do_slots = gl.allocate_shared_memory(dtype, [2 * HELD, 64, D], tile)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, 64, D], tile)
    q_full, q_empty, done = make_barriers(HELD, 1), make_barriers(HELD, 1), make_barriers(HELD, 2)
    k_full, k_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    v_full, v_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    ds_full, ds_empty = make_barriers(2, 1), make_barriers(2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    out, lse, delta, table, total, q_slots, do_slots, k_slots, v_slots,
                    q_full, done, k_full, k_empty, v_full, v_empty, given, ds_full, ds_empty,
                    pairs, time, codes, time_edges, q_times, k_times, ds_own, own_k, partial,
                    act_ids, bins, rows, radius, edges, width, scale, ds_scale, own_scale, delta_scale,
                    stride_on, stride_oh, stride_p, stride_t, stride_kn, stride_kh,
                    0, H, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, SAME, TIME_STEPS, PAD,
                    STAGES, HELD, AHEAD, LANES, FETCH,
                ),
            ),
            (
                _consumer,
                (
                    out, lse, delta, table, total, q_slots, do_slots, k_slots, v_slots,
                    q_full, done, k_full, k_empty, v_full, v_empty, given, ds_full, ds_empty,
                    pairs, time, codes, time_edges, q_times, k_times, ds_own, own_k, partial,
                    act_ids, bins, rows, radius, edges, width, scale, ds_scale, own_scale, delta_scale,
                    stride_on, stride_oh, stride_p, stride_t, stride_kn, stride_kh,
                    1, H, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, SAME, TIME_STEPS, PAD,
                    STAGES, HELD, AHEAD, LANES, FETCH,
                ),
            ),
            (
                _summer,
                (
                    table, codes, total, given, ds_full, ds_empty, partial, bins, radius, edges, width, ds_own,
                    H, SOFTMAX, CAUSAL, PAD, DIAGONALS, COLUMNS, SUMS_TYPES, BOTH, BOTH_TYPES,
                ),
            ),
            (
                _producer,
                (
                    q, k, v, dout, out, table, codes, total, q_slots, do_slots, k_slots, v_slots,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, stride_on, stride_oh,
                    H, GROUP, D, SOFTMAX, CAUSAL, STAGES, HELD, FETCH,
                ),
            ),
            (_storer, (dq_box, table, total, q_slots, q_empty, done, H, D, HELD)),
        ],
        [4, 4, 1, 1],
        [192, 88, 40, 40],
    )  # fmt: skip
