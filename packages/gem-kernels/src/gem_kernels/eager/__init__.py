"""Vectorised PyTorch implementations: what training on a CPU runs on, and any device without kernels of its own."""

from __future__ import annotations

from gem_core import KernelSpec

NAME = "eager"
PRIORITY = 10


def specs() -> list[KernelSpec]:
    """Every implementation of this package, for `gem_kernels.plugin`."""
    from gem_kernels.eager import attention as a

    offered = (
        ("jagged_attention", a.jagged_attention_forward, a.backward),
        ("gdpa", a.gdpa_forward, a.backward),
        ("block_attention", a.block_forward, a.block_backward),
    )
    return [KernelSpec(op, NAME, forward, backward, a.supports, PRIORITY) for op, forward, backward in offered]
