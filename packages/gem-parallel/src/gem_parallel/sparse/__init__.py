"""Sparse strategies: where embedding tables live and how their rows reach the samples."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gem_core.hookspecs import StrategySpec
from gem_core.model.contract import TableSet
from gem_core.train.mesh import Mesh
from gem_parallel.sparse import config as options


def specs() -> list[StrategySpec]:
    """What gem-parallel offers; nothing of TorchRec or FBGEMM is imported before a strategy that needs it is built."""

    def built(module: str, function: str) -> Any:
        def build(tables: TableSet, mesh: Mesh, config: Any) -> Any:
            return getattr(import_module(f"gem_parallel.sparse.{module}"), function)(tables, mesh, config)

        return build

    return [
        StrategySpec("gem-2d", options.Gem2dConfig, built("twod", "build_gem_2d")),
        StrategySpec("fbgemm", options.FbgemmConfig, built("twod", "build_fbgemm")),
        StrategySpec("torchrec", options.TorchrecConfig, built("torchrec_tables", "build_torchrec")),
        StrategySpec("torchrec-2d", options.Torchrec2dConfig, built("torchrec_tables", "build_torchrec_2d")),
    ]
