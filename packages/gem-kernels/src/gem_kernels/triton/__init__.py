"""Portable Triton implementations of the ops. Importing this package imports no triton: an implementation does when it first runs."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gem_core.hookspecs import KernelSpec

_FAMILIES = ("attention", "hopper", "lowp", "dense", "block", "jagged", "adamw", "tokens", "pool_rows")


def specs() -> list[KernelSpec]:
    """Every implementation of this package, for `gem_kernels.plugin`."""
    found: list[KernelSpec] = []
    for family in _FAMILIES:
        if importlib.util.find_spec(f"{__name__}.{family}") is not None:
            found += importlib.import_module(f"{__name__}.{family}").specs()
    return found
