"""Triton kernels of `norm_linear`: the norm costs a few instructions beside the matrix product, and no memory traffic.

Forward, lazy pre-norm: the rows of x go into the product as they are, their statistics are summed from the same tiles, and the epilogue
applies them; norm_weight is folded into w, norm_bias into the bias ("shift"):

        x [M, K]            wᵀ [K, N]
      ┌───┬───┬───┐        ┌───────┐         y = r (x wᵀ − μ Σw) + shift
      │ ──┼─► │   │ BLOCK_M│   │   │         r, μ from Σ(x − x₀), Σ(x − x₀)² of the row, x₀ its first element, against cancellation
      └───┴───┴───┘        │   ▼   │
        BLOCK_K            └───────┘ BLOCK_N

Backward is matrix products and a pass of the `norm` kernels between them: products with a norm inside, which read their operands from the
L2 cache without multicast, lost more against the vendor's than the pass costs.
The loops over tiles and over the reduction are one (flattened), so that the loads of the next tile run during an epilogue.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.dense.tiles import load_tile, store_tile


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
