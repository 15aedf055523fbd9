"""Forward pass of `linear_norm` on Hopper: y = norm(x wᵀ + b), the norm taken at the end of the product.

A program owns 128 whole rows of z = x wᵀ + b, 64 a warpgroup, whose N columns are one or two tiles of accumulators. The first tile waits in
registers, rounded as an unfused product would be stored and two columns a register, until the second one has completed the rows'
statistics. y leaves through a small buffer, which makes room for a long ring: while one warpgroup finishes its rows, the other one lives on
what is there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.hopper.common import make_barriers
from gem_kernels.triton.hopper.halves import halves


@gluon.jit
def _producer(
    x, w, row_tiles, x_slots, w_slots, full, empty,
    K: gl.constexpr, BLOCK_C: gl.constexpr, TILES: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    for tile in range(gl.program_id(0), row_tiles, gl.num_programs(0)):
        for c in gl.static_range(TILES):
            for k in range(0, K, BLOCK_K):
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(stage), 2 * BLOCK_K * (128 + BLOCK_C))
                tma.async_copy_global_to_shared(x, [tile * 128, k], full.index(stage), x_slots.index(stage))
                tma.async_copy_global_to_shared(w, [c * BLOCK_C, k], full.index(stage), w_slots.index(stage))
                step += 1


@gluon.jit
def _join(z, mu, spread, FIRST: gl.constexpr, N: gl.constexpr):
    """Mean and squared deviations of the rows, those of columns ``FIRST`` and on joined with those before (Chan, Golub, LeVeque 1979)."""
    count: gl.constexpr = N - FIRST if z.shape[1] > N - FIRST else z.shape[1]
    if count > 0:
        layout: gl.constexpr = z.type.layout
        mu = gl.convert_layout(mu, gl.SliceLayout(1, layout), assert_trivial=True)
        spread = gl.convert_layout(spread, gl.SliceLayout(1, layout), assert_trivial=True)
        here = gl.sum(z, 1) / count
        away = z - here[:, None]
        if count < z.shape[1]:
            away = gl.where((FIRST + gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, layout)) < N)[None, :], away, 0.0)
        gap = here - mu
        weight: gl.constexpr = count / (FIRST + count)
        mu = mu + gap * weight
        spread = spread + gl.sum(away * away, 1) + gap * gap * (FIRST * weight)
    return mu, spread


@gluon.jit
def _two_in_one(z, dtype: gl.constexpr):
    """[64, N / 2] int32: neighbouring columns of z [64, N] in half precision."""
    a, b = gl.split(gl.reshape(z, [64, z.shape[1] // 2, 2]))
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _one_from_two(x, dtype: gl.constexpr, layout: gl.constexpr):
    """The converse: [64, N] fp32."""
    if dtype == gl.bfloat16:
        a = (x << 16).to(gl.float32, bitcast=True)
        b = (x & -65536).to(gl.float32, bitcast=True)
    else:
        asm: gl.constexpr = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
        a, b = gl.inline_asm_elementwise(asm, "=f,=f,r", [x], dtype=(gl.float32, gl.float32), is_pure=True, pack=1)
    return gl.convert_layout(gl.reshape(gl.join(a, b), [64, x.shape[1] * 2]), layout, assert_trivial=True)


@gluon.jit
def _finish(z, mu, r, weight, bias, out, FIRST: gl.constexpr, N: gl.constexpr):
    """Columns ``FIRST`` and on of y, from those of z, into ``out``."""
    layout: gl.constexpr = z.type.layout
    j = FIRST + gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, layout))
    mu = gl.convert_layout(mu, gl.SliceLayout(1, layout), assert_trivial=True)
    r = gl.convert_layout(r, gl.SliceLayout(1, layout), assert_trivial=True)
    z = (z - mu[:, None]) * r[:, None]
    if weight is not None:
        z = z * gl.load(weight + j, j < N, 0.0).to(gl.float32)[None, :]
    if bias is not None:
        z = z + gl.load(bias + j, j < N, 0.0).to(gl.float32)[None, :]
    out.store(z.to(out.dtype))


@gluon.jit
def _leave(y, m, z, mu, r, weight, bias, out, FIRST: gl.constexpr, N: gl.constexpr):
    """64 rows of some columns of y, by way of ``out``."""
    HALF: gl.constexpr = z.shape[1] // 2
    tma.store_wait(0)
    if z.shape[1] == 128 and (weight is not None or bias is not None):
        # weight and bias of all columns at once would take too many registers
        left, right = halves(z)
        _finish(left, mu, r, weight, bias, out.slice(0, HALF, dim=1), FIRST, N)
        _finish(right, mu, r, weight, bias, out.slice(HALF, HALF, dim=1), FIRST + HALF, N)
    else:
        _finish(z, mu, r, weight, bias, out, FIRST, N)
    fence_async_shared()
    tma.async_copy_shared_to_global(y, [m, FIRST], out)


@gluon.jit
def _consumer(
    y, b, weight, bias, rstd, row_tiles, x_slots, w_slots, y_buffer, full, empty, rows, eps,
    WHO: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_C: gl.constexpr, TILES: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, LAYER: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_C, 16])
    dtype: gl.constexpr = y_buffer.dtype
    out = y_buffer.index(WHO)
    WIDE: gl.constexpr = out.shape[1]
    step = 0
    for tile in range(gl.program_id(0), row_tiles, gl.num_programs(0)):
        m = tile * 128 + WHO * 64
        mu = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, layout))
        spread = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, layout))
        for c in gl.static_range(TILES):
            j = c * BLOCK_C + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, layout))
            z = gl.full([64, BLOCK_C], 0.0, gl.float32, layout)
            if b is not None:
                z = z + gl.load(b + j, j < N, 0.0).to(gl.float32)[None, :]
            for k in range(0, K, BLOCK_K):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                a = x_slots.index(stage).slice(WHO * 64, 64)
                z = warpgroup_mma(a, w_slots.index(stage).permute((1, 0)), z, use_acc=b is not None or k > 0, is_async=True)
                z = warpgroup_mma_wait(1, deps=(z,))
                if k > 0:
                    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
                step += 1
            z = warpgroup_mma_wait(0, deps=(z,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            if BLOCK_C == WIDE:
                left = z
                right = z
            else:
                left, right = halves(z)
            if LAYER:
                mu, spread = _join(left, mu, spread, c * BLOCK_C, N)
                if BLOCK_C > WIDE:
                    mu, spread = _join(right, mu, spread, c * BLOCK_C + WIDE, N)
            else:
                spread += gl.sum(z * z, 1)
            if c + 1 < TILES:
                held_left, held_right = _two_in_one(left, dtype), _two_in_one(right, dtype)
            else:
                r = gl.rsqrt(spread / N + eps)
                i = m + gl.arange(0, 64, layout=r.type.layout)
                gl.store(rstd + i, r, i < rows)
                if TILES == 2:
                    narrow: gl.constexpr = left.type.layout
                    _leave(y, m, _one_from_two(held_left, dtype, narrow), mu, r, weight, bias, out, 0, N)
                    _leave(y, m, _one_from_two(held_right, dtype, narrow), mu, r, weight, bias, out, WIDE, N)
                _leave(y, m, left, mu, r, weight, bias, out, c * BLOCK_C, N)
                if BLOCK_C > WIDE:
                    _leave(y, m, right, mu, r, weight, bias, out, c * BLOCK_C + WIDE, N)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def hopper_linear_norm_fwd_kernel(
    x, w, y, b, weight, bias, rstd, rows, eps,
    N: gl.constexpr, K: gl.constexpr, BLOCK_C: gl.constexpr, TILES: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    LAYER: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """y [rows, N] and rstd [rows]; N <= TILES · BLOCK_C, w [N, K]."""
    row_tiles = (rows + 127) // 128
    dtype: gl.constexpr = x.dtype
    x_slots = gl.allocate_shared_memory(dtype, [STAGES, 128, BLOCK_K], gl.NVMMASharedLayout.get_default_for([128, BLOCK_K], dtype))
    w_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_C, BLOCK_K], gl.NVMMASharedLayout.get_default_for([BLOCK_C, BLOCK_K], dtype))
    WIDE: gl.constexpr = BLOCK_C if BLOCK_C < 128 else 128
    y_buffer = gl.allocate_shared_memory(dtype, [2, 64, WIDE], gl.NVMMASharedLayout.get_default_for([64, WIDE], dtype))
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    y, b, weight, bias, rstd, row_tiles, x_slots, w_slots, y_buffer, full, empty, rows, eps,
                    0, N, K, BLOCK_C, TILES, BLOCK_K, STAGES, LAYER,
                ),
            ),
            (
                _consumer,
                (
                    y, b, weight, bias, rstd, row_tiles, x_slots, w_slots, y_buffer, full, empty, rows, eps,
                    1, N, K, BLOCK_C, TILES, BLOCK_K, STAGES, LAYER,
                ),
            ),
            (_producer, (x, w, row_tiles, x_slots, w_slots, full, empty, K, BLOCK_C, TILES, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
