"""5D parallelism for recommendation models: 2D FSDP, expert parallelism, fully sharded 2D embedding tables."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gem_parallel.mesh import Mesh as Mesh

_LAZY = {"Mesh": "gem_parallel.mesh"}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
