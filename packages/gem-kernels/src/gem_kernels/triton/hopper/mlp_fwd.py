"""Forward pass of `mlp` on Hopper: two warpgroups with 64 rows of x each share the tiles of w1 and w2 that a third partition streams.

    producer    x | w1 w2 | w1 w2 | ...              tiles of BLOCK_H hidden columns, two slots each
    consumer 0  z = x w1ᵀ | act(z) | y += act(z) w2ᵀ | ...
    consumer 1       the same beside it: its products run while the other one applies the activation

act(z) goes from the accumulator's registers straight into the second product. y leaves through the slot of x.
"""

# ruff: noqa: SIM113 - the compiler knows no enumerate

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate
from gem_kernels.triton.hopper.common import make_barriers


@gluon.jit
def _producer(
    x, w1, w2, row_tiles, x_slots, w1_slots, w2_slots, x_full, x_empty, w1_full, w1_empty, w2_full, w2_empty,
    IN: gl.constexpr, OUT: gl.constexpr, HIDDEN: gl.constexpr, BLOCK_H: gl.constexpr,
):  # fmt: skip
    step = 0
    count = 0
    for tile in range(gl.program_id(0), row_tiles, gl.num_programs(0)):
        mbarrier.wait(x_empty.index(0), (count & 1) ^ 1)
        mbarrier.expect(x_full.index(0), 2 * 128 * IN)
        tma.async_copy_global_to_shared(x, [tile * 128, 0], x_full.index(0), x_slots.index(0))
        tma.async_copy_global_to_shared(x, [tile * 128 + 64, 0], x_full.index(0), x_slots.index(1))
        count += 1
        for h in range(0, HIDDEN, BLOCK_H):
            stage = step % 2
            phase = (step // 2 & 1) ^ 1
            mbarrier.wait(w1_empty.index(stage), phase)
            mbarrier.expect(w1_full.index(stage), 2 * BLOCK_H * IN)
            tma.async_copy_global_to_shared(w1, [h, 0], w1_full.index(stage), w1_slots.index(stage))
            mbarrier.wait(w2_empty.index(stage), phase)
            mbarrier.expect(w2_full.index(stage), 2 * BLOCK_H * OUT)
            tma.async_copy_global_to_shared(w2, [0, h], w2_full.index(stage), w2_slots.index(stage))
            step += 1


@gluon.jit
def _consumer(
    y, b1, b2, column_sum, mean, rstd, row_tiles, x_slots, w1_slots, w2_slots, x_full, x_empty, w1_full, w1_empty, w2_full, w2_empty,
    rows, eps, gain,
    WHO: gl.constexpr, IN: gl.constexpr, OUT: gl.constexpr, HIDDEN: gl.constexpr, BLOCK_H: gl.constexpr, ACT: gl.constexpr,
    FAST: gl.constexpr, NORM: gl.constexpr, LAYER: gl.constexpr,
):  # fmt: skip
    z_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_H, 16])
    y_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, OUT, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, y_layout, 2)
    across: gl.constexpr = gl.SliceLayout(0, z_layout)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = x_slots.dtype
    step = 0
    count = 0
    for tile in range(gl.program_id(0), row_tiles, gl.num_programs(0)):
        m = tile * 128 + WHO * 64
        mbarrier.wait(x_full.index(0), count & 1)
        count += 1
        x_tile = x_slots.index(WHO)
        mu = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, flat))
        r = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, flat))
        if NORM:
            if LAYER:
                for c in gl.static_range(IN // 64):
                    mu += gl.sum(x_tile.slice(c * 64, 64, dim=1).load(flat).to(gl.float32), 1)
                mu = mu / IN
            spread = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, flat))
            for c in gl.static_range(IN // 64):
                away = x_tile.slice(c * 64, 64, dim=1).load(flat).to(gl.float32) - mu[:, None]
                spread += gl.sum(away * away, 1)
            r = gl.rsqrt(spread / IN + eps)
            i = m + gl.arange(0, 64, layout=gl.SliceLayout(1, flat))
            gl.store(rstd + i, r, i < rows)
            if LAYER:
                gl.store(mean + i, mu, i < rows)
        r = gl.convert_layout(r, gl.SliceLayout(1, z_layout))
        mu = gl.convert_layout(mu, gl.SliceLayout(1, z_layout))
        acc = gl.full([64, OUT], 0.0, gl.float32, y_layout)
        for h in range(0, HIDDEN, BLOCK_H):
            stage = step % 2
            phase = step // 2 & 1
            mbarrier.wait(w1_full.index(stage), phase)
            z = warpgroup_mma(
                x_tile, w1_slots.index(stage).permute((1, 0)), gl.full([64, BLOCK_H], 0.0, gl.float32, z_layout),
                use_acc=False, is_async=True,
            )  # fmt: skip
            z = warpgroup_mma_wait(0, deps=(z,))
            mbarrier.arrive(w1_empty.index(stage), count=1)
            j = h + gl.arange(0, BLOCK_H, layout=across)
            if LAYER:
                z = z - mu[:, None] * gl.load(column_sum + j)[None, :]
            if NORM:
                z = z * r[:, None]
            if b1 is not None:
                z = z + gl.load(b1 + j).to(gl.float32)[None, :]
            a = gl.convert_layout(activate(z, 0, ACT, 0, FAST).to(dtype), a_layout, assert_trivial=True)
            mbarrier.wait(w2_full.index(stage), phase)
            acc = warpgroup_mma(a, w2_slots.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(w2_empty.index(stage), count=1)
            step += 1
        acc = acc * gain
        if b2 is not None:
            o = gl.arange(0, OUT, layout=gl.SliceLayout(0, y_layout))
            acc = acc + gl.load(b2 + o).to(gl.float32)[None, :]
        out = x_slots.index(WHO)
        out.store(acc.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [m, 0], out)
        tma.store_wait(0)
        mbarrier.arrive(x_empty.index(0), count=1)


@gluon.jit(do_not_specialize=["rows"])
def hopper_mlp_fwd_kernel(
    x, w1, w2, y, b1, b2, column_sum, mean, rstd, rows, eps, gain,
    IN: gl.constexpr, HIDDEN: gl.constexpr, BLOCK_H: gl.constexpr, ACT: gl.constexpr, FAST: gl.constexpr,
    NORM: gl.constexpr, LAYER: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """y [rows, IN], mean and rstd; x and y have the same width."""
    OUT: gl.constexpr = IN
    row_tiles = (rows + 127) // 128
    dtype: gl.constexpr = x.dtype
    x_slots = gl.allocate_shared_memory(dtype, [2, 64, IN], gl.NVMMASharedLayout.get_default_for([64, IN], dtype))
    w1_slots = gl.allocate_shared_memory(dtype, [2, BLOCK_H, IN], gl.NVMMASharedLayout.get_default_for([BLOCK_H, IN], dtype))
    w2_slots = gl.allocate_shared_memory(dtype, [2, OUT, BLOCK_H], gl.NVMMASharedLayout.get_default_for([OUT, BLOCK_H], dtype))
    x_full, x_empty = make_barriers(1, 1), make_barriers(1, 2)
    w1_full, w1_empty = make_barriers(2, 1), make_barriers(2, 2)
    w2_full, w2_empty = make_barriers(2, 1), make_barriers(2, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    y, b1, b2, column_sum, mean, rstd, row_tiles, x_slots, w1_slots, w2_slots, x_full, x_empty, w1_full, w1_empty,
                    w2_full, w2_empty, rows, eps, gain, 0, IN, OUT, HIDDEN, BLOCK_H, ACT, FAST, NORM, LAYER,
                ),
            ),
            (
                _consumer,
                (
                    y, b1, b2, column_sum, mean, rstd, row_tiles, x_slots, w1_slots, w2_slots, x_full, x_empty, w1_full, w1_empty,
                    w2_full, w2_empty, rows, eps, gain, 1, IN, OUT, HIDDEN, BLOCK_H, ACT, FAST, NORM, LAYER,
                ),
            ),
            (
                _producer,
                (
                    x, w1, w2, row_tiles, x_slots, w1_slots, w2_slots, x_full, x_empty, w1_full, w1_empty, w2_full, w2_empty,
                    IN, OUT, HIDDEN, BLOCK_H,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
