"""What of norm, norm_linear, linear_norm, mlp and norm_gdpa the Triton implementations can do. Nothing here imports triton."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from gem_core.hookspecs import KernelSpec
from gem_core.ops.contract import Problem, Supported

PRIORITY = 50
OPS = ("norm", "norm_linear", "linear_norm", "mlp", "norm_gdpa")


def _launcher(op: str) -> Any:
    return importlib.import_module(f"gem_kernels.triton.dense.{op}")


def supports(problem: Problem, op: str) -> Supported:
    return _launcher(op).supports(problem)


def forward(problem: Problem, *tensors: Any, op: str) -> Any:
    return _launcher(op).forward(problem, *tensors)


def backward(problem: Problem, saved: Any, dout: Any, needs: tuple[bool, ...], op: str) -> Any:
    return _launcher(op).backward(problem, saved, dout, needs)


def specs() -> list[KernelSpec]:
    """One implementation called "triton" an op."""
    return [
        KernelSpec(
            op=op,
            name="triton",
            forward=partial(forward, op=op),
            backward=partial(backward, op=op),
            supports=partial(supports, op=op),
            priority=PRIORITY,
        )
        for op in OPS
    ]
