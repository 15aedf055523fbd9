"""`gdpa` of normalised queries that are not in memory, for `norm_gdpa` on Hopper: S = r (q kᵀ - μ Σk).

The kernel of `gem_kernels.triton.hopper.forward` for full attention to few keys, a tile an item. Statistics of the rows and sums of keys
are read an item ahead. In the kernels' own activations r is a part of their scale, and what is left of it goes to the epilogue.
"""

# ruff: noqa: SIM113 - the compiler knows no enumerate

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate
from gem_kernels.triton.hopper.common import (
    alive,
    folded_value,
    item_at,
    items,
    make_barriers,
    pass_over,
    read_first,
    read_tile,
    store_box,
)
from gem_kernels.triton.hopper.forward import _producer, _scores


@gluon.jit
def _statistics(mean, rstd, row, rows, first, layout: gl.constexpr):
    """rstd and mean of 64 rows of a sample, read an item ahead."""
    i = first + gl.arange(0, 64, layout=layout)
    return gl.load(rstd + row + i, i < rows, 0.0), gl.load(mean + row + i, i < rows, 0.0)


@gluon.jit
def _shift(key_sums, keys, head, k_row, lk, block, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Sums of a block of keys, zeros where there is none."""
    j = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=layout)
    return gl.load(key_sums + (head.to(gl.int64) * keys + k_row) + j, (j >= 0) & (j < lk), 0.0)


@gluon.jit
def _consumer(
    out, mean, rstd, key_sums, table, total, q_slots, k_slots, v_slots, o_buffer, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    act_ids, keys, scale, out_scale,
    WHO: gl.constexpr, H: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr,
    FOLDED: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dtype: gl.constexpr = q_slots.dtype
    o_tile = o_buffer.index(WHO)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    step = 0
    tile = 0
    row, lq, k_row, lk, start = read_first(table, total, H)
    r, mu = _statistics(mean, rstd, row, lq, start + WHO * 64, row_layout)
    shift = _shift(key_sums, keys, item_at(0) % H, k_row, lk, (lk + BLOCK_N - 1) // BLOCK_N - 1, BLOCK_N, gl.SliceLayout(0, s_layout))
    for n in range(items(total)):
        item = item_at(n)
        head = item % H
        lk = alive(lk)
        n_row, n_lq, n_k_row, n_lk, n_start = read_tile(table, item_at(n + 1), total, H)
        blocks = (lk + BLOCK_N - 1) // BLOCK_N
        own = start + WHO * 64
        slot = tile % 2
        mbarrier.wait(q_full.index(slot), tile // 2 & 1)
        if own < lq:
            act_id = 0
            if act_ids is not None:
                act_id = gl.load(act_ids + head)
            away = -mu
            acc = gl.full([64, D], 0.0, gl.float32, o_layout)
            s = gl.full([64, BLOCK_N], 0.0, gl.float32, s_layout)
            for x in range(blocks):
                stage = (step + x) % STAGES
                s = _scores(q_slots.index(2 * slot + WHO), k_slots, k_full, step + x, s, STAGES)
                n_shift = _shift(key_sums, keys, head, k_row, lk, blocks - 2 - x, BLOCK_N, gl.SliceLayout(0, s_layout))
                s = warpgroup_mma_wait(0, deps=(s,))
                mbarrier.arrive(k_empty.index(stage), count=1)
                s = s + away[:, None] * shift[None, :]
                if FOLDED:
                    p = folded_value(s, (r * scale)[:, None], FOLDED)
                else:
                    p = activate(s * (r * scale)[:, None], act_id, ACT, ACT_SET, FAST)
                p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, o_layout, 2), assert_trivial=True)
                mbarrier.wait(v_full.index(stage), (step + x) // STAGES & 1)
                acc = warpgroup_mma(p16, v_slots.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(v_empty.index(stage), count=1)
                shift = n_shift
            step += blocks
            mbarrier.arrive(q_empty.index(slot), count=1)
            tma.store_wait(0)
            factor = gl.full([64], out_scale, gl.float32, row_layout)
            if FOLDED:
                factor = r * out_scale
            o_tile.store((acc * gl.convert_layout(factor, gl.SliceLayout(1, o_layout), assert_trivial=True)[:, None]).to(dtype))
            fence_async_shared()
            store_box(out, row, lq, own, head * D, o_tile, 64, D)
        else:
            # No row of this half belongs to the sample.
            mbarrier.arrive(q_empty.index(slot), count=1)
            step = pass_over(blocks, step, k_full, k_empty, v_full, v_empty, STAGES, False)
        tile += 1
        row, lq, k_row, lk, start = n_row, n_lq, n_k_row, n_lk, n_start
        r, mu = _statistics(mean, rstd, row, lq, start + WHO * 64, row_layout)
        shift = _shift(
            key_sums, keys, item_at(n + 1) % H, k_row, lk, (lk + BLOCK_N - 1) // BLOCK_N - 1, BLOCK_N, gl.SliceLayout(0, s_layout)
        )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["keys"])
def hopper_norm_gdpa_fwd_kernel(
    q, k, v, out, mean, rstd, key_sums, table, tile_count, act_ids, keys, scale, out_scale,
    H: gl.constexpr, D: gl.constexpr, ACT: gl.constexpr, ACT_SET: gl.constexpr, FAST: gl.constexpr, FOLDED: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out = act(scale · l kᵀ) v · out_scale of l = rstd (q - mean), mean and rstd [rows], key_sums [H, keys] the sums of the rows of k."""
    total = gl.load(tile_count) * H
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], dtype)
    q_slots = gl.allocate_shared_memory(dtype, [4, 64, D], tile)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], tile)
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
                    out, mean, rstd, key_sums, table, total, q_slots, k_slots, v_slots, o_buffer,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, act_ids, keys, scale, out_scale,
                    0, H, D, ACT, ACT_SET, FAST, FOLDED, BLOCK_N, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    out, mean, rstd, key_sums, table, total, q_slots, k_slots, v_slots, o_buffer,
                    q_full, q_empty, k_full, k_empty, v_full, v_empty, act_ids, keys, scale, out_scale,
                    1, H, D, ACT, ACT_SET, FAST, FOLDED, BLOCK_N, STAGES,
                ),
            ),
            (
                _producer,
                (
                    q, k, v, table, total, q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty, 0, 0,
                    H, 1, D, False, False, BLOCK_N, STAGES, 1, 0, False, False,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
