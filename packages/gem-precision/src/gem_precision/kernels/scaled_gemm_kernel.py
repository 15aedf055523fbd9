"""The kernel behind `gem_precision.kernels.scaled_gemm`. One program owns a tile of the result; tiles are walked in groups of
``GROUP`` rows of tiles, so that neighbours share operands in the L2."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled_gemm_kernel(
    a, a_scales, b, b_scales, out, M, N, K,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    per_group = GROUP * tiles_n
    first = program // per_group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    tile_m = first + program % per_group % height
    tile_n = program % per_group // height
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    strips = tl.cdiv(K, 32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        s = start // 32 + tl.arange(0, BLOCK_K // 32)
        left = tl.load(a + rows[:, None] * K + k[None, :], mask=(rows < M)[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(b + cols[None, :] * K + k[:, None], mask=(cols < N)[None, :] & (k < K)[:, None], other=0.0)
        left_scales = tl.load(a_scales + rows[:, None] * strips + s[None, :], mask=(rows < M)[:, None] & (s < strips)[None, :], other=0)
        right_scales = tl.load(b_scales + cols[:, None] * strips + s[None, :], mask=(cols < N)[:, None] & (s < strips)[None, :], other=0)
        acc = tl.dot_scaled(left, left_scales, A_FORMAT, right, right_scales, B_FORMAT, acc)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(out + rows[:, None] * N + cols[None, :], acc.to(out.dtype.element_ty), mask=inside)
