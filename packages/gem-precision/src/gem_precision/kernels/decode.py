"""`MX.dequantize` and `FP8.dequantize` of a matrix in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_precision.formats import FP8, MX
from gem_precision.kernels import interpreting, launch, triton_installed

TILE_ROWS, TILE_COLUMNS = 32, 128


def decodes(q: MX | FP8) -> bool:
    """Whether the kernel decodes ``q``: a matrix of 8-bit elements on a CUDA device, and triton is there."""
    return (q.data.is_cuda or interpreting()) and q.data.dim() == 2 and q.elem in ("e4m3", "e5m2") and triton_installed()


def decode_matrix(q: MX | FP8, dtype: torch.dtype) -> Tensor:
    """``[rows, K]`` in ``dtype`` (fp32, bf16 or fp16), bit for bit ``q.dequantize(dtype)``, dense."""
    from gem_precision.kernels.decode_kernel import decode_kernel

    (rows, cols), data = q.shape, q.data.view(torch.uint8)
    out = torch.empty(rows, cols, dtype=dtype, device=data.device)
    (br, bc), scales = (n or size for n, size in zip(q.block, q.shape)), q.scales
    launch(
        decode_kernel, -(-rows // TILE_ROWS) * -(-cols // TILE_COLUMNS), data.device, data, scales, out, rows, cols, *data.stride(),
        *scales.stride(), MX=isinstance(q, MX), E5M2=q.elem == "e5m2", BR=br, BC=bc, LARGEST=torch.finfo(dtype).max,
        BLOCK_R=TILE_ROWS, BLOCK_C=TILE_COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
