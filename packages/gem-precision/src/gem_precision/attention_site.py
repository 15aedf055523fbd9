"""An attention module as a site: the op's precision follows the site, and the emulated kernels report what quantising did."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from gem_precision.site import Site

current: ContextVar[Site | None] = ContextVar("gem_precision_attention_site", default=None)
"""The site whose attention module is in its forward, while a sample is due."""


def watch_attention(module: nn.Module, site: Site) -> None:
    """Give ``module.attention_precision`` the site's precision, now and whenever it moves.

    A site at its safest level is not probed: it comes back after a quiet period without samples and is judged again then. Inside a compiled
    graph it is not sampled either (which module an op belongs to cannot be told there): losses and NE drift watch it.
    """

    def changed(precision: Any) -> None:
        module.attention_precision = precision

    site.changed = changed
    changed(site.policy)
    tokens: list[Any] = []

    def before(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        site.enter(module.training and torch.is_grad_enabled())
        tokens.append(current.set(site if site.live else None))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        current.reset(tokens.pop())

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)


Report = Callable[[str, Any, Any], None]


def report() -> Report | None:
    """Where a kernel's forward reports its operands, None while nobody asks."""
    site = current.get()
    return None if site is None else site.record
