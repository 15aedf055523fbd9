"""Vectorised PyTorch implementations: what training on a CPU runs on, and any device without kernels of its own."""

from __future__ import annotations

from typing import Any

from gem_core import KernelSpec

NAME = "eager"
PRIORITY = 10


def specs() -> list[KernelSpec]:
    """Every implementation of this package, for `gem_kernels.plugin`."""
    from gem_kernels.eager import attention as a
    from gem_kernels.eager import dense as d
    from gem_kernels.eager import moves as m

    offered: dict[str, Any] = {
        "jagged_attention": (a.jagged_attention_forward, a.backward),
        "gdpa": (a.gdpa_forward, a.backward),
        "block_attention": (a.block_forward, a.block_backward),
        "norm": (d.norm_forward, d.norm_backward),
        "norm_linear": (d.norm_linear_forward, d.norm_linear_backward),
        "linear_norm": (d.linear_norm_forward, d.linear_norm_backward),
        "mlp": (d.mlp_forward, d.mlp_backward),
        "norm_gdpa": (d.norm_gdpa_forward, d.norm_gdpa_backward),
        "jagged_concat": (m.concat, None),
        "jagged_split": (m.split, None),
        "jagged_sum": (m.total, None),
        "jagged_mean": (m.mean, None),
        "jagged_expand": (m.expand, None),
        "jagged_to_padded": (m.to_padded, None),
        "padded_to_jagged": (m.from_padded, None),
    }
    return [KernelSpec(op, NAME, forward, backward, a.supports, PRIORITY) for op, (forward, backward) in offered.items()]
