"""MXFP8 and FP8 recipes with numerics guards for recommendation models."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "FP8": "gem_precision.formats",
    "GroupedLinear": "gem_precision.linear",
    "GuardConfig": "gem_precision.guard",
    "NumericsGuard": "gem_precision.guard",
    "Recipe": "gem_precision.recipe",
    "RecipeConfig": "gem_precision.recipe",
    "SavedActivations": "gem_precision.saved",
    "apply": "gem_precision.recipe",
    "recipes": "gem_precision.recipe",
    "MX": "gem_precision.formats",
    "quantize_fp8": "gem_precision.formats",
    "quantize_mx": "gem_precision.formats",
    "random_hadamard": "gem_precision.hadamard",
    "rank_generator": "gem_precision.formats",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
