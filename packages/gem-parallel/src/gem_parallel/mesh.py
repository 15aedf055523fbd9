"""The arrangement of ranks; the core holds it, because the trainer builds it from ``[parallel]``."""

from __future__ import annotations

from gem_core.train.mesh import Mesh

__all__ = ["Mesh"]
