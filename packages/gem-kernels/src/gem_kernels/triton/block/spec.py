"""What of block_attention the Triton implementation can do."""

from __future__ import annotations

from typing import Any

import torch

from gem_core.hookspecs import KernelSpec
from gem_core.ops.contract import YES, Problem, Supported, no
from gem_kernels.triton.common.device import runs_on


def supports(problem: Problem) -> Supported:
    """bf16, fp16 and fp32; blocks of 64 and 128 rows; head dims up to 256."""
    where = runs_on(problem.device)
    if not where:
        return where
    if problem.precision is not None:
        return no("low-precision operands are not implemented here")
    dtypes = {problem.dtype(name) for name in ("q", "k", "v")}
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16, torch.float32}:
        return no(f"q, k and v must share one of bf16, fp16, fp32, got {', '.join(sorted(map(str, dtypes)))}")
    if problem.option("block_size", 64) not in (64, 128):
        return no(f"blocks of 64 or 128 rows, got {problem.option('block_size')}")
    block, width = problem.option("block_size", 64), max(problem.dim("D"), problem.dim("Dv"))
    if problem.dtype("q") == torch.float32:
        grouped = problem.dim("H") > problem.dim("Hkv")
        widest = 128 // (2 if grouped else 1) if block == 64 else 0 if grouped else 32
        if width > widest:
            return no("an fp32 block does not fit in shared memory: up to D 128 (64 rows), 64 (grouped heads), 32 (128 rows, no groups)")
    elif width * block > 64 * 256:
        return no("a block of this head dim does not fit in shared memory: up to D 256 (64 rows) or 128 (128 rows)")
    return YES


def forward(problem: Problem, *tensors: Any) -> Any:
    from gem_kernels.triton.block import launch

    return launch.forward(problem, *tensors)


def backward(problem: Problem, saved: Any, dout: Any, needs: tuple[bool, ...]) -> Any:
    from gem_kernels.triton.block import launch

    return launch.backward(problem, saved, dout, needs)


def specs() -> list[KernelSpec]:
    return [KernelSpec(op="block_attention", name="triton", forward=forward, backward=backward, supports=supports, priority=50)]
