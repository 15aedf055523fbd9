"""Gradient of x of `norm_linear` (RMSNorm) on Hopper: g = dy w, dx = r (g - x̂ Σ(g x̂) / K), and x̂ = r x for the weight's product.

Two programs share 128 rows, 256 columns each, so that g stays in accumulators until its rows' sums are known: each leaves its part of a sum
in memory and waits for the other's. The programs of a pair follow one another and there are no more programs than SMs, so that both run, or
the second one begins once any program that waits for nobody has ended.

    producer     dy, w ─► ring            x ─► buffer
    consumers    g = dy w, 64 rows each   part of Σ(g x) ─► memory    x̂, in place ─► memory    the other part ─► dx, in place ─► memory
"""

# ruff: noqa: SIM102, SIM113 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.hopper.common import make_barriers
from gem_kernels.triton.hopper.halves import halves


@gluon.jit
def _tell(at, x):
    """``x``, which has not all bits set, to the program that waits for it at ``at``."""
    asm: gl.constexpr = "st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,l,f", [at.to(gl.int64, bitcast=True), x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _hear(at):
    """What another program tells at ``at``, where all bits were set: waits for it. The value itself is all that is passed on."""
    asm: gl.constexpr = """{
        .reg .pred p;
        .reg .b32 v;
        WAIT: ld.relaxed.gpu.global.b32 v, [$1];
        setp.eq.s32 p, v, -1;
        @p bra WAIT;
        mov.b32 $0, v;
    }"""
    return gl.inline_asm_elementwise(asm, "=f,l", [at.to(gl.int64, bitcast=True)], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _producer(
    dy, w, x, row_tiles, steps, dy_slots, w_slots, buffer, full, empty, x_full, x_empty,
    BLOCK_C: gl.constexpr, BLOCK_R: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    step = 0
    turn = 0
    c = gl.program_id(0) % 2
    for tile in range(gl.program_id(0) // 2, row_tiles, gl.num_programs(0) // 2):
        for n in range(steps):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * BLOCK_R * (128 + BLOCK_C))
            tma.async_copy_global_to_shared(dy, [tile * 128, n * BLOCK_R], full.index(stage), dy_slots.index(stage))
            tma.async_copy_global_to_shared(w, [n * BLOCK_R, c * BLOCK_C], full.index(stage), w_slots.index(stage))
            step += 1
            # by then the consumers have given the buffer back (in their step 2), and it is in time for their epilogue
            if n == gl.minimum(8, steps - 1):
                for who in gl.static_range(2):
                    mbarrier.wait(x_empty.index(who), (turn & 1) ^ 1)
                    mbarrier.expect(x_full.index(who), 2 * 64 * BLOCK_C)
                    tma.async_copy_global_to_shared(x, [tile * 128 + who * 64, c * BLOCK_C], x_full.index(who), buffer.index(who))
        turn += 1


@gluon.jit
def _part_sum(g, x, r):
    """Σ g x of a panel; x becomes x̂."""
    layout: gl.constexpr = g.type.layout
    value = x.load(layout).to(gl.float32)
    x.store((value * gl.convert_layout(r, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]).to(x.dtype))
    return gl.sum(g * value, 1)


@gluon.jit
def _finish(g, x, r, shared):
    """dx of a panel in place of x̂."""
    layout: gl.constexpr = g.type.layout
    value = x.load(layout).to(gl.float32)
    r = gl.convert_layout(r, gl.SliceLayout(1, layout), assert_trivial=True)
    shared = gl.convert_layout(shared, gl.SliceLayout(1, layout), assert_trivial=True)
    x.store((g * r[:, None] - value * shared[:, None]).to(x.dtype))


@gluon.jit
def _consumer(
    dx, xhat, rstd, told, row_tiles, steps, dy_slots, w_slots, buffer, full, empty, x_full, x_empty, rows,
    WHO: gl.constexpr, K: gl.constexpr, BLOCK_C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_C, 16])
    PANEL: gl.constexpr = BLOCK_C // 4
    panel: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PANEL, 16])
    own = buffer.index(WHO)
    c = gl.program_id(0) % 2
    at = WHO * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, panel))
    step = 0
    turn = 0
    for tile in range(gl.program_id(0) // 2, row_tiles, gl.num_programs(0) // 2):
        m = tile * 128 + WHO * 64
        r = gl.load(rstd + tile * 128 + at, tile * 128 + at < rows, 0.0)
        g = gl.full([64, BLOCK_C], 0.0, gl.float32, layout)
        for n in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            g = warpgroup_mma(dy_slots.index(stage).slice(WHO * 64, 64), w_slots.index(stage), g, use_acc=n > 0, is_async=True)
            if n == gl.minimum(2, steps - 1):
                if turn > 0:
                    # the last rows' dx has been read
                    tma.store_wait(0)
                    mbarrier.arrive(x_empty.index(WHO), count=1)
            g = warpgroup_mma_wait(1, deps=(g,))
            if n > 0:
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        g = warpgroup_mma_wait(0, deps=(g,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        mbarrier.wait(x_full.index(WHO), turn & 1)
        left, right = halves(g)
        g0, g1 = halves(left)
        g2, g3 = halves(right)
        x0 = own.slice(0, PANEL, dim=1)
        x1 = own.slice(PANEL, PANEL, dim=1)
        x2 = own.slice(2 * PANEL, PANEL, dim=1)
        x3 = own.slice(3 * PANEL, PANEL, dim=1)
        part = _part_sum(g0, x0, r) + _part_sum(g1, x1, r) + _part_sum(g2, x2, r) + _part_sum(g3, x3, r)
        _tell(told + (tile * 2 + c).to(gl.int64) * 128 + at, part)
        fence_async_shared()
        tma.async_copy_shared_to_global(xhat, [m, c * BLOCK_C], own)
        # Σ(g x̂) = r Σ(g x); dx has another r
        shared = (part + _hear(told + (tile * 2 + 1 - c).to(gl.int64) * 128 + at)) * (r * r) * (1.0 / K)
        tma.store_wait(0)
        _finish(g0, x0, r, shared)
        _finish(g1, x1, r, shared)
        _finish(g2, x2, r, shared)
        _finish(g3, x3, r, shared)
        fence_async_shared()
        tma.async_copy_shared_to_global(dx, [m, c * BLOCK_C], own)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def hopper_norm_linear_dx_kernel(
    dy, w, x, dx, xhat, rstd, told, rows,
    N: gl.constexpr, K: gl.constexpr, BLOCK_C: gl.constexpr, BLOCK_R: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dx and xhat [rows, K]; K <= 2 · BLOCK_C, w [N, K]. An even number of programs; ``told`` has 256 words a tile, all bits set."""
    row_tiles = (rows + 127) // 128
    steps = (N + BLOCK_R - 1) // BLOCK_R
    dtype: gl.constexpr = x.dtype
    dy_slots = gl.allocate_shared_memory(dtype, [STAGES, 128, BLOCK_R], gl.NVMMASharedLayout.get_default_for([128, BLOCK_R], dtype))
    w_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_R, BLOCK_C], gl.NVMMASharedLayout.get_default_for([BLOCK_R, BLOCK_C], dtype))
    buffer = gl.allocate_shared_memory(dtype, [2, 64, BLOCK_C], gl.NVMMASharedLayout.get_default_for([64, BLOCK_C], dtype))
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    x_full, x_empty = make_barriers(2, 1), make_barriers(2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    dx, xhat, rstd, told, row_tiles, steps, dy_slots, w_slots, buffer, full, empty, x_full, x_empty, rows,
                    0, K, BLOCK_C, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    dx, xhat, rstd, told, row_tiles, steps, dy_slots, w_slots, buffer, full, empty, x_full, x_empty, rows,
                    1, K, BLOCK_C, STAGES,
                ),
            ),
            (_producer, (dy, w, x, row_tiles, steps, dy_slots, w_slots, buffer, full, empty, x_full, x_empty, BLOCK_C, BLOCK_R, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
