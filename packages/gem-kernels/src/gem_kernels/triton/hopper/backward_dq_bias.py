"""Backward pass on Hopper with relative bias and candidates, query side: dQ, delta, and the gradients of the bias tables.

See `backward_dq` and `forward_bias` for what is alike, and `gem_kernels.triton.attention.backward_bias` for the rows that the tables'
gradients are added to: of a program, one for each of the consumers' eight warps, and one for each consumer's candidates.

BINS: in tiles with many buckets a thread adds each dS to bins of its own in shared memory, ``[T, threads]``, which it gives to its warp's
row at the program's end. The dialect has no such addressing: the bins are declared in PTX. LATE: dP is multiplied once the bias is there.
"""

# ruff: noqa: SIM102, SIM113 - a constexpr condition stands alone, so that what it guards is not compiled when it is false;
# the compiler knows no enumerate

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.attention.backward_bias import add_from_edges, add_from_far_edges
from gem_kernels.triton.attention.bias import add_buckets, add_far, add_position, add_strip, own_bucket
from gem_kernels.triton.attention.bias_tables import CELLS, FIRST_CELL
from gem_kernels.triton.hopper.common import alive, fill_rows, folded_value_and_slope, load_box, make_barriers, store_box
from gem_kernels.triton.hopper.forward_bias import clock, key_blocks, read_entry, read_number

LOG2E = gl.constexpr(1.4426950408889634)
# Buckets of a tile from which on bins are cheaper than a sum for each edge.
_MANY = gl.constexpr(6)
_THREADS = gl.constexpr(256)


@gluon.jit
def _declare_bins(x):
    """Address in shared memory of 32 bins for each of 256 threads."""
    asm: gl.constexpr = ".shared .align 16 .b8 gem_bins[32768];\nmov.u32 $0, gem_bins;"
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
def _add_to_bins(ds, tq, tk, cell_edges, cell_buckets, bins):
    first: gl.constexpr = FIRST_CELL
    asm: gl.constexpr = """
        {
        .reg .b32 d, c, e, t;
        .reg .b64 a, o;
        .reg .f32 f, v;
        .reg .pred p;
        sub.s32 d, $2, $3;
        abs.s32 d, d;
        cvt.rn.f32.s32 f, d;
        max.f32 f, f, 0f3F000000;
        mov.b32 c, f;
        shr.u32 c, c, 17;
        and.b32 c, c, 0xFFFFFFFC;
        cvt.u64.u32 o, c;
        add.s64 a, o, $4;
        ld.global.nc.b32 e, [a];
        setp.ge.s32 p, d, e;
        @p add.s32 c, c, 4;
        cvt.u64.u32 o, c;
        add.s64 a, o, $5;
        ld.global.nc.b32 e, [a];
        mov.u32 t, %tid.x;
        mad.lo.u32 t, t, 4, $6;
        mad.lo.u32 t, e, 1024, t;
        ld.shared.f32 v, [t];
        add.f32 v, v, $1;
        st.shared.f32 [t], v;
        mov.b32 $0, 0;
        }
        """
    gl.inline_asm_elementwise(
        asm, "=r,f,r,r,l,l,r",
        [ds, tq, tk, (cell_edges - first).to(gl.int64), (cell_buckets - first).to(gl.int64), bins],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
    q, k, v, dout, table, total, q_slots, do_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    step = 0
    tile = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % H
        row, lq, k_row, h, m0, shift, _t = read_entry(table, item, total, H)
        last = key_blocks(gl.minimum(m0 + 128, lq), h, shift, BLOCK_N, CAUSAL)
        slot = tile % HELD
        mbarrier.wait(q_empty.index(slot), (tile // HELD & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), 4 * 128 * D)
        for half in gl.static_range(2):
            at = m0 + half * 64
            load_box(q, row, lq, at, head * D, q_full.index(slot), q_slots.index(2 * slot + half), 64, D)
            load_box(dout, row, lq, at, head * D, q_full.index(slot), do_slots.index(2 * slot + half), 64, D)
        tile += 1
        for x in range(last):
            n0 = (last - 1 - x) * BLOCK_N
            stage = step % STAGES
            phase = (step // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), 2 * BLOCK_N * D)
            load_box(k, k_row, h, n0, head // GROUP * D, k_full.index(stage), k_slots.index(stage), BLOCK_N, D)
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), 2 * BLOCK_N * D)
            load_box(v, k_row, h, n0, head // GROUP * D, v_full.index(stage), v_slots.index(stage), BLOCK_N, D)
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
def _consumer(
    out, lse, delta, table, total, q_slots, do_slots, k_slots, v_slots, time_slots, bucket_slots,
    q_full, done, k_full, k_empty, v_full, v_empty,
    position, pairs, time, time_index, time_edges, q_times, k_times, q_relative, ds_own, own_k, partial,
    act_ids, bins, rows, radius, edges, width, scale, ds_scale, own_scale, delta_scale,
    stride_on, stride_oh, stride_p, stride_t, stride_kn, stride_kh,
    WHO: gl.constexpr, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr,
    ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, TIME_STEPS: gl.constexpr, PAD: gl.constexpr,
    DIAGONALS: gl.constexpr, COLUMNS: gl.constexpr, SUMS_TYPES: gl.constexpr, REACHING: gl.constexpr, REACHING_TYPES: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, BINS: gl.constexpr, LATE: gl.constexpr, STRIP: gl.constexpr,
    PLUS: gl.constexpr, PLUS_TYPES: gl.constexpr,
):  # fmt: skip
    PAIRS: gl.constexpr = BLOCK_N // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    column_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    o_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_slots.dtype
    step = 0
    tile = 0
    head = gl.program_id(0) % H
    table_p = position + head.to(gl.int64) * stride_p
    pairs_p = pairs + head.to(gl.int64) * (2 * stride_p)
    table_t = time + head.to(gl.int64) * stride_t
    warp_distance = partial + gl.program_id(0).to(gl.int64) * 10 * width + PAD
    warp_bucket = warp_distance + 2 * radius + 1 + PAD
    if BINS:
        _clear_bins(bins, edges + 1)
    row, lq, k_row, h, m0, shift, t = read_entry(table, gl.program_id(0), total, H)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        h = alive(h)
        n_row, n_lq, n_k_row, n_h, n_m0, n_shift, n_t = read_entry(table, item + gl.num_programs(0), total, H)
        last = key_blocks(gl.minimum(m0 + 128, lq), h, shift, BLOCK_N, CAUSAL)
        own = m0 + WHO * 64
        slot = tile % HELD
        end = last * 0
        if own < lq:
            end = key_blocks(gl.minimum(own + 64, lq), h, shift, BLOCK_N, CAUSAL)
        for _x in range(last - end):
            stage = step % STAGES
            mbarrier.wait(k_full.index(stage), step // STAGES & 1)
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.wait(v_full.index(stage), step // STAGES & 1)
            mbarrier.arrive(v_empty.index(stage), count=1)
            step += 1
        if own < lq:
            m1 = gl.minimum(own + 64, lq)
            p_min = gl.minimum(own + shift, h)
            p_max = gl.minimum(m1 - 1 + shift, h)
            q_tile = q_slots.index(2 * slot + WHO)
            do_tile = do_slots.index(2 * slot + WHO)
            act_id = 0
            if act_ids is not None:
                act_id = gl.load(act_ids + head)
            i = own + gl.arange(0, 64, layout=row_layout)
            p = gl.minimum(i + shift, h)
            tq = gl.load(q_relative + row + i, i < lq, 0)
            if SOFTMAX:
                r = own + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
                c = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
                at = out + (row + r).to(gl.int64)[:, None] * stride_on + head.to(gl.int64) * stride_oh + c[None, :]
                o_rows = gl.load(at, (r < lq)[:, None], 0.0)
                lse_i = gl.load(lse + head.to(gl.int64) * rows + row + i, i < lq, float("-inf"))
                mbarrier.wait(q_full.index(slot), tile // HELD & 1)
                sums = gl.sum(o_rows.to(gl.float32) * do_tile.load(wide).to(gl.float32), 1)
                delta_i = gl.convert_layout(sums, row_layout) * delta_scale
                gl.store(delta + head.to(gl.int64) * rows + row + i, delta_i, i < lq)
                # A row that sees no key must give P = 2^(S - inf) = 0.
                lse_i = gl.where(lse_i == float("-inf"), float("inf"), lse_i * LOG2E)
            else:
                lse_i = 0.0
                delta_i = 0.0
                mbarrier.wait(q_full.index(slot), tile // HELD & 1)
            acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            for x in range(end):
                n0 = (end - 1 - x) * BLOCK_N
                n1 = gl.minimum(n0 + BLOCK_N, h)
                stage = step % STAGES
                phase = step // STAGES & 1
                s = gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout)
                dp = s
                mbarrier.wait(k_full.index(stage), phase)
                s = warpgroup_mma(q_tile, k_slots.index(stage).permute((1, 0)), s, use_acc=False, is_async=True)
                if not LATE:
                    mbarrier.wait(v_full.index(stage), phase)
                    dp = warpgroup_mma(do_tile, v_slots.index(stage).permute((1, 0)), dp, use_acc=False, is_async=True)
                tk = time_slots.index(stage).load(column_layout)
                first = read_number(bucket_slots, 4 * stage + 2 * WHO)
                final = read_number(bucket_slots, 4 * stage + 2 * WHO + 1)
                j = n0 + gl.arange(0, BLOCK_N, layout=column_layout)
                if LATE:
                    s = warpgroup_mma_wait(0, deps=(s,))
                else:
                    s, dp = warpgroup_mma_wait(0, deps=(s, dp))
                    mbarrier.arrive(v_empty.index(stage), count=1)
                if STRIP:
                    s = add_strip(
                        s * scale, p[:, None], j[None, :], n0 - p_max, n1 - 1 - p_min, table_p, pairs_p, n0 - own - shift, m1 <= lq - t,
                        radius, PLUS, PLUS_TYPES, BLOCK_N // 2,
                    )  # fmt: skip
                else:
                    s = add_position(s * scale, p[:, None], j[None, :], n0 - p_max, n1 - 1 - p_min, table_p, radius, True)
                if first >= 0:
                    s = add_buckets(s, tq[:, None], tk[None, :], first, final, table_t, time_index, edges, True)
                else:
                    s = add_far(s, i[:, None], j[None, :], lq, h, row, k_row, table_t, time_edges, q_times, k_times, edges)
                if LATE:
                    mbarrier.wait(v_full.index(stage), phase)
                    dp = warpgroup_mma(do_tile, v_slots.index(stage).permute((1, 0)), dp, use_acc=False, is_async=True)
                if SOFTMAX:
                    slope = gl.exp2(s * LOG2E - lse_i[:, None])
                elif FOLDED:
                    _value, slope = folded_value_and_slope(s, 1.0, FOLDED)
                else:
                    _value, slope = activate_with_slope(s, act_id, ACT, ACT_SET, FAST)
                if LATE:
                    dp = warpgroup_mma_wait(0, deps=(dp,))
                    mbarrier.arrive(v_empty.index(stage), count=1)
                ds = slope * (dp - delta_i[:, None]) if SOFTMAX else slope * dp
                masked = n0 + BLOCK_N > h
                if CAUSAL:
                    masked = n0 + BLOCK_N > gl.minimum(h, p_min + 1)
                if masked:
                    seen = (j < h)[None, :] & (p[:, None] >= (j[None, :] if CAUSAL else p[:, None]))
                    ds = gl.where(seen, ds, 0.0)
                ds16 = gl.convert_layout(ds.to(dtype), gl.DotOperandLayout(0, o_layout, 2), assert_trivial=True)
                acc = warpgroup_mma(ds16, k_slots.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(k_empty.index(stage), count=1)
                past = ds
                if ds_own is not None:
                    if m1 > lq - t:
                        past = gl.where((i < lq - t)[:, None], ds, 0.0)
                        to = warp_distance + radius + gl.maximum(n0 - h, -radius - BLOCK_N)
                        gl.inline_asm_elementwise(
                            COLUMNS, SUMS_TYPES, [ds - past, to.to(gl.int64)], dtype=gl.int8, is_pure=False, pack=PAIRS
                        )
                diagonal = gl.minimum(gl.maximum(n0 - own - shift, 1 - radius - BLOCK_N), radius + 63)
                to = warp_distance + radius + diagonal
                gl.inline_asm_elementwise(DIAGONALS, SUMS_TYPES, [past, to.to(gl.int64)], dtype=gl.int8, is_pure=False, pack=PAIRS)
                if first >= 0:
                    few = True
                    if BINS:
                        few = (final - first < _MANY) | (gl.load(time_index + edges + CELLS) != 0)
                        if few == 0:
                            _add_to_bins(
                                ds, tq[:, None], tk[None, :], time_index + edges, time_index + edges + CELLS + 1, bins
                            )  # fmt: skip
                    if few:
                        difference = gl.abs(tq[:, None] - tk[None, :])
                        add_from_edges(ds, difference, first, final, warp_bucket, time_index, edges + 1, PAIRS, REACHING, REACHING_TYPES)
                else:
                    ti = gl.load(q_times + row + i, i < lq, 0).to(gl.int64)[:, None]
                    tj = gl.load(k_times + k_row + j, j < h, 0).to(gl.int64)[None, :]
                    add_from_far_edges(ds, ti, tj, warp_bucket, time_edges, edges, PAIRS, REACHING, REACHING_TYPES)
                step += 1
            if ds_own is not None:
                if m1 > lq - t:
                    candidate = (i >= lq - t) & (i < lq)
                    own_row = k_row + h - (lq - t)
                    ds_i = gl.load(ds_own + head.to(gl.int64) * rows + row + i, candidate, 0.0) * own_scale
                    by_distance = warp_distance + (8 + WHO) * width
                    gl.atomic_add(by_distance + radius, gl.sum(ds_i, 0), sem="relaxed")
                    bucket = own_bucket(own_row, row, i, candidate, time_edges, q_times, k_times, edges, TIME_STEPS, False)
                    lowest = gl.min(gl.where(candidate, bucket, 1 << 30), 0)
                    for b in range(lowest, gl.max(gl.where(candidate, bucket, -1), 0) + 1):
                        to = warp_bucket + (8 + WHO) * width + b
                        gl.atomic_add(to, gl.sum(gl.where(bucket == b, ds_i, 0.0), 0), sem="relaxed")
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
        row, lq, k_row, h, m0, shift, t = n_row, n_lq, n_k_row, n_h, n_m0, n_shift, n_t
    if BINS:
        _give_bins(bins, edges + 1, warp_bucket, width)


@gluon.jit(do_not_specialize=["batch", "rows", "radius", "edges", "width"])
def hopper_bias_dq_kernel(
    q, k, v, dout, dq_box, dq, out, lse, delta, table, tile_count, q_offsets,
    position, pairs, time, time_index, time_edges, q_times, k_times, q_relative, k_relative, ds_own, own_k, partial, act_ids,
    batch, rows, radius, edges, width, scale, ds_scale, own_scale, delta_scale,
    stride_on, stride_oh, stride_dq, stride_p, stride_t, stride_kn, stride_kh,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SOFTMAX: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr,
    FAST: gl.constexpr, FOLDED: gl.constexpr, CAUSAL: gl.constexpr, TIME_STEPS: gl.constexpr, PAD: gl.constexpr,
    DIAGONALS: gl.constexpr, COLUMNS: gl.constexpr, SUMS_TYPES: gl.constexpr, REACHING: gl.constexpr, REACHING_TYPES: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, BINS: gl.constexpr, LATE: gl.constexpr, STRIP: gl.constexpr,
    PLUS: gl.constexpr, PLUS_TYPES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    fill_rows(dq, gl.load(q_offsets + batch).to(gl.int64), rows.to(gl.int64), stride_dq, 0.0, H * D, num_warps)
    total = gl.load(tile_count) * H
    bins = total * 0
    if BINS:
        bins = _declare_bins(total)
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_slots = gl.allocate_shared_memory(dtype, [2 * HELD, 64, D], tile)
    do_slots = gl.allocate_shared_memory(dtype, [2 * HELD, 64, D], tile)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    time_slots = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N], flat)
    bucket_slots = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 1], flat)
    q_full, q_empty, done = make_barriers(HELD, 1), make_barriers(HELD, 1), make_barriers(HELD, 2)
    k_full, k_empty = make_barriers(STAGES, 2), make_barriers(STAGES, 2)
    v_full, v_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    out, lse, delta, table, total, q_slots, do_slots, k_slots, v_slots, time_slots, bucket_slots,
                    q_full, done, k_full, k_empty, v_full, v_empty,
                    position, pairs, time, time_index, time_edges, q_times, k_times, q_relative, ds_own, own_k, partial,
                    act_ids, bins, rows, radius, edges, width, scale, ds_scale, own_scale, delta_scale,
                    stride_on, stride_oh, stride_p, stride_t, stride_kn, stride_kh,
                    0, H, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, TIME_STEPS, PAD,
                    DIAGONALS, COLUMNS, SUMS_TYPES, REACHING, REACHING_TYPES, BLOCK_N, STAGES, HELD, BINS,
                    LATE, STRIP, PLUS, PLUS_TYPES,
                ),
            ),
            (
                _consumer,
                (
                    out, lse, delta, table, total, q_slots, do_slots, k_slots, v_slots, time_slots, bucket_slots,
                    q_full, done, k_full, k_empty, v_full, v_empty,
                    position, pairs, time, time_index, time_edges, q_times, k_times, q_relative, ds_own, own_k, partial,
                    act_ids, bins, rows, radius, edges, width, scale, ds_scale, own_scale, delta_scale,
                    stride_on, stride_oh, stride_p, stride_t, stride_kn, stride_kh,
                    1, H, GROUP, D, SOFTMAX, ACT, ACT_SET, FAST, FOLDED, CAUSAL, TIME_STEPS, PAD,
                    DIAGONALS, COLUMNS, SUMS_TYPES, REACHING, REACHING_TYPES, BLOCK_N, STAGES, HELD, BINS,
                    LATE, STRIP, PLUS, PLUS_TYPES,
                ),
            ),
            (
                _producer,
                (
                    q, k, v, dout, table, total, q_slots, do_slots, k_slots, v_slots,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, H, GROUP, D, CAUSAL, BLOCK_N, STAGES, HELD,
                ),
            ),
            (
                clock,
                (
                    table, total, time_slots, bucket_slots, q_relative, k_relative, time_index, edges, k_full, k_empty,
                    H, CAUSAL, BLOCK_N, STAGES, TIME_STEPS,
                ),
            ),
            (_storer, (dq_box, table, total, q_slots, q_empty, done, H, D, HELD)),
        ],
        [4, 1, 1, 1],
        [232, 40, 40, 40],
    )  # fmt: skip
