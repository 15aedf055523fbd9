"""The public ops: packed, differentiable, dispatched to the fastest implementation that supports the problem.

Importing this module registers the custom ops; implementations of plug-ins load at the first call.
"""

from __future__ import annotations

from gem_core.hookspecs import KernelSpec
from gem_core.ops import attention_reference
from gem_core.ops.attention import RelativeBias, gdpa, jagged_attention
from gem_core.ops.contract import YES, OpContract, OpPrecision, Problem, Supported, no
from gem_core.ops.contracts import contracts
from gem_core.ops.dispatch import kernel_specs, policy, set_policy, use_policy

REFERENCE = "reference"

__all__ = [
    "YES", "OpContract", "OpPrecision", "Problem", "RelativeBias", "Supported", "builtin_specs", "contracts", "gdpa", "jagged_attention",
    "kernel_specs", "no", "policy", "set_policy", "use_policy",
]  # fmt: skip


def builtin_specs() -> list[KernelSpec]:
    """The reference implementation of every op."""
    a = attention_reference
    return [
        KernelSpec("jagged_attention", REFERENCE, a.jagged_attention_forward, a.jagged_attention_backward, a.supports, 0),
        KernelSpec("gdpa", REFERENCE, a.gdpa_forward, a.gdpa_backward, a.supports, 0),
    ]
