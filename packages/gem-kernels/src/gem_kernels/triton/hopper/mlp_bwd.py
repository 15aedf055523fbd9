"""The hidden layer of `mlp` once more, for its backward pass on Hopper: act(z) and dz from x and dy.

A program keeps BLOCK_H rows of w1 and columns of w2 in shared memory and walks over blocks of 128 rows. Two warpgroups own 64 rows each,
whose x and dy a producer streams in chunks of 64 columns; the products of one run while the other applies the activation:

    x chunks ─► z = x w1ᵀ      ┐
    dy chunks ─► da = dy w2     ├─► hidden = act(z), dhidden = da · act'(z), by TMA; column sums of dhidden stay in registers to the end

Results leave through two buffers a warpgroup. For widths of up to 128; wider ones have `mlp_bwd_wide`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.hopper.common import make_barriers


@gluon.jit
def _producer(
    x, dy, w1, w2, row_tiles, slices, w1_slots, w2_slots, slots, w_full, full, empty,
    KX: gl.constexpr, KD: gl.constexpr, BLOCK_H: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    h = gl.program_id(0) % slices * BLOCK_H
    mbarrier.expect(w_full.index(0), 2 * 64 * BLOCK_H * (KX + KD))
    for c in gl.static_range(KX):
        tma.async_copy_global_to_shared(w1, [h, c * 64], w_full.index(0), w1_slots.index(c))
    for c in gl.static_range(KD):
        tma.async_copy_global_to_shared(w2, [c * 64, h], w_full.index(0), w2_slots.index(c))
    step = 0
    for tile in range(gl.program_id(0) // slices, row_tiles, gl.num_programs(0) // slices):
        for part in range(KX + KD):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * 128 * 64)
            if part < KX:
                tma.async_copy_global_to_shared(x, [tile * 128, part * 64], full.index(stage), slots.index(stage))
            else:
                tma.async_copy_global_to_shared(dy, [tile * 128, (part - KX) * 64], full.index(stage), slots.index(stage))
            step += 1


@gluon.jit
def gelu_and_slope(x):
    """gelu(x) and gelu'(x) by the erf of `activate_with_slope`, in fewer operations: here no factor may be left to others."""
    s = x * x
    c = gl.minimum(s, 40.0)
    t = x * (0.7974715616954575 + c * (0.03703858594548714 - 0.0003568485767211807 * c))
    t = gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=True, pack=1)
    half = 0.5 + 0.5 * t
    e = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [-0.7213475204444817 * s], dtype=gl.float32, is_pure=True, pack=1)
    return x * half, half + x * (0.3989422804014327 * e)


@gluon.jit
def _row_pairs(x, COLUMNS: gl.constexpr):
    """[4, 8, COLUMNS] of x [64, COLUMNS]: rows 8 apart, which one thread holds, added up."""
    return gl.sum(gl.reshape(x, [4, 2, 8, COLUMNS]), 1)


@gluon.jit
def _leave(to, m, column, x, buffer):
    """64 rows of ``to`` from row and column on, by way of a buffer; there are two, used in turn, and one may still be read meanwhile."""
    tma.store_wait(1)
    buffer.store(x.to(buffer.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(to, [m, column], buffer)


@gluon.jit
def _activate(
    z, da, to, first, second, m, h, rows, gain, ACT: gl.constexpr, FAST: gl.constexpr, NORM: gl.constexpr, LAYER: gl.constexpr,
):  # fmt: skip
    """act(z) and dz, which it returns, of the program's columns, to memory."""
    hidden, dhidden, mean, rstd, b1, column_sum = to
    layout: gl.constexpr = z.type.layout
    i = m + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    j = gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, layout))
    if LAYER:
        z = z - gl.load(mean + i, i < rows, 0.0)[:, None] * gl.load(column_sum + j)[None, :]
    if NORM:
        z = z * gl.load(rstd + i, i < rows, 0.0)[:, None]
    if b1 is not None:
        z = z + gl.load(b1 + j).to(gl.float32)[None, :]
    if ACT == 1 and FAST:
        a, slope = gelu_and_slope(z)
    else:
        a, slope = activate_with_slope(z, 0, ACT, 0, FAST)
        a = a * gain
        slope = slope * gain
    _leave(hidden, m, h, a, first)
    dz = da * slope
    _leave(dhidden, m, h, dz, second)
    return dz


@gluon.jit
def store_parts(to, x, place, first, WIDTH: gl.constexpr):
    """Sums ``x [4, COLUMNS]``, a row a warp, into rows 4 · place and on of ``to [.., WIDTH]``, from column ``first`` on."""
    layout: gl.constexpr = x.type.layout
    row = place * 4 + gl.arange(0, 4, layout=gl.SliceLayout(1, layout))
    column = first + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(to + row[:, None] * WIDTH + column[None, :], x)


@gluon.jit
def _consumer(
    hidden, dhidden, b1, column_sum, mean, rstd, db1, row_tiles, slices, w1_slots, w2_slots, slots, out_buffer, w_full, full, empty,
    rows, gain,
    WHO: gl.constexpr, HIDDEN: gl.constexpr, KX: gl.constexpr, KD: gl.constexpr, BLOCK_H: gl.constexpr, STAGES: gl.constexpr,
    ACT: gl.constexpr, FAST: gl.constexpr, NORM: gl.constexpr, LAYER: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_H, 16])
    h = gl.program_id(0) % slices * BLOCK_H
    # pointers, so that a column's place is an offset known to the compiler and not an address in registers
    if b1 is not None:
        b1 += h
    if LAYER:
        column_sum += h
    sums = _row_pairs(gl.full([64, BLOCK_H], 0.0, gl.float32, layout), BLOCK_H)
    mbarrier.wait(w_full.index(0), 0)
    step = 0
    for tile in range(gl.program_id(0) // slices, row_tiles, gl.num_programs(0) // slices):
        m = tile * 128 + WHO * 64
        z = gl.full([64, BLOCK_H], 0.0, gl.float32, layout)
        for c in range(KX):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            z = warpgroup_mma(slots.index(stage).slice(WHO * 64, 64), w1_slots.index(c).permute((1, 0)), z, use_acc=c > 0, is_async=True)
            z = warpgroup_mma_wait(1, deps=(z,))
            if c > 0:
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        z = warpgroup_mma_wait(0, deps=(z,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        da = gl.full([64, BLOCK_H], 0.0, gl.float32, layout)
        for c in gl.static_range(KD):
            stage = (step + c) % STAGES
            mbarrier.wait(full.index(stage), (step + c) // STAGES & 1)
            da = warpgroup_mma(slots.index(stage).slice(WHO * 64, 64), w2_slots.index(c), da, use_acc=c > 0, is_async=True)
        da = warpgroup_mma_wait(0, deps=(da,))
        for c in gl.static_range(KD):
            mbarrier.arrive(empty.index((step + c) % STAGES), count=1)
        step += KD
        to = hidden, dhidden, mean, rstd, b1, column_sum
        first = out_buffer.index(2 * WHO)
        second = out_buffer.index(2 * WHO + 1)
        dz = _activate(z, da, to, first, second, m, h, rows, gain, ACT, FAST, NORM, LAYER)
        if db1 is not None:
            sums += _row_pairs(dz, BLOCK_H)
    if db1 is not None:
        store_parts(db1, gl.sum(sums, 1), gl.program_id(0) // slices * 2 + WHO, h, HIDDEN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "slices"])
def hopper_mlp_bwd_kernel(
    x, dy, w1, w2, hidden, dhidden, b1, column_sum, mean, rstd, db1, rows, slices, gain,
    HIDDEN: gl.constexpr, KX: gl.constexpr, KD: gl.constexpr, BLOCK_H: gl.constexpr, STAGES: gl.constexpr,
    ACT: gl.constexpr, FAST: gl.constexpr, NORM: gl.constexpr, LAYER: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """hidden, dhidden [rows, HIDDEN]; db1 [8 · programs / slices, HIDDEN] or None. KX, KD: widths of x and dy in chunks of 64 columns."""
    row_tiles = (rows + 127) // 128
    dtype: gl.constexpr = x.dtype
    chunk: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 64], dtype)
    up: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, 64], dtype)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_H], dtype)
    w1_slots = gl.allocate_shared_memory(dtype, [KX, BLOCK_H, 64], up)
    w2_slots = gl.allocate_shared_memory(dtype, [KD, 64, BLOCK_H], gl.NVMMASharedLayout.get_default_for([64, BLOCK_H], dtype))
    slots = gl.allocate_shared_memory(dtype, [STAGES, 128, 64], chunk)
    out_buffer = gl.allocate_shared_memory(dtype, [4, 64, BLOCK_H], wide)
    w_full = make_barriers(1, 1)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_consumer, (hidden, dhidden, b1, column_sum, mean, rstd, db1, row_tiles, slices, w1_slots, w2_slots, slots, out_buffer,
                         w_full, full, empty, rows, gain, 0, HIDDEN, KX, KD, BLOCK_H, STAGES, ACT, FAST, NORM, LAYER)),
            (_consumer, (hidden, dhidden, b1, column_sum, mean, rstd, db1, row_tiles, slices, w1_slots, w2_slots, slots, out_buffer,
                         w_full, full, empty, rows, gain, 1, HIDDEN, KX, KD, BLOCK_H, STAGES, ACT, FAST, NORM, LAYER)),
            (_producer, (x, dy, w1, w2, row_tiles, slices, w1_slots, w2_slots, slots, w_full, full, empty, KX, KD, BLOCK_H, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
