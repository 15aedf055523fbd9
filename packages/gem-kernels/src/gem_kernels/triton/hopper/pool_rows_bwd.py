"""The gradient of the rows of `pool_rows` on Hopper: g = (e a + w dy) / r, with a sample's dy, for tiles of 128 rows that end with samples.

    producer    a | e w | dy dy dy ... | e w | ...     a [M, C] stays; a tile's e and w; dy by blocks of 64 columns
    consumers   64 rows each: e and w in registers, block by block of columns two products, g to where e was, and from there out

Beside e, w and g, which the memory has to move, a tile reads M·C elements of dy from the L2 cache; the portable kernel reads a as well.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.hopper.common import fill_rows, load_box, make_barriers, store_box


@gluon.jit
def _tile(tiles, offsets, at):
    """(sample, first row of it, rows of it, first row of the tile within it)."""
    entry = gl.load(tiles + at)
    sample = entry >> 32
    row = gl.load(offsets + sample).to(gl.int32)
    rows = gl.load(offsets + sample + 1).to(gl.int32) - row
    return sample.to(gl.int32), row, rows, (entry & 0xFFFFFFFF).to(gl.int32) * 128


@gluon.jit
def _load_own(e, w, row, rows, start, e_slots, w_slots, full, empty, n, WHO: gl.constexpr, M: gl.constexpr):
    mbarrier.wait(empty.index(WHO), (n & 1) ^ 1)
    mbarrier.expect(full.index(WHO), 2 * 2 * 64 * M)
    load_box(e, row, rows, start + WHO * 64, 0, full.index(WHO), e_slots.index(WHO), 64, M)
    load_box(w, row, rows, start + WHO * 64, 0, full.index(WHO), w_slots.index(WHO), 64, M)


@gluon.jit
def _producer(
    e, w, a, dy, tiles, offsets, total, batch, e_slots, w_slots, a_slots, dy_boxes, a_full, own_full, own_empty, dy_full, dy_empty,
    C: gl.constexpr, M: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(a_full.index(0), 2 * M * C)
    for part in gl.static_range(C // 64):
        tma.async_copy_global_to_shared(a, [0, part * 64], a_full.index(0), a_slots.index(part))
    step = 0
    for at in range(gl.program_id(0), total, gl.num_programs(0)):
        sample, row, rows, start = _tile(tiles, offsets, at)
        n = step // (C // 64)
        _load_own(e, w, row, rows, start, e_slots, w_slots, own_full, own_empty, n, 0, M)
        for c in range(C // 64):
            stage = step % STAGES
            mbarrier.wait(dy_empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(dy_full.index(stage), 2 * M * 64)
            for group in gl.static_range(G):
                first = (group * batch + sample) * (M // G)
                tma.async_copy_global_to_shared(dy, [first, c * 64], dy_full.index(stage), dy_boxes.index(stage * G + group))
            if c == 0:
                _load_own(e, w, row, rows, start, e_slots, w_slots, own_full, own_empty, n, 1, M)
            step += 1


@gluon.jit
def _consumer(
    g, r, tiles, offsets, total, e_slots, w_slots, a_slots, dy_slots, out_slots, a_full, own_full, own_empty, dy_full, dy_empty,
    WHO: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    held: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    mbarrier.wait(a_full.index(0), 0)
    step = 0
    for at in range(gl.program_id(0), total, gl.num_programs(0)):
        _sample, row, rows, start = _tile(tiles, offsets, at)
        i = start + WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        divided = 1.0 / gl.load(r + row + i, i < rows, 1.0)
        mbarrier.wait(own_full.index(WHO), step // (C // 64) & 1)
        e_held = e_slots.index(WHO).load(held)
        w_held = w_slots.index(WHO).load(held)
        for c in range(C // 64):
            stage = step % STAGES
            mbarrier.wait(dy_full.index(stage), step // STAGES & 1)
            acc = gl.full([64, 64], 0.0, gl.float32, layout)
            acc = warpgroup_mma(e_held, a_slots.index(c), acc, is_async=True)
            acc = warpgroup_mma(w_held, dy_slots.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(dy_empty.index(stage), count=1)
            tma.store_wait(1)  # the block before the last has left its buffer
            out = out_slots.index(WHO * 2 + c % 2)
            out.store((acc * divided[:, None]).to(out.dtype))
            fence_async_shared()
            store_box(g, row, rows, start + WHO * 64, c * 64, out, 64, 64)
            step += 1
        tma.store_wait(0)
        mbarrier.arrive(own_empty.index(WHO), count=1)


@gluon.jit(do_not_specialize=["batch", "rows"])
def hopper_pool_rows_drows_kernel(
    e, w, a, dy, g, g_rows, r, tiles, tile_count, offsets, batch, rows,
    C: gl.constexpr, M: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """``g_rows``: a plain pointer to g, whose rows past the last offset become zero."""
    fill_rows(g_rows, gl.load(offsets + batch).to(gl.int64), rows, C, 0.0, C, num_warps)
    total = gl.load(tile_count)
    dtype: gl.constexpr = e.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, M], dtype)
    block: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    e_slots = gl.allocate_shared_memory(dtype, [2, 64, M], wide)
    w_slots = gl.allocate_shared_memory(dtype, [2, 64, M], wide)
    a_slots = gl.allocate_shared_memory(dtype, [C // 64, M, 64], block)
    dy_boxes = gl.allocate_shared_memory(dtype, [STAGES * G, M // G, 64], block)
    dy_slots = dy_boxes._reinterpret(dtype, [STAGES, M, 64], block)
    out_slots = e_slots._reinterpret(dtype, [4, 64, 64], block)
    a_full, own_full, own_empty = make_barriers(1, 1), make_barriers(2, 1), make_barriers(2, 1)
    dy_full, dy_empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_consumer, (g, r, tiles, offsets, total, e_slots, w_slots, a_slots, dy_slots, out_slots, a_full, own_full, own_empty,
                         dy_full, dy_empty, 0, C, STAGES)),
            (_consumer, (g, r, tiles, offsets, total, e_slots, w_slots, a_slots, dy_slots, out_slots, a_full, own_full, own_empty,
                         dy_full, dy_empty, 1, C, STAGES)),
            (_producer, (e, w, a, dy, tiles, offsets, total, batch, e_slots, w_slots, a_slots, dy_boxes, a_full, own_full, own_empty,
                         dy_full, dy_empty, C, M, G, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
