"""What the update of AdamW can do. Nothing here imports triton."""

from __future__ import annotations

from gem_core.hookspecs import KernelSpec
from gem_core.ops.adamw import OP, Update
from gem_core.ops.contract import Problem, Supported
from gem_kernels.triton.common.device import runs_on
from gem_kernels.triton.common.launch import launch

PRIORITY = 50
BLOCK = {"BLOCK": 2048, "num_warps": 8}


def supports(problem: Problem) -> Supported:
    return runs_on(problem.device)


def forward(problem: Problem, u: Update) -> tuple[None, tuple[()]]:
    """See `gem_core.ops.adamw.Update`: 28 bytes a value with gradient and copy of two bytes each."""
    from gem_kernels.triton.adamw.kernel import adamw_kernel

    n = u.parameter.numel()
    (beta1, beta2), grid = u.betas, (-(-n // BLOCK["BLOCK"]),)
    launch(
        adamw_kernel, grid, u.parameter.device, u.parameter, u.gradient, u.exp_avg, u.exp_avg_sq, u.copy, u.lr, u.corrections, u.scale,
        u.ok, n, beta1, 1 - beta1, beta2, 1 - beta2, u.eps, u.decay, COPY=u.copy is not None, SCALE=u.scale is not None, **BLOCK,
    )  # fmt: skip
    return None, ()


def specs() -> list[KernelSpec]:
    """One implementation called "triton"."""
    return [KernelSpec(op=OP, name="triton", forward=forward, backward=None, supports=supports, priority=PRIORITY)]
