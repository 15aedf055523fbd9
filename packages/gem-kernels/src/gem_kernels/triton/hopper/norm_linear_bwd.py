"""The gradient of x of `norm_linear` on Hopper: the norm's backward pass is the end of the product g = dy w.

What bounds a product without multicast is what it reads from the L2 cache. So a program keeps 128 columns of w in shared memory, streams
rows of dy past them, and has 128 columns of g; up to four programs share the rows of dx, and sum their parts of Σ(g x̂) through memory:

    producer     dy | dy | ...                                 two warpgroups with 64 rows each, a ring and a producer of its own each;
    consumer     g += dy w    say Σ g x̂ of these columns       the products of one run while the other waits for its neighbours
                              x̂ leaves from where x came in
                              hear the other columns' sums     dx = r (g − x̂ Σ(g x̂) / K)

A sum is its own signal: the words begin as -1, which as a float is a NaN that arithmetic does not make. The programs must all be on the
device at a time, which one a multiprocessor and a cooperative launch see to.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from gem_kernels.triton.hopper.common import make_barriers


@gluon.jit
def _producer(
    dy, w, row_tiles, slices, w_slots, slots, w_full, full, empty,
    WHO: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    c = gl.program_id(0) % slices * 128
    if WHO == 0:
        mbarrier.expect(w_full.index(0), 2 * 64 * 128 * CHUNKS)
        for part in gl.static_range(CHUNKS):
            tma.async_copy_global_to_shared(w, [part * 64, c], w_full.index(0), w_slots.index(part))
    step = 0
    for tile in range(gl.program_id(0) // slices, row_tiles, gl.num_programs(0) // slices):
        for n in range(CHUNKS):
            stage = WHO * STAGES + step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(full.index(stage), 2 * 64 * 64)
            tma.async_copy_global_to_shared(dy, [tile * 128 + WHO * 64, n * 64], full.index(stage), slots.index(stage))
            step += 1


@gluon.jit
def _say(at, value):
    """Write fp32 values where other programs wait for them."""
    asm: gl.constexpr = "st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,l,r", [at.to(gl.int64), value.to(gl.int32, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _hear(at):
    """The fp32 values, once they are there."""
    asm: gl.constexpr = "{ .reg .pred p; again: ld.relaxed.gpu.global.b32 $0, [$1]; setp.eq.b32 p, $0, 0xffffffff; @p bra again; }"
    bits = gl.inline_asm_elementwise(asm, "=&r,l", [at.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _consumer(
    x, dx, xhat, rstd, shares, row_tiles, slices, w_slots, slots, buffers, w_full, x_full, full, empty, rows, stride,
    WHO: gl.constexpr, K: gl.constexpr, CHUNKS: gl.constexpr, SLICES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    dtype: gl.constexpr = slots.dtype
    own = gl.program_id(0) % slices
    c = own * 128
    walks = gl.num_programs(0) // slices
    buffer = buffers.index(WHO)
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    step = 0
    count = 0
    mbarrier.expect(x_full.index(WHO), 2 * 64 * 128)
    tma.async_copy_global_to_shared(x, [gl.program_id(0) // slices * 128 + WHO * 64, c], x_full.index(WHO), buffer)
    mbarrier.wait(w_full.index(0), 0)
    for tile in range(gl.program_id(0) // slices, row_tiles, walks):
        m = tile * 128 + WHO * 64
        g = gl.full([64, 128], 0.0, gl.float32, layout)
        for n in range(CHUNKS):
            stage = step % STAGES
            mbarrier.wait(full.index(WHO * STAGES + stage), step // STAGES & 1)
            g = warpgroup_mma(slots.index(WHO * STAGES + stage), w_slots.index(n), g, use_acc=n > 0, is_async=True)
            g = warpgroup_mma_wait(1, deps=(g,))
            if n > 0:
                mbarrier.arrive(empty.index(WHO * STAGES + (step + STAGES - 1) % STAGES), count=1)
            step += 1
        g = warpgroup_mma_wait(0, deps=(g,))
        mbarrier.arrive(empty.index(WHO * STAGES + (step + STAGES - 1) % STAGES), count=1)
        mbarrier.wait(x_full.index(WHO), count & 1)
        r = gl.load(rstd + m + i, m + i < rows, 0.0)
        hat = (buffer.load(layout).to(gl.float32) * r[:, None]).to(dtype)
        _say(shares + own * stride + m + i, gl.sum(g * hat.to(gl.float32), 1))
        if xhat is not None:
            buffer.store(hat)
            fence_async_shared()
            tma.async_copy_shared_to_global(xhat, [m, c], buffer)
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, layout))
        for s in gl.static_range(SLICES):
            total += _hear(shares + s * stride + m + i)
        d = ((g - hat.to(gl.float32) * (total / K)[:, None]) * r[:, None]).to(dtype)
        tma.store_wait(0)
        buffer.store(d)
        fence_async_shared()
        tma.async_copy_shared_to_global(dx, [m, c], buffer)
        tma.store_wait(0)
        mbarrier.expect(x_full.index(WHO), 2 * 64 * 128)
        tma.async_copy_global_to_shared(x, [m + walks * 128, c], x_full.index(WHO), buffer)
        count += 1
    mbarrier.wait(x_full.index(WHO), count & 1)


@gluon.jit(do_not_specialize=["rows", "slices", "stride"])
def hopper_norm_linear_bwd_kernel(
    dy, w, x, dx, xhat, rstd, shares, rows, slices, stride,
    K: gl.constexpr, CHUNKS: gl.constexpr, SLICES: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dx and, where it is given, xhat [rows, K], from dy [rows, N], w [N, K] with N <= 64 · CHUNKS.

    ``shares`` [SLICES, stride] int32 is full of -1.
    """
    row_tiles = (rows + 127) // 128
    dtype: gl.constexpr = dy.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], dtype)
    w_slots = gl.allocate_shared_memory(dtype, [CHUNKS, 64, 128], wide)
    slots = gl.allocate_shared_memory(dtype, [2 * STAGES, 64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype))
    buffers = gl.allocate_shared_memory(dtype, [2, 64, 128], wide)
    w_full, x_full = make_barriers(1, 1), make_barriers(2, 1)
    full, empty = make_barriers(2 * STAGES, 1), make_barriers(2 * STAGES, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    x, dx, xhat, rstd, shares, row_tiles, slices, w_slots, slots, buffers, w_full, x_full, full, empty, rows, stride,
                    0, K, CHUNKS, SLICES, STAGES,
                ),
            ),
            (
                _consumer,
                (
                    x, dx, xhat, rstd, shares, row_tiles, slices, w_slots, slots, buffers, w_full, x_full, full, empty, rows, stride,
                    1, K, CHUNKS, SLICES, STAGES,
                ),
            ),
            (_producer, (dy, w, row_tiles, slices, w_slots, slots, w_full, full, empty, 0, CHUNKS, STAGES)),
            (_producer, (dy, w, row_tiles, slices, w_slots, slots, w_full, full, empty, 1, CHUNKS, STAGES)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip
