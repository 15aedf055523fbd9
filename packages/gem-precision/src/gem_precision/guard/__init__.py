"""The numerics guard: watches every quantised site, moves it to a safer precision with evidence, and back after a quiet period."""

from __future__ import annotations

from gem_precision.guard.config import GuardConfig
from gem_precision.guard.guard import Decision, NumericsGuard

__all__ = ["Decision", "GuardConfig", "NumericsGuard"]
