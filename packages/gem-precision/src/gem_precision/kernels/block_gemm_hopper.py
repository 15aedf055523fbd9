"""Product of FP8 operands in strips of 1x128 and squares of 128x128 for Hopper: ``y = a bᵀ + bias + plus`` in 16 bits, or K cut into parts
that fill the GPU and are left in fp32.

::

            K blocks of 128, part 0 | part 1 | ...           a program takes (part, tile) after (part, tile)
          +------+------+------+------+
    A 256 | strip scale a row of each block |      two warpgroups own 128 rows each of a 256 x 128 tile, in two halves of 64: while one
          +------+------+------+------+            scales the products of a half and block into fp32 registers, the other multiplies
    B 128 | one scale a block          |
          +------+------+------+------+

A tile of 256 rows asks the L2 cache for three quarters of the bytes that two of 128 ask for, which is what bounds those.
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
def _place(task, tiles_m, tiles_n, blocks, per_part, PARTS: gl.constexpr):
    """(part, first row, first column, first and last block of K) of a task; neighbours share a part and the rows of A."""
    if PARTS:
        tiles = tiles_m * tiles_n
        part = task // tiles
        tile = task % tiles
        begin = part * per_part
        return part, tile // tiles_n * (2 * TILE), tile % tiles_n * TILE, begin, gl.minimum(begin + per_part, blocks)
    else:
        return 0, task // tiles_n * (2 * TILE), task % tiles_n * TILE, 0, blocks


@gluon.jit
def _producer(
    a, b, tasks, tiles_m, tiles_n, blocks, per_part, a_slots, b_slots, full, empty, PARTS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    step = 0
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        _, m, n, begin, end = _place(task, tiles_m, tiles_n, blocks, per_part, PARTS)
        for block in range(begin, end):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 3 * TILE * TILE)
            tma.async_copy_global_to_shared(a, [m, block * TILE], full.index(stage), a_slots.index(stage))
            tma.async_copy_global_to_shared(b, [n, block * TILE], full.index(stage), b_slots.index(stage))
            step += 1


@gluon.jit
def _done(x):
    """``x``, computed here and not where it is used."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _half(a_slot, b_slot, LAYOUT: gl.constexpr):
    """The product ``[64, 128]`` of 64 rows and a block."""
    zeros = gl.full([64, TILE], 0.0, gl.float32, LAYOUT)
    made = warpgroup_mma(a_slot, b_slot.permute((1, 0)), zeros, use_acc=False, max_num_imprecise_acc=128, is_async=True)
    return warpgroup_mma_wait(0, deps=(made,))


@gluon.jit
def _ahead(
    a_scales, b_scales, bias, M, N, task, tasks, tiles_m, tiles_n, blocks, per_part, WHO: gl.constexpr, PARTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """(scale of the square, of the upper and the lower half's rows, bias) that a task begins with; past the end, some task's."""
    _, m, n, begin, _ = _place(gl.minimum(task, tasks - 1), tiles_m, tiles_n, blocks, per_part, PARTS)
    rows = m + WHO * TILE + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    scale = gl.load(b_scales + (n // TILE * blocks + begin))
    upper = gl.load(a_scales + (begin * M + gl.minimum(rows, M - 1)))
    lower = gl.load(a_scales + (begin * M + gl.minimum(rows + 64, M - 1)))
    if bias is None:
        shift = upper
    else:
        columns = n + gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
        shift = gl.load(bias + columns, columns < N, 0.0)
    return scale, upper, lower, shift


@gluon.jit
def _leave_part(out, acc, part, rows, n, M, N):
    columns = n + gl.arange(0, TILE, layout=gl.SliceLayout(0, acc.type.layout))
    at = (part.to(gl.int64) * M + rows.to(gl.int64))[:, None] * N + columns[None, :]
    gl.store(out + at, acc, (rows < M)[:, None] & (columns < N)[None, :])


@gluon.jit
def _leave(out, acc, plus, buffer, m, n):
    if plus is not None:
        acc += buffer.load(acc.type.layout).to(gl.float32)
    buffer.store(acc.to(buffer.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [m, n], buffer)


@gluon.jit
def _fetch(plus, bar, buffer, WHO: gl.constexpr, m, n):
    """Start to bring a warpgroup's part of ``plus`` to where its result leaves from."""
    # what was there has left by now
    tma.store_wait(0)
    mbarrier.expect(bar, 2 * 2 * 64 * TILE)
    tma.async_copy_global_to_shared(plus, [m, n], bar, buffer.index(2 * WHO))
    tma.async_copy_global_to_shared(plus, [m + 64, n], bar, buffer.index(2 * WHO + 1))


@gluon.jit
def _consumer(
    a_scales, b_scales, out, bias, plus, M, N, tasks, tiles_m, tiles_n, blocks, per_part, a_slots, b_slots, buffer, full, empty, ready,
    WHO: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    step = 0
    scale, upper_ahead, lower_ahead, shift = _ahead(
        a_scales, b_scales, bias, M, N, gl.program_id(0), tasks, tiles_m, tiles_n, blocks, per_part, WHO, PARTS, layout
    )
    for task in range(gl.program_id(0), tasks, gl.num_programs(0)):
        part, m, n, begin, end = _place(task, tiles_m, tiles_n, blocks, per_part, PARTS)
        own = m + WHO * TILE + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        # rows that are not there have the last one's scale, and are not stored
        upper, lower = gl.minimum(own, M - 1), gl.minimum(own + 64, M - 1)
        square = b_scales + n // TILE * blocks
        first = gl.full([64, TILE], 0.0, gl.float32, layout)
        if bias is not None:
            first += shift.to(gl.float32)[None, :]
        second = first
        upper_scale, lower_scale = upper_ahead * scale, lower_ahead * scale
        for block in range(begin, end):
            stage = step % STAGES
            # asked for a whole block ahead; the last block asks for its own again
            following = gl.minimum(block + 1, end - 1)
            upper_ahead, lower_ahead = gl.load(a_scales + (following * M + upper)), gl.load(a_scales + (following * M + lower))
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            a_slot = a_slots.index(stage)
            made = _half(a_slot.slice(WHO * TILE, 64), b_slots.index(stage), layout)
            first = _done(first + made * upper_scale[:, None])
            # a border that ptxas moves no product across: two unscaled ones at a time do not fit into the registers
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            if plus is not None:  # noqa: SIM102, to be decided at compile time
                if block == begin:
                    _fetch(plus, ready.index(WHO), buffer, WHO, m + WHO * TILE, n)
            # not before: a scalar would be waited for ahead of the products
            scale = gl.load(square + following)
            made = _half(a_slot.slice(WHO * TILE + 64, 64), b_slots.index(stage), layout)
            mbarrier.arrive(empty.index(stage), count=1)
            second += made * lower_scale[:, None]
            upper_scale, lower_scale = upper_ahead * scale, lower_ahead * scale
            step += 1
        # before the result leaves, which takes as long as these do to come
        following = task + gl.num_programs(0)
        scale, upper_ahead, lower_ahead, shift = _ahead(
            a_scales, b_scales, bias, M, N, following, tasks, tiles_m, tiles_n, blocks, per_part, WHO, PARTS, layout
        )
        if PARTS:
            _leave_part(out, first, part, own, n, M, N)
            _leave_part(out, second, part, own + 64, n, M, N)
        else:
            if plus is not None:
                mbarrier.wait(ready.index(WHO), task // gl.num_programs(0) & 1)
            else:
                # those of the last tile have left long ago
                tma.store_wait(0)
            _leave(out, first, plus, buffer.index(2 * WHO), m + WHO * TILE, n)
            _leave(out, second, plus, buffer.index(2 * WHO + 1), m + WHO * TILE + 64, n)
    if not PARTS:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "tasks", "tiles_m", "tiles_n", "blocks", "per_part"])
def block_gemm_kernel(
    a, b, a_scales, b_scales, out, bias, plus, M, N, tasks, tiles_m, tiles_n, blocks, per_part, PARTS: gl.constexpr,
    STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """``a [M, K]``, ``b [N, K]``: descriptors with boxes of 256 x 128 and 128 x 128. ``a_scales [blocks, M]``, ``b_scales [N/128,
    blocks]``. ``out``: with ``PARTS`` fp32 ``[parts, M, N]``, else a descriptor of ``[M, N]`` in 16 bits with boxes of 64 x 128, to which
    ``bias [N]`` and ``plus``, a descriptor like ``out``, are added (None: there is none)."""
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, TILE], a.dtype)
    a_slots = gl.allocate_shared_memory(a.dtype, [STAGES, 2 * TILE, TILE], tile)
    b_slots = gl.allocate_shared_memory(a.dtype, [STAGES, TILE, TILE], tile)
    if PARTS:
        buffer = b_slots
    else:
        buffer = gl.allocate_shared_memory(out.dtype, [4, 64, TILE], out.layout)
    full, empty, ready = _barriers(STAGES, 1), _barriers(STAGES, 2), _barriers(2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    a_scales, b_scales, out, bias, plus, M, N, tasks, tiles_m, tiles_n, blocks, per_part, a_slots, b_slots, buffer, full,
                    empty, ready, 0, PARTS, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    a_scales, b_scales, out, bias, plus, M, N, tasks, tiles_m, tiles_n, blocks, per_part, a_slots, b_slots, buffer, full,
                    empty, ready, 1, PARTS, STAGES,
                ),
            ),
            (_producer, (a, b, tasks, tiles_m, tiles_n, blocks, per_part, a_slots, b_slots, full, empty, PARTS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
