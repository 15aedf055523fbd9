"""The Hopper implementation of the op "add_linear", and its launch."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.hookspecs import KernelSpec
from gem_core.ops import row_sums
from gem_core.ops.add_linear import OP
from gem_core.ops.contract import Problem, Supported, no
from gem_kernels.triton.common.device import device_info
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.dense.support import rows_contiguous
from gem_kernels.triton.hopper import spec
from gem_kernels.triton.hopper.norm_linear import addressable, box

BLOCK_N, BLOCK_K, STAGES = 256, 32, 6

STEP = 64
"""What K is a multiple of, in the sizes that were compared with the product and the addition on an H200."""


def supports(problem: Problem) -> Supported:
    """Half precision, a reduction in whole steps of `STEP` and at least two of them, outputs in whole tiles."""
    answer = spec._on_hopper(problem)
    if not answer:
        return answer
    k, n = problem.dim("K"), problem.dim("N")
    if problem.dtype("x") not in (torch.bfloat16, torch.float16):
        return no("multiplies bf16 or fp16")
    if k % STEP or k < 2 * STEP or n % BLOCK_N:
        return no(f"K in steps of {STEP} from {2 * STEP} on and N in steps of {BLOCK_N}; they are {k} and {n}")
    return spec._dialect()


def forward(problem: Problem, residual: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, tuple[()]]:
    """See `gem_core.ops.add_linear`: residual and x are read once, the sum is written once. Leaves the sums over its rows."""
    from gem_kernels.triton.hopper.add_linear_fwd import hopper_add_linear_fwd_kernel

    (rows, k), n = x.shape, w.shape[0]
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    sums = torch.empty((2, n // BLOCK_N, rows), dtype=torch.float32, device=x.device)
    if rows:
        given = [addressable(rows_contiguous(t)) for t in (x, w, residual)]
        tiles = -(-rows // 128) * -(-n // BLOCK_N)
        launch(
            hopper_add_linear_fwd_kernel, (min(device_info(x.device).sms, tiles),), x.device,
            box(given[0], 128, BLOCK_K), box(given[1], BLOCK_N, BLOCK_K), box(given[2], 64, BLOCK_N), box(y, 64, BLOCK_N), b.contiguous(),
            sums, rows, N=n, K=k, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=STAGES, num_warps=4, maxnreg=168,
        )  # fmt: skip
    row_sums.leave(y, sums)
    return y, ()


def specs() -> list[KernelSpec]:
    """One implementation called "hopper"."""
    return [KernelSpec(OP, "hopper", forward, None, supports, 60)]
