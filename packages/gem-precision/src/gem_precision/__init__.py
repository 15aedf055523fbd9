"""MXFP8 and FP8 recipes with numerics guards for recommendation models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gem_precision.formats import FP8 as FP8
    from gem_precision.formats import MX as MX
    from gem_precision.formats import quantize_fp8 as quantize_fp8
    from gem_precision.formats import quantize_mx as quantize_mx
    from gem_precision.formats import rank_generator as rank_generator
    from gem_precision.guard import GuardConfig as GuardConfig
    from gem_precision.guard import NumericsGuard as NumericsGuard
    from gem_precision.hadamard import random_hadamard as random_hadamard
    from gem_precision.linear import GroupedLinear as GroupedLinear
    from gem_precision.recipe import Recipe as Recipe
    from gem_precision.recipe import RecipeConfig as RecipeConfig
    from gem_precision.recipe import apply as apply
    from gem_precision.recipe import recipes as recipes
    from gem_precision.saved import SavedActivations as SavedActivations

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
