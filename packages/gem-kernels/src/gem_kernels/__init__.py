"""Jagged Flash Attention, GDPA, BlockAttention and norm fusion for recommendation models: Triton and Gluon, forward and backward.

The public ops are those of `gem_core.ops`; importing them from here loads no kernel. With this package installed they are done by the
fastest of its implementations that supports the call; ``available(op, q, k, v, ...)`` tells which ones do, and why others do not.
"""

from __future__ import annotations

from typing import Any

from gem_kernels.__about__ import __version__

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
