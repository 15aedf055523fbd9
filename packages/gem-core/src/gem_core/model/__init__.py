"""The models and their parts. Importing this package loads no model code: `builtin_specs` names the models, building one loads it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gem_core.hookspecs import ModelSpec
    from gem_core.model.config import DinConfig as DinConfig
    from gem_core.model.config import GemConfig as GemConfig
    from gem_core.model.config import RetrievalConfig as RetrievalConfig
    from gem_core.model.contract import Lookup as Lookup
    from gem_core.model.contract import ModelOutput as ModelOutput
    from gem_core.model.contract import Retrieval as Retrieval
    from gem_core.model.contract import Tables as Tables
    from gem_core.model.contract import TableSet as TableSet
    from gem_core.model.contract import TableSpec as TableSpec
    from gem_core.model.contract import TableState as TableState
    from gem_core.model.flops import ModelFlops as ModelFlops
    from gem_core.model.loss import task_loss as task_loss
    from gem_core.model.presets import preset as preset
    from gem_core.model.tables import LocalTables as LocalTables
    from gem_core.model.tables import deferred_tables as deferred_tables

_LAZY = {
    "DinConfig": "gem_core.model.config",
    "GemConfig": "gem_core.model.config",
    "LocalTables": "gem_core.model.tables",
    "Lookup": "gem_core.model.contract",
    "ModelOutput": "gem_core.model.contract",
    "Retrieval": "gem_core.model.contract",
    "RetrievalConfig": "gem_core.model.config",
    "TableSet": "gem_core.model.contract",
    "TableSpec": "gem_core.model.contract",
    "TableState": "gem_core.model.contract",
    "Tables": "gem_core.model.contract",
    "deferred_tables": "gem_core.model.tables",
    "ModelFlops": "gem_core.model.flops",
    "preset": "gem_core.model.presets",
    "task_loss": "gem_core.model.loss",
}

__all__ = ["builtin_specs", *_LAZY]


def builtin_specs() -> list[ModelSpec]:
    """The models of the core."""
    from gem_core.errors import ConfigError
    from gem_core.hookspecs import ModelSpec
    from gem_core.model import config

    def spec(name: str, options: type, module: str, model: str, retrieval: str | None = None) -> ModelSpec:
        def build(chosen: Any, features: Any) -> Any:
            path = f"{module}.{model}"
            if features.next_item is not None:
                if retrieval is None:
                    raise ConfigError(
                        f"the model {name!r} scores candidates and does not predict the next item",
                        where="model.name",
                        fix="choose gem, hstu or sasrec, or remove [features.next_item]",
                    )
                path = retrieval
            found, _, cls = path.rpartition(".")
            return getattr(importlib.import_module(f"gem_core.model.{found}"), cls)(chosen, features)

        return ModelSpec(name, options, build)

    return [
        spec("gem", config.GemConfig, "gem", "Gem", "gem_retrieval.GemRetrieval"),
        spec("din", config.DinConfig, "din", "Din"),
        spec("dlrm", config.DlrmConfig, "classic", "Dlrm"),
        spec("dcnv2", config.DcnConfig, "classic", "Dcn"),
        spec("wukong", config.WukongModelConfig, "classic", "WukongModel"),
        spec("interformer", config.InterFormerConfig, "interformer", "InterFormer"),
        spec("sasrec", config.SasRecConfig, "sequential", "SasRec", "sequential.SasRecRetrieval"),
        spec("hstu", config.HstuConfig, "sequential", "Hstu", "sequential.HstuRetrieval"),
    ]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
