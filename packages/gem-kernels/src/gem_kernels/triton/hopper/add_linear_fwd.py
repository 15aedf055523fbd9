"""``y = residual + x wᵀ + shift`` on Hopper: the sum of a skip connection beside the product, whose result is not written and read again.

Two warpgroups own 64 rows each of a 128 x 256 tile of y. Each has one buffer of its tile: the residual comes there while the products run,
and the sum leaves from there. Beside it each leaves the sums over its columns of each row, before they are rounded
(`gem_core.ops.row_sums`).
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
    residual, y, shift, sums, rows, total, column_tiles, x_slots, w_slots, buffer, full, empty, ready,
    WHO: gl.constexpr, N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    step = 0
    own = buffer.index(WHO)
    came = ready.index(WHO)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        m = tile // column_tiles * 128 + WHO * 64
        n = tile % column_tiles * BLOCK_N
        acc = gl.full([64, BLOCK_N], 0.0, gl.float32, layout)
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        acc = warpgroup_mma(x_slots.index(stage).slice(WHO * 64, 64), w_slots.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        step += 1
        # the last tile has left the buffer by now
        tma.store_wait(0)
        mbarrier.expect(came, 2 * 64 * BLOCK_N)
        tma.async_copy_global_to_shared(residual, [m, n], came, own)
        for _k in range(BLOCK_K, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            acc = warpgroup_mma(x_slots.index(stage).slice(WHO * 64, 64), w_slots.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if shift is not None:
            j = n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
            acc = acc + gl.load(shift + j, j < N, 0.0).to(gl.float32)[None, :]
        mbarrier.wait(came, tile // gl.num_programs(0) & 1)
        acc = acc + own.load(layout).to(gl.float32)
        own.store(acc.to(buffer.dtype))
        i = m + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        whole = gl.sum(acc, 1)
        away = acc - (whole * (1.0 / BLOCK_N))[:, None]
        to = sums + tile % column_tiles * rows.to(gl.int64) + i
        gl.store(to, whole, i < rows)
        gl.store(to + column_tiles * rows.to(gl.int64), gl.sum(away * away, 1), i < rows)
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [m, n], own)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def hopper_add_linear_fwd_kernel(
    x, w, residual, y, shift, sums, rows,
    N: gl.constexpr, K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    column_tiles = (N + BLOCK_N - 1) // BLOCK_N
    total = (rows + 127) // 128 * column_tiles
    dtype: gl.constexpr = x.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_K], dtype)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_N], dtype)
    x_slots = gl.allocate_shared_memory(dtype, [STAGES, 128, BLOCK_K], tile)
    w_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], tile)
    buffer = gl.allocate_shared_memory(dtype, [2, 64, BLOCK_N], wide)
    full, empty, ready = make_barriers(STAGES, 1), make_barriers(STAGES, 2), make_barriers(2, 1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_consumer, (residual, y, shift, sums, rows, total, column_tiles, x_slots, w_slots, buffer, full, empty, ready,
                         0, N, K, BLOCK_N, BLOCK_K, STAGES)),
            (_consumer, (residual, y, shift, sums, rows, total, column_tiles, x_slots, w_slots, buffer, full, empty, ready,
                         1, N, K, BLOCK_N, BLOCK_K, STAGES)),
            (_producer, (x, w, total, column_tiles, x_slots, w_slots, full, empty, K, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
