"""Blockwise FP8 products on Hopper by a kernel of this package: tiles of 256 x 128, and K cut into parts where tiles do not fill the GPU,
which cuBLAS does for bf16 and not for these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_precision.formats import FP8
from gem_precision.kernels import launch, lays_out_by_hand, multiprocessors

ROWS, COLUMNS = 256, 128
"""A tile of the result."""

STAGES, STAGES_OF_PARTS = 3, 4
"""Blocks of K in flight: 48 KiB each, beside 64 KiB for a tile that leaves in 16 bits."""

MOST_PARTS, LEAST_BLOCKS = 16, 64
"""At most so many parts, of at least so many blocks of 128 each."""

FULL = 0.8
"""K is not cut where tiles keep this share of the multiprocessors busy."""


def serves(a: FP8, b: FP8) -> bool:
    """Whether the kernel makes ``a [M, K] @ b [N, K]^T`` on its device."""
    fits = a.block == (1, 128) and b.block == (128, 128) and a.elem == b.elem == "e4m3" and lays_out_by_hand(a.data.device)
    if not fits or any(q.data.stride(1) != 1 or (q.data.data_ptr() | q.data.stride(0)) % 16 for q in (a, b)):
        return False
    return 0 < a.scales.numel() < 2**31 and b.data.numel() > 0


def parts_of(a: FP8, b: FP8) -> int:
    """Into how many parts `block_gemm` cuts K so that they fill the GPU; 0: tiles are too few, and K is too short to be cut."""
    tiles, count = -(-a.shape[0] // ROWS) * -(-b.shape[0] // COLUMNS), multiprocessors(a.data.device)

    def busy(parts: int) -> float:
        return tiles * parts / (-(-tiles * parts // count) * count)

    if busy(1) >= FULL:
        return 1
    most = min(MOST_PARTS, a.scales.shape[1] // LEAST_BLOCKS)
    if most < 2:
        return 0
    best = max(busy(parts) for parts in range(2, most + 1))
    return next(parts for parts in range(2, most + 1) if busy(parts) >= 0.95 * best)


def block_gemm(
    a: FP8, b: FP8, parts: int, dtype: torch.dtype = torch.float32, bias: Tensor | None = None, plus: Tensor | None = None
) -> Tensor:
    """``[M, N]`` in ``dtype`` of ``a [M, K]`` in strips of 1x128 and ``b [N, K]`` in squares, both E4M3 with rows at multiples of 16 bytes,
    plus ``bias [N]`` and ``plus [M, N]``, that in ``dtype``. Each block of 128 is multiplied as the tensor cores do and added up in fp32;
    the sum is rounded once."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from gem_precision.kernels.block_gemm_hopper import block_gemm_kernel

    (m, n), blocks, device = (a.shape[0], b.shape[0]), a.scales.shape[1], a.data.device
    tiles_m, tiles_n = -(-m // ROWS), -(-n // COLUMNS)
    tasks = tiles_m * tiles_n * parts
    layout = gl.NVMMASharedLayout.get_default_for([128, 128], gl.float8e4nv)
    left, right = (TensorDescriptor.from_tensor(q.data, [rows, 128], layout) for q, rows in ((a, ROWS), (b, COLUMNS)))
    whole = parts == 1 and dtype in (torch.bfloat16, torch.float16) and n % 8 == 0
    made = torch.empty(m, n, dtype=dtype, device=device) if whole else torch.empty(parts, m, n, dtype=torch.float32, device=device)
    out: Any = made
    more: Any = None
    if whole:
        narrow = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
        box = gl.NVMMASharedLayout.get_default_for([64, COLUMNS], narrow)
        out = TensorDescriptor.from_tensor(made, [64, COLUMNS], box)
        more = None if plus is None else TensorDescriptor.from_tensor(plus.contiguous(), [64, COLUMNS], box)
    launch(
        block_gemm_kernel, min(tasks, multiprocessors(device)), device, left, right, a.scales.t().contiguous(), b.scales.contiguous(), out,
        bias if whole else None, more, m, n, tasks, tiles_m, tiles_n, blocks, -(-blocks // parts), PARTS=not whole,
        STAGES=STAGES if whole else STAGES_OF_PARTS, num_warps=4, maxnreg=168,
    )  # fmt: skip
    if whole:
        return made
    total = made[0] if parts == 1 else made.sum(0)
    for more in (bias, plus):
        total = total if more is None else total.add_(more)
    return total.to(dtype)
