"""What a configuration's recipe decides for every module of its model, without building the model's tensors."""

from __future__ import annotations

import torch

from gem_core.config import ResolvedConfig
from gem_core.errors import ConfigError
from gem_core.model.tables import deferred_tables
from gem_core.plugins import manager
from gem_precision.bf16 import Bf16Config
from gem_precision.recipe import RECIPES, RecipeConfig, choices, kept


def decisions(resolved: ResolvedConfig, device: torch.device) -> list[tuple[str, str, str]]:
    """(module, precision, why), in module order.

    :raises ConfigError: the recipe is not one of this package.
    """
    config = resolved.config
    name, options = config.precision.recipe, resolved.recipe
    if name not in RECIPES:
        raise ConfigError(
            f"the recipe {name!r} is not one of gem-precision's: {', '.join(RECIPES)}",
            where=config.origin.where(("precision", "recipe")),
            fix="choose one: --set precision.recipe=mxfp8",
        )
    with torch.device("meta"), deferred_tables():
        model = manager().find("model", config.model.name).build(resolved.model, config.features)
    made = {}
    if isinstance(options, RecipeConfig):
        made = {c.module: c for c in choices(model, RECIPES[name], options, device)}
    keep = options if isinstance(options, RecipeConfig) else RecipeConfig(keep=options.keep if isinstance(options, Bf16Config) else ())
    tables = getattr(model, "tables", None)
    rows = []
    for module, part in model.named_modules():
        if module in made:
            rows.append((module, made[module].precision, made[module].why))
        elif next(part.parameters(recurse=False), None) is not None:
            rows.append((module, *_untouched(module, part is tables, keep)))
    return rows


def _untouched(module: str, tables: bool, keep: RecipeConfig) -> tuple[str, str]:
    if tables:
        return "fp32", "embedding rows are read and updated in fp32"
    if kept(module, keep):
        return "fp32", "keep: always in high precision"
    return "bf16", "autocast over fp32 master weights"
