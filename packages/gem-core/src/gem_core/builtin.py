"""What the core itself offers, through the same hooks as every plug-in."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gem_core.hookspecs import (
    GEM_API,
    CallbackSpec,
    KernelSpec,
    LadderSpec,
    MetricSpec,
    ModelSpec,
    RecipeSpec,
    SourceSpec,
    StrategySpec,
    hookimpl,
)


def _offered(module: str, function: str = "builtin_specs") -> list[Any]:
    return list(getattr(import_module(module), function)())


class BuiltinPlugin:
    """Reference kernels, the models, the synthetic source, ``fp32``, ``single``, ``local``, the trackers and the metrics."""

    gem_api = GEM_API

    @hookimpl
    def gem_kernels(self) -> list[KernelSpec]:
        return _offered("gem_core.ops")

    @hookimpl
    def gem_models(self) -> list[ModelSpec]:
        return _offered("gem_core.model")

    @hookimpl
    def gem_sources(self) -> list[SourceSpec]:
        return _offered("gem_core.sources")

    @hookimpl
    def gem_recipes(self) -> list[RecipeSpec]:
        return _offered("gem_core.train", "builtin_recipes")

    @hookimpl
    def gem_dense_strategies(self) -> list[StrategySpec]:
        return _offered("gem_core.train", "builtin_dense_strategies")

    @hookimpl
    def gem_sparse_strategies(self) -> list[StrategySpec]:
        return _offered("gem_core.train", "builtin_sparse_strategies")

    @hookimpl
    def gem_ladders(self) -> list[LadderSpec]:
        return _offered("gem_core.bench.ladder")

    @hookimpl
    def gem_callbacks(self) -> list[CallbackSpec]:
        return _offered("gem_core.train", "builtin_callbacks")

    @hookimpl
    def gem_metrics(self) -> list[MetricSpec]:
        return _offered("gem_core.metrics")


plugin = BuiltinPlugin()
