"""Forward pass of `norm_linear` on Hopper: y = rstd(x) · (x wᵀ) + shift, the RMSNorm all but free beside the product.

Two warpgroups own 64 rows each of a 128 x 256 tile of y. While their products run, they read the same tiles of x from shared memory once
more and add up the squares of the rows; the epilogue applies the norm. (The portable kernel has its products wait for those reads.)
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.hopper.common import make_barriers


@gluon.jit
def _producer(
    x, w, total, column_tiles, x_slots, w_slots, full, empty,
    K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        m = tile // column_tiles * 128
        n = tile % column_tiles * BLOCK_N
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * (128 + BLOCK_N) * BLOCK_K)
            tma.async_copy_global_to_shared(x, [m, k], full.index(stage), x_slots.index(stage))
            tma.async_copy_global_to_shared(w, [n, k], full.index(stage), w_slots.index(stage))
            step += 1


@gluon.jit
def _consumer(
    y, rstd, shift, total, column_tiles, x_slots, w_slots, y_buffer, full, empty, rows, eps,
    WHO: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        m = tile // column_tiles * 128 + WHO * 64
        n = tile % column_tiles * BLOCK_N
        acc = gl.full([64, BLOCK_N], 0.0, gl.float32, layout)
        squares = gl.full([64, BLOCK_K], 0.0, gl.float32, flat)
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            a = x_slots.index(stage).slice(WHO * 64, 64)
            acc = warpgroup_mma(a, w_slots.index(stage).permute((1, 0)), acc, is_async=True)
            part = a.load(flat).to(gl.float32)
            squares += part * part
            acc = warpgroup_mma_wait(1, deps=(acc,))
            if k > 0:
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        r = gl.rsqrt(gl.sum(squares, 1) / K + eps)
        i = m + gl.arange(0, 64, layout=gl.SliceLayout(1, flat))
        gl.store(rstd + i, r, (i < rows) & (n == 0))
        acc = acc * gl.convert_layout(r, gl.SliceLayout(1, layout))[:, None]
        if shift is not None:
            j = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
            acc = acc + gl.load(shift + j, j < N, 0.0)[None, :]
        tma.store_wait(0)
        out = y_buffer.index(WHO)
        out.store(acc.to(y_buffer.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [m, n], out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def hopper_norm_linear_fwd_kernel(
    x, w, y, rstd, shift, rows, eps,
    N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    column_tiles = (N + BLOCK_N - 1) // BLOCK_N
    total = (rows + 127) // 128 * column_tiles
    dtype: gl.constexpr = x.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_K], dtype)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_N], dtype)
    x_slots = gl.allocate_shared_memory(dtype, [STAGES, 128, BLOCK_K], tile)
    w_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], tile)
    y_buffer = gl.allocate_shared_memory(dtype, [2, 64, BLOCK_N], wide)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    y,
                    rstd,
                    shift,
                    total,
                    column_tiles,
                    x_slots,
                    w_slots,
                    y_buffer,
                    full,
                    empty,
                    rows,
                    eps,
                    0,
                    N,
                    K,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                ),
            ),
            (
                _consumer,
                (
                    y,
                    rstd,
                    shift,
                    total,
                    column_tiles,
                    x_slots,
                    w_slots,
                    y_buffer,
                    full,
                    empty,
                    rows,
                    eps,
                    1,
                    N,
                    K,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                ),
            ),
            (_producer, (x, w, total, column_tiles, x_slots, w_slots, full, empty, K, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
