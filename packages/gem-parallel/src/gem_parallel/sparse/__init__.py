"""Sparse strategies: where embedding tables live and how their rows reach the samples."""

from __future__ import annotations

from typing import Any

from gem_core.hookspecs import StrategySpec
from gem_core.model.contract import TableSet
from gem_core.train.mesh import Mesh
from gem_parallel.sparse import config as options


def specs() -> list[StrategySpec]:
    """What gem-parallel offers; nothing of TorchRec or FBGEMM is imported before a strategy that needs it is built."""

    def gem_2d(tables: TableSet, mesh: Mesh, config: options.Gem2dConfig) -> Any:
        from gem_parallel.sparse.twod import build_gem_2d

        return build_gem_2d(tables, mesh, config)

    return [StrategySpec("gem-2d", options.Gem2dConfig, gem_2d)]
