"""Tells torch's FLOP counter the formulas of our ops, without importing it first.

torch.utils.flop_counter imports triton where that is installed, and importing gem must not. So the formulas wait here until somebody
imports the counter; `FlopCounterMode` copies the registry when it is created, hence they must be in by then.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable[..., int]]] = []


def register(packet: Any, formula: Callable[..., int]) -> None:
    """``formula(*raw arguments of the op, out_val=...)`` counts the FLOPs of one call of ``packet``."""
    _waiting.append((packet, formula))
    if _COUNTER in sys.modules and hasattr(sys.modules[_COUNTER], "FlopCounterMode"):
        _deliver(sys.modules[_COUNTER])
    elif not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _deliver(counter: ModuleType) -> None:
    while _waiting:
        packet, formula = _waiting.pop()
        counter.register_flop_formula(packet, get_raw=True)(partial(_count, formula))


def _count(formula: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Count with real tensors also where the op itself runs on fake ones."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return formula(*args, **kwargs)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """The counter's own loader, and then the formulas."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _deliver(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
