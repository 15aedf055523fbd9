"""`jagged_attention` and `gdpa` for sm_90 in Triton's Gluon dialect: TMA, wgmma and warp specialisation by hand.

| file | holds |
|---|---|
| `spec` | the implementations offered, and what each supports |
| `common` | work list, boxes and barriers that the kernels share |
| `forward`, `backward_dq`, `backward_dkdv`, `backward_few` | the kernels |
| `launch` | from tensors to launches, and which of these kernels are worth it where |

What the kernels compute, and the meaning of plans, masks and activations, is `gem_kernels.triton.attention`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gem_core.hookspecs import KernelSpec


def specs() -> list[KernelSpec]:
    """The implementations of this family; triton is imported when one of them first runs."""
    from gem_kernels.triton.hopper import add_linear, pool_rows, spec

    return [*spec.specs(), *add_linear.specs(), *pool_rows.specs()]
