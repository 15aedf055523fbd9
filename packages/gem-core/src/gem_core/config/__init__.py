"""Configuration: TOML files validated into frozen models."""

from __future__ import annotations

from gem_core.config.base import FrozenConfig
from gem_core.config.features import Dense, EventField, Features, Ids, Label, Sequence, Sparse, Table, Vector
from gem_core.config.load import (
    ResolvedConfig,
    callback_configs,
    config_from_dict,
    dense_config,
    dump_toml,
    load_config,
    model_config,
    recipe_config,
    resolve,
    source_config,
    source_features,
    sparse_config,
)
from gem_core.config.schema import Config

__all__ = [
    "Config",
    "Dense",
    "EventField",
    "Features",
    "FrozenConfig",
    "Ids",
    "Label",
    "ResolvedConfig",
    "Sequence",
    "Sparse",
    "Table",
    "Vector",
    "callback_configs",
    "config_from_dict",
    "dense_config",
    "dump_toml",
    "load_config",
    "model_config",
    "recipe_config",
    "resolve",
    "source_config",
    "source_features",
    "sparse_config",
]
