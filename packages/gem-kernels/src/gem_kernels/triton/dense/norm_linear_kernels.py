"""Triton kernels of `norm_linear`: the norm costs a few instructions beside the matrix product, and no memory traffic.

Forward, lazy pre-norm: the rows of x go into the product as they are, their statistics are summed from the same tiles, and the epilogue
applies them; norm_weight is folded into w, norm_bias into the bias ("shift"):

        x [M, K]            wᵀ [K, N]
      ┌───┬───┬───┐        ┌───────┐         y = r (x wᵀ − μ Σw) + shift
      │ ──┼─► │   │ BLOCK_M│   │   │         r, μ from Σ(x − x₀), Σ(x − x₀)² of the row, x₀ its first element, against cancellation
      └───┴───┴───┘        │   ▼   │
        BLOCK_K            └───────┘ BLOCK_N

Backward, dx: g = dy w is the gradient of x̂; the norm's backward needs row sums of g and g x̂ over all K columns. A program owns whole rows,
walks over the column chunks of its row block, leaves g (rounded, as an unfused product would) in dx, and finishes the rows from there while
they are in the cache. Backward, dw: x̂ᵀ dy with x̂ formed in registers, split over the rows; partial results are summed by the host.
Loops over tiles and over the reduction are one loop (flattened), so that the loads of the next tile run during an epilogue.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.dense.norm_epilogue import finish, finish_piece, park, row_sums
from gem_kernels.triton.dense.tiles import load_tile, prefetch_tile, program_barrier, store_tile


@triton.jit
def own_copy(x):
    """The same half-precision values, which the compiler takes for others."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)


@triton.jit(do_not_specialize=["rows"])
def norm_linear_fwd_kernel(
    x, residual, w, y, total, x_rows, residual_rows, shift, column_sum, mean, rstd,
    stride_x: tl.constexpr, stride_r: tl.constexpr, rows, eps,
    K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYER: tl.constexpr, SHIFT: tl.constexpr, RESIDUAL: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y, mean, rstd and total = x + residual. ``x_rows``, ``residual_rows``: plain pointers to x and residual."""
    column_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tl.cdiv(rows, BLOCK_M) * column_tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        m = tl.cast(tile // column_tiles, tl.int64) * BLOCK_M
        n = tile % column_tiles * BLOCK_N
        i = m + tl.arange(0, BLOCK_M)
        first = tl.zeros([BLOCK_M], tl.float32)
        if LAYER:
            first = tl.load(x_rows + i * stride_x, mask=i < rows, other=0.0).to(tl.float32)
            if RESIDUAL:
                first += tl.load(residual_rows + i * stride_r, mask=i < rows, other=0.0).to(tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        sums = tl.zeros([BLOCK_M], tl.float32)
        squares = tl.zeros([BLOCK_M], tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            a = load_tile(x, stride_x, m, k, rows, K, BLOCK_M, BLOCK_K, TMA)
            if RESIDUAL:
                a = (a.to(tl.float32) + load_tile(residual, stride_r, m, k, rows, K, BLOCK_M, BLOCK_K, TMA).to(tl.float32)).to(a.dtype)
                if n == 0:
                    store_tile(total, K, a, m, k, rows, K, BLOCK_M, BLOCK_K, False)
            b = load_tile(w, K, n, k, N, K, BLOCK_N, BLOCK_K, TMA)
            if TMA and not RESIDUAL and a.dtype.primitive_bitwidth == 16:
                # The pipeliner counts no slot for a product that is under way when the tile also has a use in registers: the next load
                # would overwrite what wgmma reads. From registers, the product needs no slot.
                a = own_copy(a)
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
            centred = a.to(tl.float32)
            if LAYER:
                centred -= first[:, None]
                if K % BLOCK_K != 0:
                    centred = tl.where((k + tl.arange(0, BLOCK_K) < K)[None, :], centred, 0.0)
                sums += tl.sum(centred, 1)
            squares += tl.sum(centred * centred, 1)
        j = n + tl.arange(0, BLOCK_N)
        offset = sums / K
        r = tl.rsqrt(squares / K - offset * offset + eps)
        if LAYER:
            mu = first + offset
            acc -= mu[:, None] * tl.load(column_sum + j, mask=j < N, other=0.0)[None, :]
            if n == 0:
                tl.store(mean + i, mu, mask=i < rows)
        if n == 0:
            tl.store(rstd + i, r, mask=i < rows)
        acc *= r[:, None]
        if SHIFT:
            acc += tl.load(shift + j, mask=j < N, other=0.0)[None, :]
        store_tile(y, N, acc, m, n, rows, N, BLOCK_M, BLOCK_N, TMA)


@triton.jit(do_not_specialize=["rows"])
def norm_linear_bwd_dx_kernel(
    dy, w, x, dtotal, dx, mean, rstd, stride_dy: tl.constexpr, stride_x: tl.constexpr, stride_dt: tl.constexpr, rows,
    K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYER: tl.constexpr, DTOTAL: tl.constexpr, TMA: tl.constexpr, NVIDIA: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx = r (g − x̂ mean(g x̂) [− mean(g)]) (+ dtotal), g = dy w. BLOCK_K columns of the reduction N a step."""
    chunks: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    steps: tl.constexpr = (N + BLOCK_K - 1) // BLOCK_K
    blocks = tl.cdiv(rows, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    g_sum = tl.zeros([BLOCK_M], tl.float32)
    gx_sum = tl.zeros([BLOCK_M], tl.float32)
    # one loop by hand: the compiler cannot fuse loops that carry sums from tile to tile
    for s in tl.range(0, tl.cdiv(blocks - tl.program_id(0), tl.num_programs(0)) * (chunks * steps)):
        n = s % steps * BLOCK_K
        chunk = s // steps % chunks
        c = chunk * BLOCK_N
        m = tl.cast(tl.program_id(0) + s // (steps * chunks) * tl.num_programs(0), tl.int64) * BLOCK_M
        if NVIDIA and n == 0:
            prefetch_tile(x, stride_x, m, c, rows, K, BLOCK_M, BLOCK_N)
        a = load_tile(dy, stride_dy, m, n, rows, N, BLOCK_M, BLOCK_K, TMA)
        b = load_tile(w, K, n, c, N, K, BLOCK_K, BLOCK_N, TMA)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if n == (steps - 1) * BLOCK_K:
            i = m + tl.arange(0, BLOCK_M)
            r = tl.load(rstd + i, mask=i < rows, other=0.0)
            mu = tl.load(mean + i, mask=i < rows, other=0.0) if LAYER else tl.zeros([BLOCK_M], tl.float32)
            g_sum, gx_sum = row_sums(acc, x, mu, r, g_sum, gx_sum, m, c, rows, stride_x, K, BLOCK_M, BLOCK_N, PIECE)
            if chunk == chunks - 1:
                g_mean = g_sum / K
                gx_mean = gx_sum / K
                finish(acc, x, dtotal, dx, mu, r, g_mean, gx_mean, m, c, rows, stride_x, stride_dt, K, BLOCK_M, BLOCK_N, PIECE, LAYER,
                        DTOTAL)  # fmt: skip
                if chunks > 1:
                    program_barrier(NVIDIA)
                    for parked in range(0, (chunks - 1) * BLOCK_N, PIECE):
                        g = load_tile(dx, K, m, parked, rows, K, BLOCK_M, PIECE, False)
                        finish_piece(g, x, dtotal, dx, mu, r, g_mean, gx_mean, m, parked, rows, stride_x, stride_dt, K, BLOCK_M, PIECE,
                                      LAYER, DTOTAL)  # fmt: skip
                g_sum = tl.zeros([BLOCK_M], tl.float32)
                gx_sum = tl.zeros([BLOCK_M], tl.float32)
            elif chunks > 1:
                park(acc, dx, m, c, rows, K, BLOCK_M, BLOCK_N, PIECE)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)


@triton.jit(do_not_specialize=["rows", "span"])
def norm_linear_bwd_dw_kernel(
    x, dy, mean, rstd, partial, stride_x: tl.constexpr, stride_dy: tl.constexpr, rows, span,
    K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYER: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partial [splits, N, K] fp32: dyᵀ x̂ over ``span`` rows a split. Programs: (tiles of N × tiles of K, splits)."""
    column_tiles: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    n = tl.program_id(0) // column_tiles * BLOCK_N
    k = tl.program_id(0) % column_tiles * BLOCK_K
    begin = tl.program_id(1).to(tl.int64) * span
    end = tl.minimum(begin + span, rows)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for m in tl.range(begin, end, BLOCK_M):
        i = m + tl.arange(0, BLOCK_M)
        a = load_tile(dy, stride_dy, m, n, rows, N, BLOCK_M, BLOCK_N, TMA)
        b = load_tile(x, stride_x, m, k, rows, K, BLOCK_M, BLOCK_K, TMA)
        hat = b.to(tl.float32)
        if LAYER:
            hat -= tl.load(mean + i, mask=i < rows, other=0.0)[:, None]
        hat *= tl.load(rstd + i, mask=i < rows, other=0.0)[:, None]
        acc = tl.dot(tl.trans(a), hat.to(b.dtype), acc, input_precision=PRECISION)
    p = n + tl.arange(0, BLOCK_N)
    q = k + tl.arange(0, BLOCK_K)
    at = (tl.program_id(1).to(tl.int64) * N + p)[:, None] * K + q[None, :]
    tl.store(partial + at, acc, mask=(p < N)[:, None] & (q < K)[None, :])
