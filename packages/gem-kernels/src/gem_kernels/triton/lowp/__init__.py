"""Low-precision `jagged_attention` and `gdpa` in Triton: Q, K, V and P in E4M3 with power-of-two scales (E8M0), one pass over the keys.

| file | holds |
|---|---|
| `spec` | the implementation offered, and what it supports |
| `codec` | device functions: scales, encoding, decoding |
| `quantize` | the kernel that quantises Q, K and V once, and its launch |
| `forward` | the attention kernel |
| `launch` | from tensors to launches; the backward pass |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gem_core.hookspecs import KernelSpec


def specs() -> list[KernelSpec]:
    """The implementations of this family; triton is imported when one of them first runs."""
    from gem_kernels.triton.lowp import spec

    return spec.specs()
