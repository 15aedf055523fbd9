"""Forward pass of `norm_linear` on Hopper: y = rstd(x) · (x wᵀ) + shift, the RMSNorm all but free beside the product.

Three warpgroups own 64 rows each of a 192 x 256 tile of y: with 128 rows a quarter more would come from the L2 cache for the same y. While
their products run, they read the same tiles of x from shared memory once more and add up the squares of the rows; the epilogue applies
the norm. A warpgroup has 160 registers, 128 of which are accumulators: y leaves by way of two buffers of 64 columns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.hopper.common import make_barriers
from gem_kernels.triton.hopper.halves import halves


@gluon.jit
def _producer(
    x, w, total, column_tiles, x_slots, w_slots, full, empty,
    K: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        m = tile // column_tiles * 192
        n = tile % column_tiles * 256
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * (192 + 256) * BLOCK_K)
            for who in gl.static_range(3):
                tma.async_copy_global_to_shared(x, [m + who * 64, k], full.index(stage), x_slots.index(stage * 3 + who))
            tma.async_copy_global_to_shared(w, [n, k], full.index(stage), w_slots.index(stage))
            step += 1


@gluon.jit
def _squares(x):
    """[rows, columns / 8] of x: squares of the 8 values that a thread holds, added up."""
    return gl.sum(gl.reshape(x * x, [x.shape[0], x.shape[1] // 8, 8]), 2)


@gluon.jit
def _leave(y, m, n, acc, r, shift, buffer, N: gl.constexpr):
    """64 columns of y from n on, by way of a buffer; there are two, used in turn, and one may still be read meanwhile."""
    layout: gl.constexpr = acc.type.layout
    acc = acc * gl.convert_layout(r, gl.SliceLayout(1, layout))[:, None]
    if shift is not None:
        j = n + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
        acc = acc + gl.load(shift + j, j < N, 0.0)[None, :]
    tma.store_wait(1)
    buffer.store(acc.to(buffer.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(y, [m, n], buffer)


@gluon.jit
def _consumer(
    y, rstd, shift, total, column_tiles, x_slots, w_slots, y_buffer, full, empty, rows, eps,
    WHO: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    # ptxas refuses an instruction of 256 columns where a program has four warpgroups
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])
    first, second = y_buffer.index(2 * WHO), y_buffer.index(2 * WHO + 1)
    step = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        m = tile // column_tiles * 192 + WHO * 64
        n = tile % column_tiles * 256
        left = gl.full([64, 128], 0.0, gl.float32, layout)
        right = gl.full([64, 128], 0.0, gl.float32, layout)
        squares = _squares(gl.full([64, BLOCK_K], 0.0, gl.float32, flat))
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            a, b = x_slots.index(stage * 3 + WHO), w_slots.index(stage)
            left = warpgroup_mma(a, b.slice(0, 128).permute((1, 0)), left, is_async=True)
            right = warpgroup_mma(a, b.slice(128, 128).permute((1, 0)), right, is_async=True)
            squares += _squares(a.load(flat).to(gl.float32))
            left, right = warpgroup_mma_wait(2, deps=(left, right))
            if k > 0:
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        left, right = warpgroup_mma_wait(0, deps=(left, right))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        r = gl.rsqrt(gl.sum(squares, 1) / K + eps)
        i = m + gl.arange(0, 64, layout=r.type.layout)
        gl.store(rstd + i, r, (i < rows) & (n == 0))
        one, other = halves(left)
        _leave(y, m, n, one, r, shift, first, N)
        _leave(y, m, n + 64, other, r, shift, second, N)
        one, other = halves(right)
        _leave(y, m, n + 128, one, r, shift, first, N)
        _leave(y, m, n + 192, other, r, shift, second, N)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def hopper_norm_linear_fwd_kernel(
    x, w, y, rstd, shift, rows, eps,
    N: gl.constexpr, K: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """y [rows, N] and rstd [rows]; x [rows, K], w [N, K]."""
    column_tiles = (N + 255) // 256
    total = (rows + 191) // 192 * column_tiles
    dtype: gl.constexpr = x.dtype
    x_slots = gl.allocate_shared_memory(dtype, [STAGES * 3, 64, BLOCK_K], gl.NVMMASharedLayout.get_default_for([64, BLOCK_K], dtype))
    w_slots = gl.allocate_shared_memory(dtype, [STAGES, 256, BLOCK_K], gl.NVMMASharedLayout.get_default_for([256, BLOCK_K], dtype))
    y_buffer = gl.allocate_shared_memory(dtype, [6, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype))
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 3)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_consumer, (y, rstd, shift, total, column_tiles, x_slots, w_slots, y_buffer, full, empty, rows, eps,
                         0, N, K, BLOCK_K, STAGES)),
            (_consumer, (y, rstd, shift, total, column_tiles, x_slots, w_slots, y_buffer, full, empty, rows, eps,
                         1, N, K, BLOCK_K, STAGES)),
            (_consumer, (y, rstd, shift, total, column_tiles, x_slots, w_slots, y_buffer, full, empty, rows, eps,
                         2, N, K, BLOCK_K, STAGES)),
            (_producer, (x, w, total, column_tiles, x_slots, w_slots, full, empty, K, BLOCK_K, STAGES)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )
    # fmt: on
