"""The hidden layer of `mlp` once more, for its backward pass on Hopper: act(z) and dz from x and dy.

A program keeps BLOCK_H rows of w1 and columns of w2 in shared memory and walks over blocks of 128 rows. Two warpgroups own 64 rows each,
whose x and dy a producer streams in chunks of 64 columns; the products of one run while the other applies the activation:

    x chunks ─► z = x w1ᵀ      ┐
    dy chunks ─► da = dy w2     ├─► hidden = act(z), dhidden = da · act'(z), by TMA; column sums of dhidden stay in registers to the end,
                                    and of one chunk of dy, another one in each of the programs that walk over the same rows

OWN: each warpgroup has a producer and a ring of its own, so that neither waits for the other. Results leave through two buffers a
warpgroup; with two PARTS these are of half the columns, and one half is computed while the other one leaves.
Above 128 columns without a norm `mlp_bwd_wide` is faster.
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.attention.activations import activate_with_slope
from gem_kernels.triton.hopper.common import make_barriers
from gem_kernels.triton.hopper.halves import halves
from gem_kernels.triton.hopper.prefetch import prefetch_rows


@gluon.jit
def _producer(
    x, dy, w1, w2, x_rows, dy_rows, rows, row_tiles, slices, w1_slots, w2_slots, slots, w_full, full, empty,
    WHO: gl.constexpr, KX: gl.constexpr, KD: gl.constexpr, OWN: gl.constexpr, BLOCK_H: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    h = gl.program_id(0) % slices * BLOCK_H
    if WHO == 0:
        mbarrier.expect(w_full.index(0), 2 * 64 * BLOCK_H * (KX + KD))
        for c in gl.static_range(KX):
            tma.async_copy_global_to_shared(w1, [h, c * 64], w_full.index(0), w1_slots.index(c))
        for c in gl.static_range(KD):
            tma.async_copy_global_to_shared(w2, [c * 64, h], w_full.index(0), w2_slots.index(c))
    step = 0
    base: gl.constexpr = WHO * STAGES if OWN else 0
    ROWS: gl.constexpr = 64 if OWN else 128
    if OWN or WHO == 0:
        for tile in range(gl.program_id(0) // slices, row_tiles, gl.num_programs(0) // slices):
            if OWN and h == 0:
                ahead = tile * 128 + WHO * 64 + gl.num_programs(0) // slices * 128
                prefetch_rows(x_rows, ahead, rows, 64, KX * 64)
                prefetch_rows(dy_rows, ahead, rows, 64, KD * 64)
            for part in range(KX + KD):
                stage = step % STAGES
                mbarrier.wait(empty.index(base + stage), (step // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(base + stage), 2 * ROWS * 64)
                m = tile * 128 + WHO * 64
                if part < KX:
                    tma.async_copy_global_to_shared(x, [m, part * 64], full.index(base + stage), slots.index(base + stage))
                else:
                    tma.async_copy_global_to_shared(dy, [m, (part - KX) * 64], full.index(base + stage), slots.index(base + stage))
                step += 1


@gluon.jit
def _own_rows(slots, slot, WHO: gl.constexpr, OWN: gl.constexpr):
    """This warpgroup's 64 rows of a slot."""
    if OWN:
        return slots.index(slot)
    else:
        return slots.index(slot).slice(WHO * 64, 64)


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
def _four_rows(x):
    """[16, 64] of x [64, 64]: rows 16 apart, which one thread holds, added up."""
    return gl.sum(gl.reshape(x, [4, 16, 64]), 0)


@gluon.jit
def _leave(to, m, column, x, buffer):
    """64 rows of ``to`` from row and column on, by way of a buffer; there are two, used in turn, and one may still be read meanwhile."""
    tma.store_wait(1)
    buffer.store(x.to(buffer.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(to, [m, column], buffer)


@gluon.jit
def _activate(
    z, da, to, first, second, m, h, rows, gain,
    FIRST: gl.constexpr, ACT: gl.constexpr, FAST: gl.constexpr, NORM: gl.constexpr, LAYER: gl.constexpr,
):  # fmt: skip
    """act(z) and dz, which it returns, of columns FIRST and on of the program's, to memory."""
    hidden, dhidden, mean, rstd, b1, column_sum = to
    layout: gl.constexpr = z.type.layout
    i = m + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    j = FIRST + gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, layout))
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
    _leave(hidden, m, h + FIRST, a, first)
    dz = da * slope
    _leave(dhidden, m, h + FIRST, dz, second)
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
    hidden, dhidden, b1, column_sum, mean, rstd, db1, db2, row_tiles, slices, w1_slots, w2_slots, slots, out_buffer, w_full, full, empty,
    rows, gain,
    WHO: gl.constexpr, HIDDEN: gl.constexpr, KX: gl.constexpr, KD: gl.constexpr, OWN: gl.constexpr, BLOCK_H: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, ACT: gl.constexpr, FAST: gl.constexpr, NORM: gl.constexpr, LAYER: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_H, 16])
    base: gl.constexpr = WHO * STAGES if OWN else 0
    h = gl.program_id(0) % slices * BLOCK_H
    # pointers, so that a column's place is an offset known to the compiler and not an address in registers
    if b1 is not None:
        b1 += h
    if LAYER:
        column_sum += h
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    chunk = gl.program_id(0) % slices
    dy_sums = _four_rows(gl.full([64, 64], 0.0, gl.float32, flat))
    PART: gl.constexpr = BLOCK_H // PARTS
    part: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PART, 16])
    sums = _row_pairs(gl.full([64, PART], 0.0, gl.float32, part), PART)
    sums_right = sums
    mbarrier.wait(w_full.index(0), 0)
    step = 0
    for tile in range(gl.program_id(0) // slices, row_tiles, gl.num_programs(0) // slices):
        m = tile * 128 + WHO * 64
        z = gl.full([64, BLOCK_H], 0.0, gl.float32, layout)
        for c in range(KX):
            stage = step % STAGES
            mbarrier.wait(full.index(base + stage), step // STAGES & 1)
            z = warpgroup_mma(_own_rows(slots, base + stage, WHO, OWN), w1_slots.index(c).permute((1, 0)), z, use_acc=c > 0, is_async=True)
            z = warpgroup_mma_wait(1, deps=(z,))
            if c > 0:
                mbarrier.arrive(empty.index(base + (step + STAGES - 1) % STAGES), count=1)
            step += 1
        z = warpgroup_mma_wait(0, deps=(z,))
        mbarrier.arrive(empty.index(base + (step + STAGES - 1) % STAGES), count=1)
        da = gl.full([64, BLOCK_H], 0.0, gl.float32, layout)
        for c in gl.static_range(KD):
            stage = (step + c) % STAGES
            mbarrier.wait(full.index(base + stage), (step + c) // STAGES & 1)
            da = warpgroup_mma(_own_rows(slots, base + stage, WHO, OWN), w2_slots.index(c), da, use_acc=c > 0, is_async=True)
        if db2 is not None:
            if chunk < KD:
                dy_sums += _four_rows(_own_rows(slots, base + (step + chunk) % STAGES, WHO, OWN).load(flat).to(gl.float32))
        da = warpgroup_mma_wait(0, deps=(da,))
        for c in gl.static_range(KD):
            mbarrier.arrive(empty.index(base + (step + c) % STAGES), count=1)
        step += KD
        to = hidden, dhidden, mean, rstd, b1, column_sum
        first = out_buffer.index(2 * WHO)
        second = out_buffer.index(2 * WHO + 1)
        if PARTS == 1:
            dz = _activate(z, da, to, first, second, m, h, rows, gain, 0, ACT, FAST, NORM, LAYER)
            if db1 is not None:
                sums += _row_pairs(dz, PART)
        else:
            z_left, z_right = halves(z)
            da_left, da_right = halves(da)
            dz = _activate(z_left, da_left, to, first, second, m, h, rows, gain, 0, ACT, FAST, NORM, LAYER)
            if db1 is not None:
                sums += _row_pairs(dz, PART)
            dz = _activate(z_right, da_right, to, first, second, m, h, rows, gain, PART, ACT, FAST, NORM, LAYER)
            if db1 is not None:
                sums_right += _row_pairs(dz, PART)
    if db1 is not None:
        store_parts(db1, gl.sum(sums, 1), gl.program_id(0) // slices * 2 + WHO, h, HIDDEN)
        if PARTS == 2:
            store_parts(db1, gl.sum(sums_right, 1), gl.program_id(0) // slices * 2 + WHO, h + PART, HIDDEN)
    if db2 is not None:
        if chunk < KD:
            store_parts(db2, gl.sum(gl.reshape(dy_sums, [4, 4, 64]), 1), gl.program_id(0) // slices * 2 + WHO, chunk * 64, KD * 64)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "slices"])
def hopper_mlp_bwd_kernel(
    x, dy, w1, w2, x_rows, dy_rows, hidden, dhidden, b1, column_sum, mean, rstd, db1, db2, rows, slices, gain,
    HIDDEN: gl.constexpr, KX: gl.constexpr, KD: gl.constexpr, OWN: gl.constexpr, BLOCK_H: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, ACT: gl.constexpr, FAST: gl.constexpr, NORM: gl.constexpr, LAYER: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """hidden, dhidden [rows, HIDDEN]; db1, db2 [8 · programs / slices, HIDDEN or KD · 64], None where not wanted; db2 needs slices >= KD.
    KX, KD: widths of x and dy in chunks of 64 columns. ``x_rows``, ``dy_rows``: plain pointers to x and dy where they are contiguous."""
    row_tiles = (rows + 127) // 128
    dtype: gl.constexpr = x.dtype
    RINGS: gl.constexpr = 2 if OWN else 1
    chunk: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128 // RINGS, 64], dtype)
    up: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_H, 64], dtype)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_H // PARTS], dtype)
    w1_slots = gl.allocate_shared_memory(dtype, [KX, BLOCK_H, 64], up)
    w2_slots = gl.allocate_shared_memory(dtype, [KD, 64, BLOCK_H], gl.NVMMASharedLayout.get_default_for([64, BLOCK_H], dtype))
    slots = gl.allocate_shared_memory(dtype, [RINGS * STAGES, 128 // RINGS, 64], chunk)
    out_buffer = gl.allocate_shared_memory(dtype, [4, 64, BLOCK_H // PARTS], wide)
    w_full = make_barriers(1, 1)
    full, empty = make_barriers(RINGS * STAGES, 1), make_barriers(RINGS * STAGES, 2 // RINGS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    hidden, dhidden, b1, column_sum, mean, rstd, db1, db2, row_tiles, slices, w1_slots, w2_slots, slots, out_buffer,
                    w_full, full, empty, rows, gain, 0, HIDDEN, KX, KD, OWN, BLOCK_H, STAGES, PARTS, ACT, FAST, NORM, LAYER,
                ),
            ),
            (
                _consumer,
                (
                    hidden, dhidden, b1, column_sum, mean, rstd, db1, db2, row_tiles, slices, w1_slots, w2_slots, slots, out_buffer,
                    w_full, full, empty, rows, gain, 1, HIDDEN, KX, KD, OWN, BLOCK_H, STAGES, PARTS, ACT, FAST, NORM, LAYER,
                ),
            ),
            (
                _producer,
                (
                    x, dy, w1, w2, x_rows, dy_rows, rows, row_tiles, slices, w1_slots, w2_slots, slots, w_full, full, empty,
                    0, KX, KD, OWN, BLOCK_H, STAGES,
                ),
            ),
            (
                _producer,
                (
                    x, dy, w1, w2, x_rows, dy_rows, rows, row_tiles, slices, w1_slots, w2_slots, slots, w_full, full, empty,
                    1, KX, KD, OWN, BLOCK_H, STAGES,
                ),
            ),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
