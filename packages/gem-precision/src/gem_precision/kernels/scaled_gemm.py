"""Block-scaled matrix product with ``tl.dot_scaled``: ``tcgen05.mma`` with scales on sm_100, decoded to bf16 and ``wgmma`` on sm_90."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gem_precision.formats import MX
from gem_precision.kernels import launch

_TILE = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP": 8, "num_warps": 4, "num_stages": 3}
TILES: dict[str, dict[str, Any]] = {"block_scaled": _TILE, "decoded": _TILE | {"num_warps": 8}}
"""Tiles for sm_100 and above, and for chips where the operands are decoded to bf16 in registers."""


def scaled_gemm(a: MX, b: MX, out_dtype: torch.dtype, tile: dict[str, Any] | None = None) -> Tensor:
    """``a [M, K] @ b [N, K]^T`` -> ``[M, N]``; 8-bit elements in strips of 1x32 (b also in squares of 32x32), accumulated in fp32."""
    from gem_precision.gemm import strip_scales

    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=out_dtype, device=a.data.device)
    if tile is None:
        blackwell = out.is_cuda and torch.cuda.get_device_capability(out.device)[0] >= 10
        tile = TILES["block_scaled" if blackwell else "decoded"]
    left, right = a.data.contiguous(), b.data.contiguous()
    sa, sb = strip_scales(a).contiguous(), strip_scales(b).contiguous()
    programs = -(-m // tile["BLOCK_M"]) * -(-n // tile["BLOCK_N"])
    launch(_kernel(), programs, out.device, left, sa, right, sb, out, m, n, k, A_FORMAT=a.elem, B_FORMAT=b.elem, **tile)
    return out


@lru_cache(maxsize=1)
def _kernel() -> Any:
    from gem_precision.kernels.scaled_gemm_kernel import scaled_gemm_kernel

    return scaled_gemm_kernel
