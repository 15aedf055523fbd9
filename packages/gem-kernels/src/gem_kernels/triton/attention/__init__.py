"""`jagged_attention` and `gdpa` in Triton: one template a pass, softmax or pointwise, with every option of the contract.

| file | holds |
|---|---|
| `spec` | the implementations offered, and what each supports |
| `plan`, `inputs` | what is known of a call from its problem, and from its tensors |
| `schedule` | the list of valid tiles, built on the device |
| `forward`, `forward_resident` | forward kernels: keys streamed, or held on chip |
| `backward_dq`, `backward_dkdv` | backward kernels by query and by key tiles; `backward_rows`, `backward_bias` for the rest |
| `masks`, `bias`, `activations`, `tiles` | device functions they share |
| `launch_forward`, `launch_backward` | from tensors to launches; the schemes of the backward pass |
| `candidates` | tile configurations the analytic model proposes |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gem_core.hookspecs import KernelSpec


def specs() -> list[KernelSpec]:
    """The implementations of this family; triton is imported when one of them first runs."""
    from gem_kernels.triton.attention import spec

    return spec.specs()
