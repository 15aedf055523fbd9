"""The hidden layer of `mlp` once more, for its backward pass on Hopper, where x or dy has more than 128 columns and there
is no norm: act(z) and dz.

A program has 256 hidden columns, which takes half as many loads of x and dy as 128 (`mlp_bwd`): the weights of one half of them are in
registers, of the other half in shared memory. To that end everything is transposed, weights are the left operand, and a tile is 64 rows,
whose chunks of 64 columns a producer streams:

    zᵀ = w1 xᵀ, daᵀ = w2ᵀ dyᵀ  (weights in registers) ─► act(z), da · act'(z), by TMA
    zᵀ = w1 xᵀ, daᵀ = w2ᵀ dyᵀ  (weights in memory)    ─► likewise                           the tile's chunks are given back

Two warpgroups have 64 hidden columns of each half. What follows the products goes by 16 rows, since next to the weights there are few
registers; results leave by 32 rows, through two pairs of buffers in turn.
"""

# ruff: noqa: SIM102, SIM113 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.hopper.common import alive, make_barriers
from gem_kernels.triton.hopper.halves import halves
from gem_kernels.triton.hopper.mlp_bwd import gelu_and_slope, store_parts
from gem_kernels.triton.hopper.prefetch import prefetch_rows


@gluon.jit
def _weights(w1, w2, h, w1_slots, w2_slots, bar, KX: gl.constexpr, KD: gl.constexpr):
    """128 hidden columns' weights on their way; zeros where there are none."""
    mbarrier.expect(bar, 2 * 64 * 128 * (KX + KD))
    for c in gl.static_range(KX):
        tma.async_copy_global_to_shared(w1, [h, c * 64], bar, w1_slots.index(c))
    for c in gl.static_range(KD):
        for who in gl.static_range(2):
            tma.async_copy_global_to_shared(w2, [c * 64, h + who * 64], bar, w2_slots.index(2 * c + who))


@gluon.jit
def _producer(
    x, dy, w1, w2, x_rows, dy_rows, rows, row_tiles, w1_slots, w2_slots, slots, w_full, w_taken, full, empty,
    HIDDEN: gl.constexpr, KX: gl.constexpr, KD: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    slices: gl.constexpr = (HIDDEN + 255) // 256
    h = gl.program_id(0) % slices * 256
    _weights(w1, w2, h, w1_slots, w2_slots, w_full.index(0), KX, KD)
    mbarrier.wait(w_taken.index(0), 0)
    _weights(w1, w2, h + 128, w1_slots, w2_slots, w_full.index(1), KX, KD)
    turn = 0
    for tile in range(gl.program_id(0) // slices, row_tiles, gl.num_programs(0) // slices):
        if h == 0:
            ahead = (tile + gl.num_programs(0) // slices) * 64
            prefetch_rows(x_rows, ahead, rows, 64, KX * 64)
            prefetch_rows(dy_rows, ahead, rows, 64, KD * 64)
        base = turn % TILES * (KX + KD)
        for c in gl.static_range(KX + KD):
            mbarrier.wait(empty.index(base + c), (turn // TILES & 1) ^ 1)
            mbarrier.expect(full.index(base + c), 2 * 64 * 64)
            if c < KX:
                tma.async_copy_global_to_shared(x, [tile * 64, c * 64], full.index(base + c), slots.index(base + c))
            else:
                tma.async_copy_global_to_shared(dy, [tile * 64, (c - KX) * 64], full.index(base + c), slots.index(base + c))
        turn += 1


@gluon.jit
def _activate(
    z, da, b1, first, second, h, gain, HIDDEN: gl.constexpr, ACT: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    """act(z) and dz, both transposed, of 64 hidden columns and 16 rows, into two buffers; Σ dz of the columns."""
    j = h + gl.arange(0, 64, layout=gl.SliceLayout(1, z.type.layout))
    if b1 is not None:
        z = z + gl.load(b1 + j, j < HIDDEN, 0.0).to(gl.float32)[:, None]
    if ACT == 1 and FAST:
        a, slope = gelu_and_slope(z)
    else:
        a, slope = activate_with_slope(z, 0, ACT, 0, FAST)
        a = a * gain
        slope = slope * gain
    first.permute((1, 0)).store(a.to(first.dtype))
    dz = da * slope
    second.permute((1, 0)).store(dz.to(second.dtype))
    return gl.sum(dz, 1)


@gluon.jit
def _half(
    hidden, dhidden, z, da, b1, out_buffer, m, h, gain,
    PAIR: gl.constexpr, HIDDEN: gl.constexpr, ACT: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    """`_activate` of 32 rows, to memory."""
    z0, z1 = halves(z)
    da0, da1 = halves(da)
    first, second = out_buffer.index(2 * PAIR), out_buffer.index(2 * PAIR + 1)
    tma.store_wait(2)
    sums = _activate(z0, da0, b1, first.slice(0, 16), second.slice(0, 16), h, gain, HIDDEN, ACT, FAST)
    sums += _activate(z1, da1, b1, first.slice(16, 16), second.slice(16, 16), h, gain, HIDDEN, ACT, FAST)
    fence_async_shared()
    tma.async_copy_shared_to_global(hidden, [m, h], first)
    tma.async_copy_shared_to_global(dhidden, [m, h], second)
    return sums


@gluon.jit
def _block(
    hidden, dhidden, z, da, b1, out_buffer, m, h, gain,
    WHO: gl.constexpr, HIDDEN: gl.constexpr, ACT: gl.constexpr, FAST: gl.constexpr,
):  # fmt: skip
    """`_activate` of 64 rows, to memory."""
    z0, z1 = halves(z)
    da0, da1 = halves(da)
    sums = _half(hidden, dhidden, z0, da0, b1, out_buffer, m, h, gain, 2 * WHO, HIDDEN, ACT, FAST)
    sums += _half(hidden, dhidden, z1, da1, b1, out_buffer, m + 32, h, gain, 2 * WHO + 1, HIDDEN, ACT, FAST)
    return gl.convert_layout(sums, gl.SliceLayout(1, z.type.layout))


@gluon.jit
def _by_warp(x):
    """[4, 64] of x [32, 64]: rows 4 apart, which one thread holds, added up."""
    return gl.sum(gl.reshape(x, [8, 4, 64]), 0)


@gluon.jit
def _consumer(
    hidden, dhidden, b1, parts, row_tiles, w1_slots, w2_slots, slots, out_buffer, w_full, w_taken, full, empty, go, gain,
    WHO: gl.constexpr, HIDDEN: gl.constexpr, KX: gl.constexpr, KD: gl.constexpr, TILES: gl.constexpr, ACT: gl.constexpr, FAST: gl.constexpr,
    DB1: gl.constexpr, DB2: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    column: gl.constexpr = gl.SliceLayout(1, layout)
    flat: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    slices: gl.constexpr = (HIDDEN + 255) // 256
    chunk = gl.program_id(0) % slices
    h = chunk * 256 + WHO * 64
    mbarrier.wait(w_full.index(0), 0)
    up = ()
    for c in gl.static_range(KX):
        up += (w1_slots.index(c).slice(WHO * 64, 64).load(left),)
    down = ()
    for c in gl.static_range(KD):
        down += (w2_slots.index(2 * c + WHO).permute((1, 0)).load(left),)
    fence_async_shared()
    mbarrier.arrive(w_taken.index(0), count=1)
    mbarrier.wait(w_full.index(1), 0)
    sums = gl.full([64], 0.0, gl.float32, column)
    more_sums = gl.full([64], 0.0, gl.float32, column)
    dy_sums = _by_warp(gl.full([32, 64], 0.0, gl.float32, flat))
    turn = 0
    for tile in range(gl.program_id(0) // slices, row_tiles, gl.num_programs(0) // slices):
        m = tile * 64
        # addresses that the compiler does not know are computed where they are needed; those it knows would be kept, and spill
        base = alive(turn * 0) if TILES == 1 else turn % TILES * (KX + KD)
        parity = turn // TILES & 1
        z = gl.full([64, 64], 0.0, gl.float32, layout)
        da = gl.full([64, 64], 0.0, gl.float32, layout)
        mbarrier.wait(go.index(WHO), 1 - WHO)
        for c in gl.static_range(KX):
            mbarrier.wait(full.index(base + c), parity)
            z = warpgroup_mma(up[c], slots.index(base + c).permute((1, 0)), z, use_acc=c > 0, is_async=True)
        for c in gl.static_range(KD):
            mbarrier.wait(full.index(base + KX + c), parity)
            da = warpgroup_mma(down[c], slots.index(base + KX + c).permute((1, 0)), da, use_acc=c > 0, is_async=True)
        mbarrier.arrive(go.index(1 - WHO), count=1)
        if DB2:
            if chunk < KD:
                dy_sums += _by_warp(slots.index(base + KX + chunk).slice(WHO * 32, 32).load(flat).to(gl.float32))
        z, da = warpgroup_mma_wait(0, deps=(z, da))
        sums += _block(hidden, dhidden, z, da, b1, out_buffer, m, h, gain, WHO, HIDDEN, ACT, FAST)
        zero = alive(turn * 0)
        base = zero if TILES == 1 else alive(base)
        mbarrier.wait(go.index(WHO), WHO)
        for c in gl.static_range(KX):
            a = w1_slots.index(zero + c).slice(WHO * 64, 64)
            z = warpgroup_mma(a, slots.index(base + c).permute((1, 0)), z, use_acc=c > 0, is_async=True)
        for c in gl.static_range(KD):
            a = w2_slots.index(zero + 2 * c + WHO).permute((1, 0))
            da = warpgroup_mma(a, slots.index(base + KX + c).permute((1, 0)), da, use_acc=c > 0, is_async=True)
        mbarrier.arrive(go.index(1 - WHO), count=1)
        z = warpgroup_mma_wait(KD, deps=(z,))
        for c in gl.static_range(KX):
            mbarrier.arrive(empty.index(base + c), count=1)
        da = warpgroup_mma_wait(0, deps=(da,))
        for c in gl.static_range(KD):
            mbarrier.arrive(empty.index(base + KX + c), count=1)
        turn += 1
        more_sums += _block(hidden, dhidden, z, da, b1, out_buffer, m, h + 128, gain, WHO, HIDDEN, ACT, FAST)
    WIDTH: gl.constexpr = HIDDEN + 8 * KD * 64
    parts += gl.program_id(0) // slices * WIDTH
    if DB1:
        j = h + gl.arange(0, 64, layout=column)
        gl.store(parts + j, sums, j < HIDDEN)
        gl.store(parts + j + 128, more_sums, j + 128 < HIDDEN)
    if DB2:
        if chunk < KD:
            store_parts(parts + HIDDEN, dy_sums, WHO, chunk * 64, KD * 64)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def hopper_mlp_bwd_wide_kernel(
    x, dy, w1, w2, x_rows, dy_rows, hidden, dhidden, b1, parts, rows, gain,
    HIDDEN: gl.constexpr, KX: gl.constexpr, KD: gl.constexpr, TILES: gl.constexpr, ACT: gl.constexpr,
    FAST: gl.constexpr, DB1: gl.constexpr, DB2: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """hidden, dhidden [rows, HIDDEN], HIDDEN in steps of 128; a program has 256 hidden columns of some of the tiles.
    KX, KD: widths of x and dy in chunks of 64 columns, up to 4. ``x_rows``, ``dy_rows``: plain pointers where they are contiguous.
    parts [programs / slices, HIDDEN + 8 · KD · 64]: of Σ dz where DB1, then, in eight rows, of Σ dy where DB2, which needs slices >= KD."""
    row_tiles = (rows + 63) // 64
    dtype: gl.constexpr = x.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    w1_slots = gl.allocate_shared_memory(dtype, [KX, 128, 64], gl.NVMMASharedLayout.get_default_for([128, 64], dtype))
    w2_slots = gl.allocate_shared_memory(dtype, [2 * KD, 64, 64], tile)
    slots = gl.allocate_shared_memory(dtype, [TILES * (KX + KD), 64, 64], tile)
    out_buffer = gl.allocate_shared_memory(dtype, [8, 32, 64], gl.NVMMASharedLayout.get_default_for([32, 64], dtype))
    w_full, w_taken = make_barriers(2, 1), make_barriers(1, 2)
    full, empty = make_barriers(TILES * (KX + KD), 1), make_barriers(TILES * (KX + KD), 2)
    go = make_barriers(2, 1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_consumer, (hidden, dhidden, b1, parts, row_tiles, w1_slots, w2_slots, slots, out_buffer,
                         w_full, w_taken, full, empty, go, gain, 0, HIDDEN, KX, KD, TILES, ACT, FAST, DB1, DB2)),
            (_consumer, (hidden, dhidden, b1, parts, row_tiles, w1_slots, w2_slots, slots, out_buffer,
                         w_full, w_taken, full, empty, go, gain, 1, HIDDEN, KX, KD, TILES, ACT, FAST, DB1, DB2)),
            (_producer, (x, dy, w1, w2, x_rows, dy_rows, rows, row_tiles, w1_slots, w2_slots, slots, w_full, w_taken, full, empty,
                         HIDDEN, KX, KD, TILES)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
