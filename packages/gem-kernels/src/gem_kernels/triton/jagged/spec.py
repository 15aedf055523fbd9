"""The Triton implementations of the jagged ops. Nothing here imports triton."""

from __future__ import annotations

from functools import partial
from typing import Any

from gem_core.hookspecs import KernelSpec
from gem_core.ops.contract import Problem, Supported

PRIORITY = 50
_FUNCTIONS = {
    "jagged_concat": "concat",
    "jagged_split": "split",
    "jagged_sum": "reduce",
    "jagged_mean": "reduce",
    "jagged_expand": "expand",
    "jagged_to_padded": "to_padded",
    "padded_to_jagged": "from_padded",
}


def supports(problem: Problem) -> Supported:
    from gem_kernels.triton.jagged import launch

    return launch.supports(problem)


def forward(problem: Problem, *tensors: Any, function: str, **sizes: Any) -> Any:
    from gem_kernels.triton.jagged import launch

    return getattr(launch, function)(problem, *tensors, **sizes)


def specs() -> list[KernelSpec]:
    """One implementation called "triton" an op; the gradient of each is another op of the family."""
    return [
        KernelSpec(op=op, name="triton", forward=partial(forward, function=f), backward=None, supports=supports, priority=PRIORITY)
        for op, f in _FUNCTIONS.items()
    ]
