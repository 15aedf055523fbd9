"""Jagged Flash Attention, GDPA, BlockAttention and norm fusion for recommendation models: Triton and Gluon, forward and backward.

The public ops are those of `gem_core.ops`; importing them from here loads no kernel. With this package installed they are done by the
fastest of its implementations that supports the call; ``available(op, q, k, v, ...)`` tells which ones do, and why others do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gem_kernels.__about__ import __version__

if TYPE_CHECKING:
    from gem_core.ops import RelativeBias as RelativeBias
    from gem_core.ops import available as available
    from gem_core.ops import block_attention as block_attention
    from gem_core.ops import explain as explain
    from gem_core.ops import gdpa as gdpa
    from gem_core.ops import jagged_attention as jagged_attention
    from gem_core.ops import jagged_concat as jagged_concat
    from gem_core.ops import jagged_expand as jagged_expand
    from gem_core.ops import jagged_mean as jagged_mean
    from gem_core.ops import jagged_split as jagged_split
    from gem_core.ops import jagged_sum as jagged_sum
    from gem_core.ops import jagged_to_padded as jagged_to_padded
    from gem_core.ops import linear_norm as linear_norm
    from gem_core.ops import mlp as mlp
    from gem_core.ops import norm as norm
    from gem_core.ops import norm_gdpa as norm_gdpa
    from gem_core.ops import norm_linear as norm_linear
    from gem_core.ops import padded_to_jagged as padded_to_jagged

_OPS = (
    "RelativeBias",
    "available",
    "block_attention",
    "explain",
    "gdpa",
    "jagged_attention",
    "jagged_concat",
    "jagged_expand",
    "jagged_mean",
    "jagged_split",
    "jagged_sum",
    "jagged_to_padded",
    "linear_norm",
    "mlp",
    "norm",
    "norm_gdpa",
    "norm_linear",
    "padded_to_jagged",
)

__all__ = ["__version__", *_OPS]


def __getattr__(name: str) -> Any:
    if name in _OPS:
        from gem_core import ops

        return getattr(ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
