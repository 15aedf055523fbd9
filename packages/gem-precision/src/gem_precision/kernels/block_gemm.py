"""Blockwise FP8 products whose tiles do not fill a Hopper GPU: K is cut into parts, which cuBLAS does for bf16 and not for these."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_precision.formats import FP8
from gem_precision.kernels import launch, lays_out_by_hand, multiprocessors

STAGES = 6
MOST_PARTS, LEAST_BLOCKS = 16, 64
"""At most so many parts, of at least so many blocks of 128 each."""

FULL = 0.8
"""cuBLAS is left alone where its tiles of 128 x 128 keep this share of the multiprocessors busy."""


def parts_of(a: FP8, b: FP8) -> int:
    """Into how many parts of K `block_gemm` should cut ``a [M, K] @ b [N, K]^T``; 0: it is not for this product."""
    fits = a.block == (1, 128) and b.block == (128, 128) and a.elem == b.elem == "e4m3" and lays_out_by_hand(a.data.device)
    if not fits or any(q.data.stride(1) != 1 or (q.data.data_ptr() | q.data.stride(0)) % 16 for q in (a, b)):
        return 0
    tiles, count = -(-a.shape[0] // 128) * -(-b.shape[0] // 128), multiprocessors(a.data.device)

    def busy(parts: int) -> float:
        return tiles * parts / (-(-tiles * parts // count) * count)

    most = min(MOST_PARTS, a.scales.shape[1] // LEAST_BLOCKS)
    if busy(1) >= FULL or most < 2:
        return 0
    best = max(busy(parts) for parts in range(2, most + 1))
    return next(parts for parts in range(2, most + 1) if busy(parts) >= 0.95 * best)


def block_gemm(a: FP8, b: FP8, parts: int) -> Tensor:
    """``[M, N]`` fp32 of ``a [M, K]`` in strips of 1x128 and ``b [N, K]`` in squares, both E4M3 with rows at multiples of 16 bytes. Each
    block of 128 is multiplied as the tensor cores do and added up in fp32."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from gem_precision.kernels.block_gemm_hopper import block_gemm_kernel

    (m, n), blocks = (a.shape[0], b.shape[0]), a.scales.shape[1]
    out = torch.empty(parts, m, n, dtype=torch.float32, device=a.data.device)
    tiles_m, tiles_n = -(-m // 128), -(-n // 128)
    tasks = tiles_m * tiles_n * parts
    layout = gl.NVMMASharedLayout.get_default_for([128, 128], gl.float8e4nv)
    left, right = (TensorDescriptor.from_tensor(q.data, [128, 128], layout) for q in (a, b))
    launch(
        block_gemm_kernel, min(tasks, multiprocessors(out.device)), out.device, left, right, a.scales.t().contiguous(),
        b.scales.contiguous(), out, m, n, tasks, tiles_m, tiles_n, blocks, -(-blocks // parts), STAGES=STAGES, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)
