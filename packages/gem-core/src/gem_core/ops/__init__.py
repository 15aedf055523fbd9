"""The public ops: packed, differentiable, dispatched to the fastest implementation that supports the problem.

Importing this module registers the custom ops ``torch.ops.gem.*``; implementations of plug-ins load at the first call. Ops run in the dtype
they are given; under autocast the float32 inputs of matrix products are cast as torch's linear would cast them (norm, and everything
about norms, is left alone).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gem_core.hookspecs import KernelSpec
from gem_core.ops import attention_reference, block, feedforward, jagged_reference, normed_attention, norms
from gem_core.ops.attention import RelativeBias, attention_flops, gdpa, jagged_attention
from gem_core.ops.block import block_attention
from gem_core.ops.contract import YES, OpContract, OpPrecision, Problem, Supported, no
from gem_core.ops.contracts import contracts
from gem_core.ops.dispatch import Policy, kernel_specs, policy, set_policy, use_policy
from gem_core.ops.explain import available, explain
from gem_core.ops.feedforward import mlp
from gem_core.ops.jagged_ops import (
    jagged_concat,
    jagged_expand,
    jagged_mean,
    jagged_split,
    jagged_sum,
    jagged_to_padded,
    padded_to_jagged,
)
from gem_core.ops.masks import attended_pairs, block_pairs
from gem_core.ops.normed_attention import norm_gdpa
from gem_core.ops.norms import linear_norm, norm, norm_linear

REFERENCE = "reference"
"""Name of the implementations that come with the core."""

__all__ = [
    "REFERENCE",
    "YES",
    "KernelSpec",
    "OpContract",
    "OpPrecision",
    "Policy",
    "Problem",
    "RelativeBias",
    "Supported",
    "attended_pairs",
    "attention_flops",
    "available",
    "block_attention",
    "block_pairs",
    "builtin_specs",
    "contracts",
    "explain",
    "gdpa",
    "jagged_attention",
    "jagged_concat",
    "jagged_expand",
    "jagged_mean",
    "jagged_split",
    "jagged_sum",
    "jagged_to_padded",
    "kernel_specs",
    "linear_norm",
    "mlp",
    "no",
    "norm",
    "norm_gdpa",
    "norm_linear",
    "padded_to_jagged",
    "policy",
    "set_policy",
    "use_policy",
]


def builtin_specs() -> list[KernelSpec]:
    """The reference implementation of every op."""
    a, j = attention_reference, jagged_reference
    offered: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None]] = {
        "jagged_attention": (a.jagged_attention_forward, a.jagged_attention_backward),
        "gdpa": (a.gdpa_forward, a.gdpa_backward),
        "block_attention": (block.forward, block.backward),
        "norm": (norms.norm_forward, norms.norm_backward),
        "norm_linear": (norms.norm_linear_forward, norms.norm_linear_backward),
        "linear_norm": (norms.linear_norm_forward, norms.linear_norm_backward),
        "mlp": (feedforward.forward, feedforward.backward),
        "norm_gdpa": (normed_attention.forward, normed_attention.backward),
        "jagged_concat": (j.concat_reference, None),
        "jagged_split": (j.split_reference, None),
        "jagged_sum": (j.sum_reference, None),
        "jagged_mean": (j.mean_reference, None),
        "jagged_expand": (j.expand_reference, None),
        "jagged_to_padded": (j.to_padded_reference, None),
        "padded_to_jagged": (j.from_padded_reference, None),
    }
    return [KernelSpec(op, REFERENCE, forward, backward, a.supports, 0) for op, (forward, backward) in offered.items()]
