"""``residual + x wᵀ + b`` of many rows as an op of its own kind: the sum beside the product, not in a pass of its own.

Implementations are `KernelSpec`s of the op "add_linear" whose forward takes the problem (dims K = in, N = out), ``residual [M, out]``,
``x [M, in]``, ``w [out, in]`` and ``b [out]``, all of one dtype, and gives (the sum ``[M, out]``, ()). Its gradients are plain products.
They may leave the sums over the result's rows for the norm that reads it next (`gem_core.ops.row_sums`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gem_core.ops import dispatch
from gem_core.ops.contract import Problem, arch_of

OP = "add_linear"
AddLinear = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def implementation(x: Tensor, w: Tensor) -> AddLinear | None:
    """``(residual, x, w, b) -> sum`` by the fastest implementation; None without one, or where the configuration's choice for all ops is
    not the fastest."""
    problem = Problem(OP, x.device.type, arch_of(x.device), (("x", x.dtype),), (("K", w.shape[1]), ("N", w.shape[0])))
    spec = dispatch.fastest(problem)
    return None if spec is None else lambda residual, x, w, b: spec.forward(problem, residual, x, w, b)[0]
