"""Low-precision attention for problems with a precision: ``triton-lowp``.

Two ways of scaling, by the problem's ``precision.block``:

- (32, 32), MXFP8: squares, so that every product reads the same codes. On sm_100 and above the products are block-scaled tensor-core
  instructions; below, tiles are decoded to bf16 on chip (exact: four significant bits times a power of two) and multiplied there.
- (128, 128), FP8: one scale for 128 rows of a head, constant along the contraction, so that Hopper's FP8 instructions take the codes as
  they are and a tile's product is multiplied with one number.

The backward pass is the bf16 one over the quantised and decoded Q, K and V, with the forward pass's lse: gradients of what was computed,
dO, P and dS in bf16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gem_core.hookspecs import KernelSpec
from gem_core.ops.contract import YES, Problem, Supported, no
from gem_kernels.triton.common.device import assumed, runs_on

if TYPE_CHECKING:
    from torch import Tensor

NAME = "triton-lowp"
PRIORITY = 50
MX_BLOCK, FP8_BLOCK = (32, 32), (128, 128)


def supports(problem: Problem) -> Supported:
    """Answers from the problem alone; does not touch the device."""
    runnable = runs_on(problem.device)
    if not runnable:
        return runnable
    p = problem.precision
    if p is None:
        return no("only for problems with a precision")
    if p.operands != "e4m3" or p.probabilities != "e4m3" or p.scale_rule != "rceil":
        return no("computes with E4M3 operands and probabilities, scales rounded up (rceil)")
    if p.block not in (MX_BLOCK, FP8_BLOCK):
        return no(f"scales blocks of 32x32 or 128x128, not {p.block[0]}x{p.block[1]}")
    if problem.dtype("q") not in (torch.bfloat16, torch.float32):
        return no(f"takes bfloat16 and float32, not {str(problem.dtype('q')).removeprefix('torch.')}")
    widest = 256 if p.block == MX_BLOCK else 128
    for name, size in (("D", problem.dim("D")), ("Dv", problem.dim("Dv"))):
        if size > widest:
            return no(f"head widths up to {widest} with these blocks; {name} is {size}")
    if p.block == FP8_BLOCK and not assumed() and (problem.arch is None or problem.arch < 90):
        return no("FP8 products need sm_90 or above")
    for tensor, what in (("num_targets", "candidates"), ("context_len", "context rows"), ("bias_position", "a relative bias")):
        if tensor in problem.present:
            return no(f"does not do {what}")
    return YES


def forward(problem: Problem, *tensors: Tensor | None) -> tuple[Any, tuple[Tensor | None, ...]]:
    """See the op's contract: (out, lse) or out, and the saved tensors."""
    from gem_kernels.triton.lowp.launch import forward as run

    out, lse = run(problem, tensors)
    if problem.op == "gdpa":
        return out, tensors
    return (out, lse), (*tensors, out, lse)


def backward(problem: Problem, saved: tuple[Tensor | None, ...], dout: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """See the op's contract: gradients of its differentiable tensors."""
    from gem_kernels.triton.lowp.launch import backward as run

    return run(problem, saved, dout, needs)


def specs() -> list[KernelSpec]:
    return [KernelSpec(op, NAME, forward, backward, supports, PRIORITY) for op in ("jagged_attention", "gdpa")]
