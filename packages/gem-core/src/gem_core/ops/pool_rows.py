"""Pooling by queries that all samples share, of the normed rows themselves, as an op of its own kind.

With x̂ = RMSNorm(x) of ``x [N, C]``, the rows of B samples by ``offsets``, and ``a [M, C]``, for each sample::

    y = softmax(scale · a x̂ᵀ) x̂        [M, C]; zeros of a sample without rows

Attention of queries q to keys x̂ W_kᵀ and values x̂ W_vᵀ needs nothing else: its scores are (q W_k) x̂ᵀ and its result is (P x̂) W_vᵀ, so that
with fewer queries than columns no row is projected. A vector added to all keys changes nothing, one added to all values is added to the
result.

Implementations are `KernelSpec`s of the op "pool_rows" whose forward takes the problem (dims C, M and G, options scale and eps), x, a and
offsets, and gives (y ``[G, B, M / G, C]``, saved). Their backward takes the problem, (x, a, offsets, y, saved...), (gradient of y, gradient
that is added to that of x, or None) and which gradients are wanted, and gives those of x and a.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_core.hookspecs import KernelSpec
from gem_core.ops import dispatch, meeting
from gem_core.ops.contract import Problem, arch_of

OP = "pool_rows"


@dataclass(frozen=True)
class Implementation:
    """A kernel chosen for a problem."""

    spec: KernelSpec
    problem: Problem

    def __call__(self, x: Tensor, a: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """(y, x): a later use of that x costs no addition of gradients, as with `gem_core.ops.norm_linear`."""
        later = meeting.Later() if meeting.kept_as_they_are() else None
        y, passed = _PoolRows.apply(self, x, a, offsets, later)
        if later is not None:
            meeting.note_later(passed, later)
        return y, passed


def implementation(x: Tensor, queries: int, groups: int, scale: float, eps: float) -> Implementation | None:
    """The fastest implementation for ``x [N, C]`` and ``queries`` rows of a in ``groups``; None without one, or where the configuration's
    choice for all ops is not the fastest."""
    dims = ("C", x.shape[1]), ("M", queries), ("G", groups)
    problem = Problem(OP, x.device.type, arch_of(x.device), (("x", x.dtype),), dims, (("eps", eps), ("scale", scale)))
    spec = dispatch.fastest(problem)
    return None if spec is None else Implementation(spec, problem)


class _PoolRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Implementation, x: Tensor, a: Tensor, offsets: Tensor, later: meeting.Later | None) -> tuple[Tensor, Tensor]:
        y, saved = run.spec.forward(run.problem, x, a, offsets)
        ctx.save_for_backward(x, a, offsets, y, *saved)
        ctx.run, ctx.later = run, later
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, ...]:
        run, saved = ctx.run, ctx.saved_tensors
        needs = ctx.needs_input_grad[1:3]

        def gradients(beside: Tensor | None) -> tuple[Tensor | None, ...]:
            return (beside, None) if dy is None else run.spec.backward(run.problem, saved, (dy, beside), needs)

        found = meeting.with_late(ctx.later, dx, gradients)
        return None, *(g if need else None for g, need in zip(found, needs)), None, None
