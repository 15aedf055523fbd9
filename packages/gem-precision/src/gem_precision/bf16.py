"""Recipe ``bf16``: matrix products in bfloat16 by autocast; parameters stay fp32, the master weights that the optimizer updates."""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from gem_core import Guard
from gem_core.config import FrozenConfig
from gem_core.errors import ConfigError
from gem_core.model.casts import WeightCasts, product_weights
from gem_core.train.builtin import PlainGuard
from gem_core.train.contract import RecipeContext


class Bf16Config(FrozenConfig):
    """``[precision.bf16]``"""

    keep: tuple[str, ...] = Field(
        ("heads",), description="modules computed in fp32: patterns of module names; everything inside a matching module is kept too"
    )


def apply_bf16(module: nn.Module, config: Bf16Config, context: RecipeContext) -> Guard:
    """Run ``module``'s forward under bf16 autocast, the modules that ``keep`` names under none with fp32 inputs.

    Parameters, gradients, optimizer and embedding tables stay fp32.

    :raises ConfigError: a parameter that is not fp32: there would be no master copy of it; a pattern of ``keep`` that matches nothing.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ConfigError(
                f"the recipe bf16 keeps fp32 master weights, but {name} is {parameter.dtype}", fix="build the model in fp32: module.float()"
            )
    names = [name for name, _ in module.named_modules()]
    for pattern in sorted(set(config.keep) - {"heads", "heads.*"}):  # recipes keep these unless told otherwise; a model may lack them
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"the pattern {pattern!r} matches no module of the model",
                where="precision.<recipe>.keep",
                fix="`gemrec precision explain` lists the modules",
            )
    kept = [name for name in names if any(fnmatchcase(name, pattern) for pattern in config.keep)]
    outermost = [name for name in kept if not any(_inside(name, other) for other in kept if other != name)]
    sites = []
    tables = getattr(module, "tables", None)
    for name, part in module.named_modules():
        if next(part.parameters(recurse=False), None) is None:
            continue
        if part is tables:
            sites.append((name, "fp32", "embedding rows are read and updated in fp32"))
        elif any(name == top or _inside(name, top) for top in outermost):
            sites.append((name, "fp32", "precision.bf16.keep"))
        else:
            sites.append((name, "bf16", "autocast over fp32 master weights"))
    for name in outermost:
        _wrap(module.get_submodule(name), context.device.type, enabled=False)
    apart = [module.get_submodule(name) for name in outermost] + ([tables] if isinstance(tables, nn.Module) else [])
    casts = None if context.compile else WeightCasts(lambda: product_weights(module, apart), torch.bfloat16)
    module.weight_casts = casts  # type: ignore[assignment]
    _wrap(module, context.device.type, enabled=True, casts=casts)
    return PlainGuard(sites)  # bf16 has the range of fp32: there is nothing to watch or to scale


def _inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


def _wrap(module: nn.Module, device_type: str, *, enabled: bool, casts: WeightCasts | None = None) -> None:
    """``casts``: the weights to cast together, which are asked for after this: other recipes put linears of their own in their places."""
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, torch.bfloat16, enabled=enabled):
            if not enabled:
                args, kwargs = tuple(map(_fp32, args)), {k: _fp32(v) for k, v in kwargs.items()}
            if casts is None or torch.compiler.is_compiling():
                return inner(*args, **kwargs)
            with casts.swapped(kept_only=_several() and not casts.all_at_end):
                return inner(*args, **kwargs)

    module.forward = forward


def _several() -> bool:
    """Whether several processes take part: their gradients travel while the backward pass goes on."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def _fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
