"""What the kernels of summed Wukong experts can do. Nothing here imports triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_core.hookspecs import KernelSpec
from gem_core.ops.contract import Problem, Supported, no
from gem_core.ops.expert_tokens import OP
from gem_kernels.triton.common.device import device_info, runs_on
from gem_kernels.triton.common.launch import launch

PRIORITY = 50
MOST = 4
"""Experts whose gradients a program reads."""
HELD = 1 << 14
"""Values of the weight's gradient that a program holds in registers, in fp32."""
ROOMY = (9, 10)
"""NVIDIA's generations whose multiprocessors have the shared memory: up to 167 KiB for a program, and 112 for 128 tokens."""
FORWARD: dict[str, Any] = {"BLOCK": 64, "num_warps": 4, "num_stages": 2}
PROGRAMS = 1
"""Programs of the backward pass for each multiprocessor, which has registers for no more."""
BACKWARD: dict[str, Any] = {"BLOCK": 64, "num_warps": 8, "num_stages": 1}


def _pads(problem: Problem) -> dict[str, int]:
    n, f, p = problem.dim("N"), problem.dim("F"), problem.dim("E") * problem.dim("R")
    sizes = {"N_PAD": n, "P_PAD": p, "F_PAD": f, "REST_PAD": n - f}
    return {name: max(16, 1 << max(0, size - 1).bit_length()) for name, size in sizes.items()}


def _dims(problem: Problem) -> dict[str, int]:
    return {name: problem.dim(name) for name in ("N", "D", "E", "R", "F")}


def supports(problem: Problem) -> Supported:
    pads, dtype = _pads(problem), problem.dtype("x")
    if dtype not in (torch.bfloat16, torch.float16) and (problem.device == "cuda" or dtype != torch.float32):
        return no("bf16 and fp16; other products are faster in the library")
    if not 1 <= problem.dim("E") <= MOST:
        return no(f"up to {MOST} experts, got {problem.dim('E')}")
    if pads["N_PAD"] * (pads["P_PAD"] + pads["REST_PAD"]) > HELD:
        return no("more tokens, or more columns of products, than a program holds")
    if problem.device == "cuda" and (torch.version.hip or (problem.arch is not None and problem.arch // 10 not in ROOMY)):
        return no(f"written for the shared memory of sm_90 and sm_100; this is {'ROCm' if torch.version.hip else f'sm_{problem.arch}'}")
    return runs_on(problem.device)


def forward(problem: Problem, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    """See `gem_core.ops.expert_tokens`: x read once and written once, beside the products."""
    from gem_kernels.triton.tokens.kernels import tokens_fwd_kernel

    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    samples, n, _ = x.shape
    total = torch.empty_like(x)
    products = x.new_empty(problem.dim("E"), samples, n * problem.dim("R"))
    launch(
        tokens_fwd_kernel, (samples,), x.device, x, weight, bias, total, products, samples, **_dims(problem), **_pads(problem), **FORWARD
    )
    return (total, products), ()


def backward(problem: Problem, saved: tuple[Tensor, ...], douts: tuple[Tensor, ...], needs: tuple[bool, ...]) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; the latter's partial sums take 4 bytes a value and program."""
    from gem_kernels.triton.common.sums import sum_rows
    from gem_kernels.triton.tokens.kernels import tokens_bwd_kernel

    x, weight = (t.contiguous() for t in saved)
    dtotal, *dproducts = (t.contiguous() for t in douts)
    samples, programs = x.shape[0], max(1, min(x.shape[0], PROGRAMS * device_info(x.device).sms))
    dx = torch.empty_like(x)
    partial = torch.empty((programs, *weight.shape), dtype=torch.float32, device=x.device)
    given = [*dproducts, *[dproducts[0]] * (MOST - len(dproducts))]
    sizes = {**_dims(problem), **_pads(problem), **BACKWARD}
    del sizes["F_PAD"]
    launch(tokens_bwd_kernel, (programs,), x.device, x, weight, dtotal, *given, dx, partial, samples, **sizes)
    return dx, sum_rows(partial.view(1, programs, -1), weight.dtype).view(weight.shape)


def specs() -> list[KernelSpec]:
    """One implementation called "triton"."""
    return [KernelSpec(op=OP, name="triton", forward=forward, backward=backward, supports=supports, priority=PRIORITY)]
