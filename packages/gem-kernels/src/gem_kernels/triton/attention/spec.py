"""The Triton implementations of `jagged_attention` and `gdpa` that gem-kernels offers.

``triton`` chooses among the schemes; the other names force one, for comparison and for the cases where its order of sums matters.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gem_core.hookspecs import KernelSpec
from gem_core.ops.contract import YES, Problem, Supported, no
from gem_kernels.triton.common.device import runs_on

if TYPE_CHECKING:
    from torch import Tensor

PRIORITY = 50
_FORCED = 5
_SCHEMES = ("split", "sample", "atomic")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_HEAD = 256


def supports(problem: Problem, scheme: str | None = None, subtract: bool = False) -> Supported:
    """Answers from the problem alone; does not touch the device."""
    runnable = runs_on(problem.device)
    if not runnable:
        return runnable
    if problem.precision is not None:
        return no("low-precision attention is another implementation's")
    dtype = problem.dtype("q")
    if dtype not in _DTYPES:
        return no(f"computes in float32; {str(dtype).removeprefix('torch.')} needs the eager or the reference implementation")
    for name, size in (("D", problem.dim("D")), ("Dv", problem.dim("Dv"))):
        if size > _MAX_HEAD:
            return no(f"head widths up to {_MAX_HEAD}; {name} is {size}")
    if scheme is None and not subtract:
        return YES
    return _forced(problem, scheme, subtract)


def _forced(problem: Problem, scheme: str | None, subtract: bool) -> Supported:
    from gem_kernels.triton.attention.launch_backward import scheme_supports
    from gem_kernels.triton.attention.launch_forward import subtraction_supports
    from gem_kernels.triton.attention.plan import plan

    if subtract:
        return subtraction_supports(plan(problem))
    return scheme_supports(plan(problem), scheme)


def forward(problem: Problem, *tensors: Tensor | None, subtract: bool = False) -> tuple[Any, tuple[Tensor | None, ...]]:
    """See the op's contract: (out, lse) or out, and the saved tensors."""
    from gem_kernels.triton.attention.launch_forward import forward as run

    out, lse = run(problem, tensors, subtract)
    if problem.op == "gdpa":
        return out, tensors
    return (out, lse), (*tensors, out, lse)


def backward(
    problem: Problem, saved: tuple[Tensor | None, ...], dout: Tensor, needs: tuple[bool, ...], scheme: str | None = None
) -> tuple[Tensor | None, ...]:
    """See the op's contract: gradients of its differentiable tensors."""
    from gem_kernels.triton.attention.launch_backward import backward as run

    return run(problem, saved, dout, needs, scheme)


def specs() -> list[KernelSpec]:
    """``triton`` for both ops, then the forced schemes ``triton-split``, ``triton-sample``, ``triton-atomic``, ``triton-subtract``."""
    found = [KernelSpec(op, "triton", forward, backward, supports, PRIORITY) for op in ("jagged_attention", "gdpa")]
    for op in ("jagged_attention", "gdpa"):
        for scheme in _SCHEMES:
            found.append(
                KernelSpec(op, f"triton-{scheme}", forward, partial(backward, scheme=scheme), partial(supports, scheme=scheme), _FORCED)
            )
    subtract = partial(supports, subtract=True)
    found.append(KernelSpec("jagged_attention", "triton-subtract", partial(forward, subtract=True), backward, subtract, _FORCED))
    return found
