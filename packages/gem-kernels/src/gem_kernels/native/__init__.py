"""Kernels in C for inference in float32 on a CPU, compiled by the machine's own compiler when they are first chosen.

Training, other dtypes, and machines without a compiler use the implementations in `gem_kernels.eager`.
"""

from __future__ import annotations

from typing import Any

from gem_core import KernelSpec

NAME = "native"
PRIORITY = 20


def specs() -> list[KernelSpec]:
    """Every implementation of this package, for `gem_kernels.plugin`."""
    from gem_kernels.native import calls as c
    from gem_kernels.native.program import program

    offered: dict[str, Any] = {
        "jagged_attention": c.jagged_attention,
        "gdpa": c.gdpa,
        "norm": c.norm,
        "norm_linear": c.norm_linear,
        "jagged_concat": c.concat,
        "jagged_expand": c.expand,
        "program": program,
    }
    return [KernelSpec(op, NAME, forward, None, c.supports, PRIORITY) for op, forward in offered.items()]
