"""The Hopper implementations of `jagged_attention` and `gdpa` that gem-kernels offers.

``hopper`` takes these kernels where they were measured to be faster and the portable ones elsewhere, pass by pass; ``hopper-only`` takes no
others.
"""

from __future__ import annotations

import functools
import importlib.metadata
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gem_core.hookspecs import KernelSpec
from gem_core.ops.contract import YES, Problem, Supported, no
from gem_kernels.triton.attention import spec as portable

if TYPE_CHECKING:
    from torch import Tensor

PRIORITY = 6
"""Below the portable kernels until measured."""
_FORCED = 5
_TRITON = "3.6"
_WIDTHS = (64, 128)


@functools.lru_cache(maxsize=1)
def _dialect() -> Supported:
    """Whether the installed triton has the Gluon dialect that the kernels are written in; does not import it."""
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return no("triton is not installed")
    if found.rpartition(".")[0] != _TRITON:
        return no(f"written in the Gluon dialect of Triton {_TRITON}, which is not stable from version to version; this is {found}")
    return YES


def supports(problem: Problem) -> Supported:
    """Answers from the problem alone; does not touch the device and imports no triton."""
    if problem.device != "cuda" or problem.arch is None or problem.arch // 10 != 9:
        return no(f"written for CUDA devices of sm_90; this is {problem.device} {problem.arch or ''}".rstrip())
    answer = portable.supports(problem)
    if not answer:
        return answer
    if problem.dtype("q") == torch.float32:
        return no("multiplies bf16 or fp16")
    d, dv = problem.dim("D"), problem.dim("Dv")
    if d != dv or d not in _WIDTHS:
        return no(f"head widths D = Dv of 64 or 128; they are {d} and {dv}")
    if problem.present or problem.option("broadcast_q", False):
        return no("no bias, candidates, context, request sharing or shared q")
    return _dialect()


def forward(problem: Problem, *tensors: Tensor | None, only: bool = False) -> tuple[Any, tuple[Tensor | None, ...]]:
    """See the op's contract: (out, lse) or out, and the saved tensors."""
    from gem_kernels.triton.hopper.launch import forward as run

    out, lse = run(problem, tensors, only)
    if problem.op == "gdpa":
        return out, tensors
    return (out, lse), (*tensors, out, lse)


def backward(
    problem: Problem, saved: tuple[Tensor | None, ...], dout: Tensor, needs: tuple[bool, ...], only: bool = False
) -> tuple[Tensor | None, ...]:
    """See the op's contract: gradients of its differentiable tensors."""
    from gem_kernels.triton.hopper.launch import backward as run

    return run(problem, saved, dout, needs, only)


def specs() -> list[KernelSpec]:
    """``hopper`` and ``hopper-only`` of both ops."""
    found = [KernelSpec(op, "hopper", forward, backward, supports, PRIORITY) for op in ("jagged_attention", "gdpa")]
    for op in ("jagged_attention", "gdpa"):
        only = partial(forward, only=True), partial(backward, only=True)
        found.append(KernelSpec(op, "hopper-only", *only, supports, _FORCED))
    return found
