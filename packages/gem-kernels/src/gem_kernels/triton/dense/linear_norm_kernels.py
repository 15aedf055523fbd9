"""Triton kernels of `linear_norm`: a program owns whole rows of z = x wᵀ + b, so that the norm is the epilogue of the product.

    chunk 0        chunk 1 (last)          z of a row block does not fit in the accumulators of one program: all chunks but the last are
  ┌───────────┬───────────┐                kept in registers in the tensors' dtype (the rounding an unfused linear layer has), row
  │ registers │ accumu-   │ BLOCK_M        statistics are summed in fp32 as the chunks finish, and the last chunk's end normalises and
  │           │ lators    │                stores all of them.
  └───────────┴───────────┘
     BLOCK_N = 256 columns

Steps over chunks and over the reduction are one loop, so that loads for the next chunk or row block run during an epilogue.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_kernels.triton.dense.tiles import load_tile, store_tile


@triton.jit
def _finish(z, mu, r, weight, bias, y, m, n, rows, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            WEIGHT: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Normalise one chunk and store it."""
    j = n + tl.arange(0, BLOCK_N)
    out = (z.to(tl.float32) - mu[:, None]) * r[:, None]
    if WEIGHT:
        out *= tl.load(weight + j, mask=j < N, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        out += tl.load(bias + j, mask=j < N, other=0.0).to(tl.float32)[None, :]
    store_tile(y, N, out, m, n, rows, N, BLOCK_M, BLOCK_N, TMA)


@triton.jit(do_not_specialize=["rows"])
def linear_norm_fwd_kernel(
    x, w, y, b, weight, bias, rstd, stride_x: tl.constexpr, rows, eps,
    K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LAYER: tl.constexpr, LINEAR_BIAS: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y [rows, N] and rstd; N <= 4 · BLOCK_N."""
    chunks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    steps: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    blocks = tl.cdiv(rows, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dtype: tl.constexpr = y.dtype if TMA else y.dtype.element_ty
    kept0 = tl.zeros([BLOCK_M, BLOCK_N], dtype)
    kept1 = kept0
    kept2 = kept0
    mu = tl.zeros([BLOCK_M], tl.float32)
    spread = tl.zeros([BLOCK_M], tl.float32)
    for s in tl.range(0, tl.cdiv(blocks - tl.program_id(0), tl.num_programs(0)) * (chunks * steps)):
        k = s % steps * BLOCK_K
        chunk = s // steps % chunks
        n = chunk * BLOCK_N
        m = tl.cast(tl.program_id(0) + s // (steps * chunks) * tl.num_programs(0), tl.int64) * BLOCK_M
        a = load_tile(x, stride_x, m, k, rows, K, BLOCK_M, BLOCK_K, TMA)
        c = load_tile(w, K, n, k, N, K, BLOCK_N, BLOCK_K, TMA)
        acc = tl.dot(a, tl.trans(c), acc, input_precision=PRECISION)
        if k == (steps - 1) * BLOCK_K:
            j = n + tl.arange(0, BLOCK_N)
            if LINEAR_BIAS:
                acc += tl.load(b + j, mask=j < N, other=0.0).to(tl.float32)[None, :]
            if LAYER:
                # mean and squared deviations of the chunk, joined with those of the chunks before (Chan, Golub, LeVeque 1979)
                count = tl.cast(tl.minimum(N - n, BLOCK_N), tl.float32)
                chunk_mean = tl.sum(acc, 1) / count
                away = acc - chunk_mean[:, None]
                if N % BLOCK_N != 0:
                    away = tl.where((j < N)[None, :], away, 0.0)
                gap = chunk_mean - mu
                spread += tl.sum(away * away, 1) + gap * gap * (n * count / (n + count))
                mu += gap * (count / (n + count))
            else:
                spread += tl.sum(acc * acc, 1)
            if chunk == chunks - 1:
                r = tl.rsqrt(spread / N + eps)
                i = m + tl.arange(0, BLOCK_M)
                tl.store(rstd + i, r, mask=i < rows)
                _finish(acc, mu, r, weight, bias, y, m, n, rows, N, BLOCK_M, BLOCK_N, WEIGHT, BIAS, TMA)
                if chunks > 1:
                    _finish(kept0, mu, r, weight, bias, y, m, 0, rows, N, BLOCK_M, BLOCK_N, WEIGHT, BIAS, TMA)
                if chunks > 2:
                    _finish(kept1, mu, r, weight, bias, y, m, BLOCK_N, rows, N, BLOCK_M, BLOCK_N, WEIGHT, BIAS, TMA)
                if chunks > 3:
                    _finish(kept2, mu, r, weight, bias, y, m, 2 * BLOCK_N, rows, N, BLOCK_M, BLOCK_N, WEIGHT, BIAS, TMA)
                mu = tl.zeros([BLOCK_M], tl.float32)
                spread = tl.zeros([BLOCK_M], tl.float32)
            elif chunks > 1:
                if chunk == 0:
                    kept0 = acc.to(dtype)
                elif chunks > 2:
                    if chunk == 1:
                        kept1 = acc.to(dtype)
                    elif chunks > 3:
                        kept2 = acc.to(dtype)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
