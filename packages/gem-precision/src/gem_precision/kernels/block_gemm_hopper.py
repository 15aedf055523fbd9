"""Product of FP8 operands in strips of 1x128 and squares of 128x128 for Hopper, K cut into parts that fill the GPU.

::

            K blocks of 128, part 0 | part 1 | ...           a program takes (part, tile) after (part, tile)
          +------+------+------+------+
    A 128 | strip scale a row of each block |      two warpgroups own 64 rows each of a 128 x 128 tile: while one scales the
          +------+------+------+------+            products of its block into fp32 registers, the other multiplies
    B 128 | one scale a block          |
          +------+------+------+------+
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

TILE = gl.constexpr(128)


@gluon.jit
def _barriers(SLOTS: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def _place(task, tiles_m, tiles_n, blocks, per_part):
    """(part, first row, first column, first and last block of K) of a task; neighbours share a part."""
    tiles = tiles_m * tiles_n
    part = task // tiles
    tile = task % tiles
    begin = part * per_part
    return part, tile // tiles_n * TILE, tile % tiles_n * TILE, begin, gl.minimum(begin + per_part, blocks)


@gluon.jit
def _producer(a, b, tasks, tiles_m, tiles_n, blocks, per_part, a_slots, b_slots, full, empty, STAGES: gl.constexpr):
    step = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        _, m, n, begin, end = _place(task, tiles_m, tiles_n, blocks, per_part)
        for block in range(begin, end):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * TILE * TILE)
            tma.async_copy_global_to_shared(a, [m, block * TILE], full.index(stage), a_slots.index(stage))
            tma.async_copy_global_to_shared(b, [n, block * TILE], full.index(stage), b_slots.index(stage))
            step += 1


@gluon.jit
def _consumer(
    a_scales, b_scales, out, M, N, tasks, tiles_m, tiles_n, blocks, per_part, a_slots, b_slots, full, empty, WHO: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    step = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        part, m, n, begin, end = _place(task, tiles_m, tiles_n, blocks, per_part)
        rows = m + WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        here = rows < M
        strip = a_scales + rows
        square = b_scales + (n // TILE).to(gl.int64) * blocks
        acc = gl.full([64, TILE], 0.0, gl.float32, layout)
        scale = gl.load(strip + begin.to(gl.int64) * M, here, 0.0) * gl.load(square + begin)
        for block in range(begin, end):
            stage = step % STAGES
            following = gl.minimum(block + 1, end - 1)
            ahead = gl.load(strip + following.to(gl.int64) * M, here, 0.0)
            ahead_square = gl.load(square + following)
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            zeros = gl.full([64, TILE], 0.0, gl.float32, layout)
            made = warpgroup_mma(
                a_slots.index(stage).slice(WHO * 64, 64), b_slots.index(stage).permute((1, 0)), zeros, use_acc=False,
                max_num_imprecise_acc=128, is_async=True,
            )  # fmt: skip
            made = warpgroup_mma_wait(0, deps=(made,))
            mbarrier.arrive(empty.index(stage), count=1)
            acc += made * scale[:, None]
            scale = ahead * ahead_square
            step += 1
        columns = n + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
        at = (part.to(gl.int64) * M + rows.to(gl.int64))[:, None] * N + columns[None, :]
        gl.store(out + at, acc, here[:, None] & (columns < N)[None, :])


@gluon.jit(do_not_specialize=["tasks", "tiles_m", "tiles_n", "blocks", "per_part"])
def block_gemm_kernel(
    a, b, a_scales, b_scales, out, M, N, tasks, tiles_m, tiles_n, blocks, per_part, STAGES: gl.constexpr, num_warps: gl.constexpr
):  # fmt: skip
    """``a [M, K]``, ``b [N, K]``: descriptors with boxes of 128 x 128. ``a_scales [blocks, M]``, ``b_scales [N/128, blocks]``, ``out
    [parts, M, N]`` fp32."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, TILE], a.dtype)
    a_slots = gl.allocate_shared_memory(a.dtype, [STAGES, TILE, TILE], tile)
    b_slots = gl.allocate_shared_memory(a.dtype, [STAGES, TILE, TILE], tile)
    full, empty = _barriers(STAGES, 1), _barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (a_scales, b_scales, out, M, N, tasks, tiles_m, tiles_n, blocks, per_part, a_slots, b_slots, full, empty, 0, STAGES),
            ),
            (
                _consumer,
                (a_scales, b_scales, out, M, N, tasks, tiles_m, tiles_n, blocks, per_part, a_slots, b_slots, full, empty, 1, STAGES),
            ),
            (_producer, (a, b, tasks, tiles_m, tiles_n, blocks, per_part, a_slots, b_slots, full, empty, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
