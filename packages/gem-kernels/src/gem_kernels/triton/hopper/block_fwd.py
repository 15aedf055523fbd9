"""Forward pass of `block_attention` with rotary positions on Hopper.

One program a slot and head, as in `gem_kernels.triton.block.kernels`. Its q, k and v come by TMA, which takes no registers, so that all are
under way at once; the portable kernel turns a tile in the registers that it was loaded to, and has none left for the next one.

    k, q ─► shared memory ─► turned there, half of the rows at a time ─► S = q kᵀ     v meanwhile likewise ─► O = P v ─► out, by TMA
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.hopper.common import LOG2E, load_box, make_barriers, store_box


@gluon.jit
def _locate(offsets, slot, batch, total_rows, BLOCK: gl.constexpr):
    """`gem_kernels.triton.block.kernels.locate`."""
    PROBES: gl.constexpr = 128
    low = batch * 0
    high = batch
    probe = gl.arange(0, PROBES, layout=gl.BlockedLayout([1], [32], [4], [0])) + 1
    while low < high:
        step = (high - low + PROBES - 1) // PROBES
        middle = low + probe * step
        first = gl.load(offsets + middle, middle <= high, 0).to(gl.int64) // BLOCK + middle
        passed = gl.sum(((middle <= high) & (first <= slot)).to(gl.int32), 0)
        high = gl.minimum(high, low + (passed + 1) * step - 1)
        low += passed * step
    begin = gl.load(offsets + low).to(gl.int64)
    end = gl.load(offsets + low + 1, low < batch, 0).to(gl.int64)
    end = gl.where(low < batch, end, total_rows)
    position = (slot - (begin // BLOCK + low)) * BLOCK
    return low, begin + position, gl.minimum(end - begin - position, BLOCK), position


@gluon.jit
def _angles(
    cos, sin, rotary_rows, start, position, rows, table_rows,
    FIRST: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr, BY_ROW: gl.constexpr,
):  # fmt: skip
    """cos and sin [ROWS, D / 2] of rows FIRST and on of the slot. A row outside the table gives NaN: a wrong table must be loud."""
    lanes: gl.constexpr = D // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes, lanes], [4, 1], [1, 0])
    i = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    half = gl.arange(0, D // 2, layout=gl.SliceLayout(0, layout))
    if BY_ROW:
        row = gl.load(rotary_rows + start + i, i < rows, 0).to(gl.int64)
    else:
        row = position + i
    known = (row >= 0) & (row < table_rows)
    at = gl.where(known, row, 0)[:, None] * (D // 2) + half[None, :]
    mask = ((i < rows) & known)[:, None] & (half >= 0)[None, :]
    lost = gl.where((i < rows) & (known == 0), float("nan"), 0.0)[:, None]
    return gl.load(cos + at, mask, 0.0).to(gl.float32) + lost, gl.load(sin + at, mask, 0.0).to(gl.float32) + lost


@gluon.jit
def _turn(tile, c, s):
    """Turns the pairs of columns of ``tile [ROWS, D]``, in shared memory, by angles [ROWS, D / 2]."""
    ROWS: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    lanes: gl.constexpr = D // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    a, b = gl.split(gl.reshape(tile.load(layout).to(gl.float32), [ROWS, D // 2, 2]))
    c = gl.convert_layout(c, a.type.layout, assert_trivial=True)
    s = gl.convert_layout(s, a.type.layout, assert_trivial=True)
    turned = gl.reshape(gl.join(a * c - b * s, a * s + b * c), [ROWS, D])
    tile.store(gl.convert_layout(turned.to(tile.dtype), layout, assert_trivial=True))


@gluon.jit
def _turn_halves(tile, c0, s0, c1, s1):
    """`_turn` of one half of the rows after the other, which takes half of the registers."""
    HALF: gl.constexpr = tile.shape[0] // 2
    _turn(tile.slice(0, HALF), c0, s0)
    _turn(tile.slice(HALF, HALF), c1, s1)


@gluon.jit(do_not_specialize=["batch", "total_rows", "table_rows"])
def hopper_block_fwd_kernel(
    q, k, v, out, offsets, cos, sin, rotary_rows, batch, total_rows, table_rows, scale,
    H: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, BY_ROW: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, D], dtype)
    q_tile = gl.allocate_shared_memory(dtype, [BLOCK, D], tile)
    k_tile = gl.allocate_shared_memory(dtype, [BLOCK, D], tile)
    v_tile = gl.allocate_shared_memory(dtype, [BLOCK, D], tile)
    full = make_barriers(2, 1)
    fence_async_shared()
    pid = gl.program_id(0).to(gl.int64)
    column = (pid % H).to(gl.int32) * D
    sample, start, rows, position = _locate(offsets, pid // H, batch, total_rows, BLOCK)
    if rows > 0:
        row0 = start.to(gl.int32)
        live = rows.to(gl.int32)
        if sample == batch:
            q_tile.store(gl.full([BLOCK, D], 0.0, dtype, o_layout))
        else:
            mbarrier.expect(full.index(0), 2 * 2 * BLOCK * D)
            load_box(k, row0, live, 0, column, full.index(0), k_tile, BLOCK, D)
            load_box(q, row0, live, 0, column, full.index(0), q_tile, BLOCK, D)
            mbarrier.expect(full.index(1), 2 * BLOCK * D)
            load_box(v, row0, live, 0, column, full.index(1), v_tile, BLOCK, D)
            HALF: gl.constexpr = BLOCK // 2
            c0, s0 = _angles(cos, sin, rotary_rows, start, position, rows, table_rows, 0, HALF, D, BY_ROW)
            c1, s1 = _angles(cos, sin, rotary_rows, start, position, rows, table_rows, HALF, HALF, D, BY_ROW)
            mbarrier.wait(full.index(0), 0)
            _turn_halves(k_tile, c0, s0, c1, s1)
            _turn_halves(q_tile, c0, s0, c1, s1)
            fence_async_shared()
            z = gl.full([BLOCK, BLOCK], 0.0, gl.float32, s_layout)
            z = warpgroup_mma(q_tile, k_tile.permute((1, 0)), z, use_acc=False, is_async=True)
            mbarrier.wait(full.index(1), 0)
            _turn_halves(v_tile, c0, s0, c1, s1)
            fence_async_shared()
            z = warpgroup_mma_wait(0, deps=(z,))
            j = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, s_layout))
            z = gl.where((j < live)[None, :], z * (scale * LOG2E), float("-inf"))
            e = gl.exp2(z - gl.max(z, 1)[:, None])
            r = 1.0 / gl.sum(e, 1)
            p = gl.convert_layout(e.to(dtype), gl.DotOperandLayout(0, o_layout, 2), assert_trivial=True)
            acc = gl.full([BLOCK, D], 0.0, gl.float32, o_layout)
            acc = warpgroup_mma(p, v_tile, acc, use_acc=False, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            acc = acc * gl.convert_layout(r, gl.SliceLayout(1, o_layout), assert_trivial=True)[:, None]
            q_tile.store(acc.to(dtype))
        fence_async_shared()
        store_box(out, row0, live, 0, column, q_tile, BLOCK, D)
        tma.store_wait(0)
