"""Forward pass of `linear_norm` on Hopper: y = norm(x wᵀ + b), the norm taken at the end of the product.

A program owns 128 whole rows of z = x wᵀ + b, 64 a warpgroup, whose N columns are one or two tiles of accumulators. The first tile waits in
the buffer that y leaves through, rounded as an unfused product would be stored, until the second one has completed the rows' statistics.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.hopper.common import make_barriers


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
def _join(z, mu, spread, j, N: gl.constexpr, TILE: gl.constexpr, BLOCK_C: gl.constexpr):
    """Mean and squared deviations of the rows, a tile's joined with those of the tiles before (Chan, Golub, LeVeque 1979)."""
    before: gl.constexpr = TILE * BLOCK_C
    count: gl.constexpr = N - before if N - before < BLOCK_C else BLOCK_C
    tile_mean = gl.sum(z, 1) / count
    away = z - tile_mean[:, None]
    if count < BLOCK_C:
        away = gl.where((j < N)[None, :], away, 0.0)
    gap = tile_mean - mu
    weight: gl.constexpr = count / (before + count)
    return mu + gap * weight, spread + gl.sum(away * away, 1) + gap * gap * (before * weight)


@gluon.jit
def _finish(z, mu, r, weight, bias, j, N: gl.constexpr):
    """Columns ``j`` of y."""
    z = (z - mu[:, None]) * r[:, None]
    if weight is not None:
        z = z * gl.load(weight + j, j < N, 0.0).to(gl.float32)[None, :]
    if bias is not None:
        z = z + gl.load(bias + j, j < N, 0.0).to(gl.float32)[None, :]
    return z


@gluon.jit
def _consumer(
    y, b, weight, bias, rstd, row_tiles, x_slots, w_slots, y_buffer, full, empty, rows, eps,
    WHO: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_C: gl.constexpr, TILES: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, LAYER: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_C, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = y_buffer.dtype
    out = y_buffer.index(WHO)
    step = 0
    for tile in range(gl.program_id(0), row_tiles, gl.num_programs(0)):
        m = tile * 128 + WHO * 64
        mu = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, layout))
        spread = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, layout))
        for c in gl.static_range(TILES):
            z = gl.full([64, BLOCK_C], 0.0, gl.float32, layout)
            for k in range(0, K, BLOCK_K):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), step // STAGES & 1)
                a = x_slots.index(stage).slice(WHO * 64, 64)
                z = warpgroup_mma(a, w_slots.index(stage).permute((1, 0)), z, use_acc=k > 0, is_async=True)
                z = warpgroup_mma_wait(1, deps=(z,))
                if k > 0:
                    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
                step += 1
            z = warpgroup_mma_wait(0, deps=(z,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            j = c * BLOCK_C + gl.arange(0, BLOCK_C, layout=gl.SliceLayout(0, layout))
            if b is not None:
                z = z + gl.load(b + j, j < N, 0.0).to(gl.float32)[None, :]
            if LAYER:
                mu, spread = _join(z, mu, spread, j, N, c, BLOCK_C)
            else:
                spread += gl.sum(z * z, 1)
            if c + 1 < TILES:
                tma.store_wait(0)
                out.store(z.to(dtype))
            else:
                r = gl.rsqrt(spread / N + eps)
                i = m + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
                gl.store(rstd + i, r, i < rows)
                if TILES == 2:
                    r_flat = gl.convert_layout(r, gl.SliceLayout(1, flat))
                    mu_flat = gl.convert_layout(mu, gl.SliceLayout(1, flat))
                    for part in gl.static_range(BLOCK_C // 64):
                        panel = out.slice(part * 64, 64, dim=1)
                        columns = part * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, flat))
                        panel.store(_finish(panel.load(flat).to(gl.float32), mu_flat, r_flat, weight, bias, columns, N).to(dtype))
                    fence_async_shared()
                    tma.async_copy_shared_to_global(y, [m, 0], out)
                result = _finish(z, mu, r, weight, bias, j, N).to(dtype)
                tma.store_wait(0)
                out.store(result)
                fence_async_shared()
                tma.async_copy_shared_to_global(y, [m, c * BLOCK_C], out)
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
    y_buffer = gl.allocate_shared_memory(dtype, [2, 64, BLOCK_C], gl.NVMMASharedLayout.get_default_for([64, BLOCK_C], dtype))
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
