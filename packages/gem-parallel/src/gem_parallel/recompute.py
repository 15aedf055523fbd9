"""Activation recomputation of chosen modules: what their forward saves is dropped and made again in backward.

``[train.callbacks.recompute] modules = ["layers.*.blocks.*.attention"]``; ``gemrec plan`` names the modules that give most memory for least
time. Uses ``torch.utils.checkpoint`` without re-entrance: gradients are the same, the state of random generators is restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gem_core.config import FrozenConfig
from gem_core.errors import ConfigError
from gem_core.hookspecs import CallbackSpec
from gem_core.train.contract import Callback, RunInfo


class RecomputeConfig(FrozenConfig):
    """``[train.callbacks.recompute]``"""

    modules: tuple[str, ...] = Field(min_length=1, description="patterns of module names, as in layers.*.pools.*")


def recompute(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Let the modules of ``model`` that match recompute, those inside a matching module excepted; returns their names.

    In evaluation, and where no gradients are asked for, they run as before.

    :raises ConfigError: a pattern that no module matches.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"no module is called {pattern!r}",
                where="train.callbacks.recompute.modules",
                fix=f"modules are called as in {', '.join(names[:: max(1, len(names) // 4)][:4])}",
            )
    matching = [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
    chosen = [name for name in matching if not any(name.startswith(f"{other}.") for other in matching)]
    for name in chosen:
        _wrap(model.get_submodule(name))
    return chosen


def _wrap(module: nn.Module) -> None:
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return inner(*args, **kwargs)
        swapped: list[tuple[nn.Module, str, Tensor]] = [
            (m, name, p) for m in module.modules() for name, p in m._parameters.items() if p is not None and type(p) is Tensor
        ]
        return checkpoint(_with(swapped, inner) if swapped else inner, *args, use_reentrant=False, **kwargs)

    module.forward = forward


def _with(swapped: Sequence[tuple[nn.Module, str, Tensor]], inner: Callable[..., Any]) -> Callable[..., Any]:
    """``inner`` with what is in the place of parameters now, as a recipe that casts weights puts there: by the backward pass the parameters
    themselves are back, and rounding is another."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = [m._parameters[name] for m, name, _ in swapped]
        try:
            for m, name, value in swapped:
                m._parameters[name] = value  # type: ignore[assignment]
            return inner(*args, **kwargs)
        finally:
            for (m, name, _), parameter in zip(swapped, own):
                m._parameters[name] = parameter

    return forward


class Recompute(Callback):
    """Applies `recompute` before the first step."""

    def __init__(self, config: RecomputeConfig) -> None:
        self.config = config

    def on_start(self, run: RunInfo) -> None:
        recompute(run.model, self.config.modules)


SPEC = CallbackSpec("recompute", RecomputeConfig, Recompute)
