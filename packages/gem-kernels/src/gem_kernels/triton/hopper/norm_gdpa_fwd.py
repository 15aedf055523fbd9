"""Forward pass of `norm_gdpa` on Hopper in one kernel: l = LN(q), o = gdpa(l, k, v) + l, out = RMSNorm(o) + q.

A program has whole rows on the chip, all heads of them: two warpgroups own 64 rows each of a tile of 128. K and V of one head after the
other pass through a ring that both share.

    rows of q ─► mean, rstd ─► l, in the slots of q
    a head:      S = l Kᵀ, P = act(S), o = P V + l, in the slot of l; Σ o² stays in registers
    at the end:  out = o · r₂ + q, with q read once more from the L2 cache; a head's slot goes back to the producer as soon as it is done
"""

# ruff: noqa: SIM113 - the compiler knows no enumerate

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate
from gem_kernels.triton.hopper.common import alive, fill_flat, folded_value, load_box, make_barriers, read_tile
from gem_kernels.triton.hopper.prefetch import prefetch_rows


@gluon.jit
def _producer(
    q, k, v, ahead, table, total, rows, q_slots, kv_slots, q_full, q_empty, kv_full, kv_empty,
    H: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    count = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        row, lq, k_row, lk, m0 = read_tile(table, item, total, 1)
        for head in range(H):
            for who in gl.static_range(2):
                slot = who * H + head
                mbarrier.wait(q_empty.index(slot), (count & 1) ^ 1)
                if head == 0:
                    mbarrier.expect(q_full.index(who), 2 * 64 * H * D)
                load_box(q, row, lq, m0 + who * 64, head * D, q_full.index(who), q_slots.index(slot), 64, D)
        count += 1
        n_row, _n_lq, _n_k_row, _n_lk, n_m0 = read_tile(table, item + gl.num_programs(0), total, 1)
        prefetch_rows(ahead, n_row + n_m0, rows, 64, H * D)
        prefetch_rows(ahead, n_row + n_m0 + 64, rows, 64, H * D)
        for head in range(H):
            for x in range((lk + BLOCK_N - 1) // BLOCK_N):
                for part in gl.static_range(2):
                    stage = step % STAGES
                    mbarrier.wait(kv_empty.index(stage), (step // STAGES & 1) ^ 1)
                    mbarrier.expect(kv_full.index(stage), 2 * BLOCK_N * D)
                    if part == 0:
                        load_box(k, k_row, lk, x * BLOCK_N, head * D, kv_full.index(stage), kv_slots.index(stage), BLOCK_N, D)
                    else:
                        load_box(v, k_row, lk, x * BLOCK_N, head * D, kv_full.index(stage), kv_slots.index(stage), BLOCK_N, D)
                    step += 1


@gluon.jit
def _consumer(
    q, out, mean, rstd, out_rstd, table, total, q_slots, kv_slots, q_full, q_empty, kv_full, kv_empty,
    act_ids, scale, out_scale, eps, stride_q,
    WHO: gl.constexpr, H: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr,
    FOLDED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    down: gl.constexpr = gl.SliceLayout(1, flat)
    dtype: gl.constexpr = q_slots.dtype
    width: gl.constexpr = H * D
    c = gl.arange(0, D, layout=gl.SliceLayout(0, flat))
    step = 0
    count = 0
    row, lq, _k_row, lk, m0 = read_tile(table, gl.program_id(0), total, 1)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        lk = alive(lk)
        n_row, n_lq, _n_k_row, n_lk, n_m0 = read_tile(table, item + gl.num_programs(0), total, 1)
        own = m0 + WHO * 64
        blocks = (lk + BLOCK_N - 1) // BLOCK_N
        mbarrier.wait(q_full.index(WHO), count & 1)
        if own < lq:
            i = own + gl.arange(0, 64, layout=down)
            sums = gl.full([64, D], 0.0, gl.float32, flat)
            for head in gl.static_range(H):
                sums += q_slots.index(WHO * H + head).load(flat).to(gl.float32)
            mu = gl.sum(sums, 1) / width
            squares = gl.full([64, D], 0.0, gl.float32, flat)
            for head in gl.static_range(H):
                away = q_slots.index(WHO * H + head).load(flat).to(gl.float32) - mu[:, None]
                squares += away * away
            r = gl.rsqrt(gl.sum(squares, 1) / width + eps)
            gl.store(mean + row + i, mu, i < lq)
            gl.store(rstd + row + i, r, i < lq)
            for head in gl.static_range(H):
                slot = q_slots.index(WHO * H + head)
                slot.store(((slot.load(flat).to(gl.float32) - mu[:, None]) * r[:, None]).to(dtype))
            fence_async_shared()
            spread = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, o_layout))
            for head in range(H):
                l_tile = q_slots.index(WHO * H + head)
                act_id = 0
                if act_ids is not None:
                    act_id = gl.load(act_ids + head)
                acc = gl.full([64, D], 0.0, gl.float32, o_layout)
                for _x in range(blocks):
                    stage = step % STAGES
                    mbarrier.wait(kv_full.index(stage), step // STAGES & 1)
                    zero = gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout)
                    s = warpgroup_mma(l_tile, kv_slots.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(0, deps=(s,))
                    mbarrier.arrive(kv_empty.index(stage), count=1)
                    step += 1
                    if FOLDED:
                        p = folded_value(s, scale, FOLDED)
                    else:
                        p = activate(s * scale, act_id, ACT, ACT_SET, FAST)
                    p16 = gl.convert_layout(p.to(dtype), p_layout, assert_trivial=True)
                    stage = step % STAGES
                    mbarrier.wait(kv_full.index(stage), step // STAGES & 1)
                    acc = warpgroup_mma(p16, kv_slots.index(stage), acc, is_async=True)
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                    mbarrier.arrive(kv_empty.index(stage), count=1)
                    step += 1
                o = acc * out_scale + l_tile.load(o_layout).to(gl.float32)
                spread += gl.sum(o * o, 1)
                l_tile.store(o.to(dtype))
            r2 = gl.convert_layout(gl.rsqrt(spread / width + eps), down)
            gl.store(out_rstd + row + i, r2, i < lq)
            at = (row + i).to(gl.int64)[:, None]
            live = (i < lq)[:, None]
            x = gl.load(q + at * stride_q + c[None, :], live, 0.0)
            for head in gl.static_range(H):
                later = x
                if head + 1 < H:
                    later = gl.load(q + at * stride_q + ((head + 1) * D + c)[None, :], live, 0.0)
                slot = q_slots.index(WHO * H + head)
                y = slot.load(flat).to(gl.float32) * r2[:, None] + x.to(gl.float32)
                gl.store(out + at * width + (head * D + c)[None, :], y.to(dtype), live)
                fence_async_shared()
                mbarrier.arrive(q_empty.index(WHO * H + head), count=1)
                x = later
        else:
            # No row of this half belongs to the sample.
            for head in gl.static_range(H):
                mbarrier.arrive(q_empty.index(WHO * H + head), count=1)
            for _x in range(2 * H * blocks):
                stage = step % STAGES
                mbarrier.wait(kv_full.index(stage), step // STAGES & 1)
                mbarrier.arrive(kv_empty.index(stage), count=1)
                step += 1
        count += 1
        row, lq, lk, m0 = n_row, n_lq, n_lk, n_m0


@gluon.jit(do_not_specialize=["batch", "rows"])
def hopper_norm_gdpa_fwd_kernel(
    q_box, k, v, q, ahead, out, mean, rstd, out_rstd, table, tile_count, q_offsets, act_ids, batch, rows, scale, out_scale, eps, stride_q,
    H: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out [rows, H, D]; mean, rstd and out_rstd [rows]; zeros in rows past the last offset. ``ahead``: q where it is contiguous."""
    used = gl.load(q_offsets + batch).to(gl.int64)
    end = rows.to(gl.int64)
    fill_flat(out, used * (H * D), end * (H * D), 0.0, num_warps)
    fill_flat(mean, used, end, 0.0, num_warps)
    fill_flat(rstd, used, end, 0.0, num_warps)
    fill_flat(out_rstd, used, end, 0.0, num_warps)
    total = gl.load(tile_count)
    dtype: gl.constexpr = q_box.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    q_slots = gl.allocate_shared_memory(dtype, [2 * H, 64, D], tile)
    kv_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    q_full, q_empty = make_barriers(2, 1), make_barriers(2 * H, 1)
    kv_full, kv_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    q, out, mean, rstd, out_rstd, table, total, q_slots, kv_slots, q_full, q_empty, kv_full, kv_empty,
                    act_ids, scale, out_scale, eps, stride_q, 0, H, D, ACT, ACT_SET, FAST, FOLDED, BLOCK_N, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    q, out, mean, rstd, out_rstd, table, total, q_slots, kv_slots, q_full, q_empty, kv_full, kv_empty,
                    act_ids, scale, out_scale, eps, stride_q, 1, H, D, ACT, ACT_SET, FAST, FOLDED, BLOCK_N, STAGES,
                ),
            ),
            (
                _producer,
                (
                    q_box, k, v, ahead, table, total, rows, q_slots, kv_slots, q_full, q_empty, kv_full, kv_empty,
                    H, D, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
