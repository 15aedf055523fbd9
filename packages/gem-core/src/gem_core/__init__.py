"""Thin core of gem: contracts, plug-ins, configuration, the GEM model, trainer, metrics and the ``gemrec`` command."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gem_core.__about__ import __version__

if TYPE_CHECKING:
    from gem_core.batch import Batch as Batch
    from gem_core.config import Features as Features
    from gem_core.config import FrozenConfig as FrozenConfig
    from gem_core.config import load_config as load_config
    from gem_core.errors import GemError as GemError
    from gem_core.hookspecs import CallbackSpec as CallbackSpec
    from gem_core.hookspecs import CodecSpec as CodecSpec
    from gem_core.hookspecs import CollectiveSpec as CollectiveSpec
    from gem_core.hookspecs import Guard as Guard
    from gem_core.hookspecs import KernelSpec as KernelSpec
    from gem_core.hookspecs import MetricSpec as MetricSpec
    from gem_core.hookspecs import ModelSpec as ModelSpec
    from gem_core.hookspecs import RecipeSpec as RecipeSpec
    from gem_core.hookspecs import SourceSpec as SourceSpec
    from gem_core.hookspecs import StrategySpec as StrategySpec
    from gem_core.hookspecs import hookimpl as hookimpl
    from gem_core.jagged import Jagged as Jagged
    from gem_core.train import train as train

_LAZY = {
    "Batch": "gem_core.batch",
    "CallbackSpec": "gem_core.hookspecs",
    "CodecSpec": "gem_core.hookspecs",
    "CollectiveSpec": "gem_core.hookspecs",
    "Features": "gem_core.config",
    "FrozenConfig": "gem_core.config",
    "GemError": "gem_core.errors",
    "Guard": "gem_core.hookspecs",
    "Jagged": "gem_core.jagged",
    "KernelSpec": "gem_core.hookspecs",
    "MetricSpec": "gem_core.hookspecs",
    "ModelSpec": "gem_core.hookspecs",
    "RecipeSpec": "gem_core.hookspecs",
    "SourceSpec": "gem_core.hookspecs",
    "StrategySpec": "gem_core.hookspecs",
    "hookimpl": "gem_core.hookspecs",
    "load_config": "gem_core.config",
    "train": "gem_core.train",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
