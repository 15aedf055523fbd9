"""The products of `norm_gdpa` on Hopper: o = gdpa(l, k, v) + l with l = (q − mean) · rstd made on the way.

`forward`'s kernel for a pointwise activation and full attention, but for its operand: a warpgroup loads its 64 rows of q from shared memory
in the layout of a product's operand, normalises them there with the rows' statistics, and keeps l in registers for every product and for
the sum at the end. The slot of q is free as soon as it has been read.
"""

# ruff: noqa: SIM113 - the compiler knows no enumerate

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate
from gem_kernels.triton.hopper.common import alive, fill_flat, key_range, make_barriers, pass_over, read_tile, store_box
from gem_kernels.triton.hopper.forward import _producer, _scaled_fast_gelu


@gluon.jit
def _consumer(
    out, mean, rstd, table, total, q_slots, k_slots, v_slots, o_buffer, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    act_ids, scale, out_scale,
    WHO: gl.constexpr, H: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr,
    FOLDED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    l_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, l_layout)
    dtype: gl.constexpr = q_slots.dtype
    slope_1 = 0.7978845608 * scale
    slope_3 = 0.0356774081 * scale * scale * scale
    step = 0
    tile = 0
    row, lq, _k_row, lk, m0 = read_tile(table, gl.program_id(0), total, H)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % H
        lk = alive(lk)
        n_row, n_lq, _n_k_row, n_lk, n_m0 = read_tile(table, item + gl.num_programs(0), total, H)
        first, last, _free0, _free1 = key_range(m0, gl.minimum(m0 + 128, lq), lq, lk, 0, 0, BLOCK_N, False, False)
        own = m0 + WHO * 64
        slot = tile % 2
        mbarrier.wait(q_full.index(slot), tile // 2 & 1)
        if own < lq:
            act_id = 0
            if act_ids is not None:
                act_id = gl.load(act_ids + head)
            i = own + gl.arange(0, 64, layout=row_layout)
            mu = gl.load(mean + row + i, i < lq, 0.0)
            r = gl.load(rstd + row + i, i < lq, 0.0)
            x = q_slots.index(2 * slot + WHO).load(l_layout).to(gl.float32)
            l = ((x - mu[:, None]) * r[:, None]).to(dtype)
            mbarrier.arrive(q_empty.index(slot), count=1)
            acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            for _x in range(last - first):
                stage = step % STAGES
                phase = step // STAGES & 1
                mbarrier.wait(k_full.index(stage), phase)
                s = warpgroup_mma(
                    l, k_slots.index(stage).permute((1, 0)), gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout),
                    use_acc=False, is_async=True,
                )  # fmt: skip
                s = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(k_empty.index(stage), count=1)
                if FOLDED:
                    p = _scaled_fast_gelu(s, slope_1, slope_3)
                else:
                    p = activate(s * scale, act_id, ACT, ACT_SET, FAST)
                p16 = gl.convert_layout(p.to(dtype), p_layout, assert_trivial=True)
                mbarrier.wait(v_full.index(stage), phase)
                acc = warpgroup_mma(p16, v_slots.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(stage), count=1)
                step += 1
            acc = acc * out_scale + gl.convert_layout(l, o_layout, assert_trivial=True).to(gl.float32)
            tma.store_wait(0)
            o_tile = o_buffer.index(WHO)
            o_tile.store(acc.to(dtype))
            fence_async_shared()
            store_box(out, row, lq, own, head * D, o_tile, 64, D)
        else:
            # No row of this half belongs to the sample.
            mbarrier.arrive(q_empty.index(slot), count=1)
            step = pass_over(last - first, step, k_full, k_empty, v_full, v_empty, STAGES)
        tile += 1
        row, lq, lk, m0 = n_row, n_lq, n_lk, n_m0
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["batch", "rows"])
def hopper_norm_gdpa_fwd_kernel(
    q, k, v, out_box, out, mean, rstd, table, tile_count, q_offsets, act_ids, batch, rows, scale, out_scale,
    H: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    used = gl.load(q_offsets + batch).to(gl.int64)
    fill_flat(out, used * (H * D), rows.to(gl.int64) * (H * D), 0.0, num_warps)
    total = gl.load(tile_count) * H
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    q_slots = gl.allocate_shared_memory(dtype, [4, 64, D], tile)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], wide)
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], wide)
    o_buffer = gl.allocate_shared_memory(dtype, [2, 64, D], tile)
    q_full, q_empty = make_barriers(2, 1), make_barriers(2, 2)
    k_full, k_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    v_full, v_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    out_box, mean, rstd, table, total, q_slots, k_slots, v_slots, o_buffer, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, act_ids, scale, out_scale, 0, H, D, ACT, ACT_SET, FAST, FOLDED, BLOCK_N, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    out_box, mean, rstd, table, total, q_slots, k_slots, v_slots, o_buffer, q_full, q_empty, k_full, k_empty,
                    v_full, v_empty, act_ids, scale, out_scale, 1, H, D, ACT, ACT_SET, FAST, FOLDED, BLOCK_N, STAGES,
                ),
            ),
            (
                _producer,
                (
                    q, k, v, table, total, q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty, 0, 0,
                    H, 1, D, False, False, BLOCK_N, STAGES, False,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
