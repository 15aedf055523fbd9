"""What summed Wukong experts read tokens for, as an op of its own kind: their products and the tokens that their MLPs add to, at once.

Of ``x [B, n, d]``, ``weight [E r + n - f, n]`` (the transposed Y_e of E experts, r rows each, and below them the sum of their compressions)
and ``bias [f d]``, with ``z_e = Y_eᵀ x``::

    products  x z_eᵀ of each expert  [E, B, n r]
    total     [x_f + bias ; x_rest + weight_rest x]  [B, n, d]

Implementations are `KernelSpec`s of the op "expert_tokens" whose forward takes the problem (dims N, D, E, R and F) and these tensors, all
of one dtype, and gives ((total, products), ()). Their backward takes the problem, (x, weight), (gradient of total, gradients
``[B, n r]`` of the experts' products) and which gradients are wanted, and gives those of x and weight; that of bias is a sum over samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gem_core.hookspecs import KernelSpec
from gem_core.ops import dispatch
from gem_core.ops.contract import Problem, arch_of

OP = "expert_tokens"


@dataclass(frozen=True)
class Implementation:
    """A kernel chosen for a problem."""

    spec: KernelSpec
    problem: Problem

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """(total, products)."""
        (total, products), _ = self.spec.forward(self.problem, x, weight, bias)
        return total, products

    def backward(self, x: Tensor, weight: Tensor, dtotal: Tensor, dproducts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Gradients of x and weight."""
        assert self.spec.backward is not None
        dx, dweight = self.spec.backward(self.problem, (x, weight), (dtotal, *dproducts), (True, True))
        assert dx is not None
        assert dweight is not None
        return dx, dweight


def implementation(x: Tensor, weight: Tensor, experts: int, f: int) -> Implementation | None:
    """The fastest implementation; None without one, or where the configuration's choice for all ops is not the fastest."""
    _, n, d = x.shape
    dims = ("N", n), ("D", d), ("E", experts), ("R", (weight.shape[0] - (n - f)) // experts), ("F", f)
    problem = Problem(OP, x.device.type, arch_of(x.device), (("x", x.dtype),), dims)
    spec = dispatch.fastest(problem)
    return None if spec is None else Implementation(spec, problem)
