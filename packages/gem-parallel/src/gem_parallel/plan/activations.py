"""What backward needs saved, and how many operations the host launches, read off the model's own passes on fake tensors: nothing is
allocated and nothing computed.

The bytes of a unit are ``fixed + per_sample * B + per_event * N`` for B samples with N events in all; three passes at different sizes give
the three numbers. Layers that do the same work as an earlier one are left out of the passes. An operation that is fused here, on fake
tensors, counts once, whatever number of kernels its implementation starts.
"""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gem_core.batch import Batch
from gem_core.config import Features, ResolvedConfig
from gem_core.model.tables import LocalTables
from gem_core.ops import pool_rows
from gem_core.plugins import manager
from gem_core.train.contract import RecipeContext


@dataclass(frozen=True)
class Saved:
    """Bytes that a unit keeps from its forward to its backward. ``fixed``: copies of parameters in the precision of the recipe."""

    fixed: float = 0.0
    per_sample: float = 0.0
    per_event: float = 0.0

    def bytes(self, samples: float, events: float) -> float:
        """Without the copies of parameters."""
        return self.per_sample * samples + self.per_event * events

    def __sub__(self, other: Saved) -> Saved:
        return Saved(self.fixed - other.fixed, self.per_sample - other.per_sample, self.per_event - other.per_event)


@dataclass(frozen=True)
class Choice:
    """Regions of a layer that could be recomputed together: their names within the layer, the parts of the model that they are, what the
    whole layer then still saves, inputs of the regions included, and the operations that are launched again."""

    regions: tuple[str, ...]
    parts: tuple[str, ...]
    saved: Saved
    launches: float = 0.0


@dataclass(frozen=True)
class Kept:
    """What a unit saves, and what it would with regions recomputed; the operations of its forward and its backward."""

    saved: Saved
    choices: tuple[Choice, ...] = ()
    launches: float = 0.0


_REGIONS = {
    r"blocks\.[^.]+\.pffn": "pffn",
    r"blocks\.[^.]+\.attention": "attention",
    r"blocks\.[^.]+\.ffn": "ffn",
    r"pools\.[^.]+": "pooling",
}
"""Modules of a layer that may be recomputed, and the part that their FLOPs are counted under."""


def saved_bytes(resolved: ResolvedConfig, features: Features) -> dict[str, Kept]:
    """Of "front", "heads" and of each kind of layer by its `workload.signature`."""
    from gem_parallel.plan.workload import signature

    config = resolved.config
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = manager().find("model", config.model.name).build(resolved.model, features)
        model.tables = LocalTables(model.table_set)
        names: list[str] = []
        if isinstance(getattr(model, "layers", None), nn.ModuleList) and hasattr(model, "heads"):
            kinds = {signature(layer): layer for layer in reversed(list(model.layers))}
            order = sorted(kinds.items(), key=lambda item: next(i for i, layer in enumerate(model.layers) if layer is item[1]))
            names = [name for name, _ in order]
            model.layers = nn.ModuleList(layer for _, layer in order)
        manager().find("recipe", config.precision.recipe).apply(model, resolved.recipe, RecipeContext(torch.device("cpu"), compile=False))
    few, short, long = 64, 4, 16
    shapes = [(few, short), (2 * few, short), (few, long)]
    counter = _Launches()
    passes = [
        _pass(mode, model, names, _batch(mode, features, samples, length), counter if i == 0 else None)
        for i, (samples, length) in enumerate(shapes)
    ]
    histories = len(features.sequences)

    def fitted(unit: str, again: frozenset[str] = frozenset()) -> Saved:
        base, wider, longer = (sum(s.size for s in found if s.home == unit and s.held(unit, again)) for found in passes)
        per_event = (longer - base) / (few * (long - short) * histories) if histories else 0.0
        return Saved(max(0.0, 2.0 * base - wider), (wider - base) / few - per_event * short * histories, per_event)

    found = {unit: Kept(fitted(unit), launches=counter.of(unit)) for unit in ("front", "heads")}
    for i, unit in enumerate(names):
        parts = regions(model.layers[i])
        sets = [some for n in range(1, len(parts) + 1) for some in combinations(parts, n)]
        choices = [tuple(name for part in some for name in parts[part]) for some in sets]
        made = [Choice(c, some, fitted(unit, frozenset(c)), counter.again(unit, c)) for c, some in zip(choices, sets)]
        found[unit] = Kept(fitted(unit), tuple(made), counter.of(unit))
    return found


_TABLES = "tables"
_NO_KERNEL = {
    "aten::_local_scalar_dense", "aten::_unsafe_view", "aten::detach", "aten::empty", "aten::empty_like", "aten::empty_strided",
    "aten::lift_fresh", "aten::new_empty", "aten::new_empty_strided",
}  # fmt: skip


class _Launches(TorchDispatchMode):
    """Counts operations that start kernels by where they come from: (unit, region), or ("backward", "") for the whole backward pass.

    ``place`` is what the pass under way writes where it is into.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = ["front", ""]
        self.counts: dict[tuple[str, str], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and func.namespace != "prim" and func._schema.name not in _NO_KERNEL:
            at = self.place[0], self.place[1]
            self.counts[at] = self.counts.get(at, 0) + 1
        return func(*args, **(kwargs or {}))

    def of(self, unit: str) -> float:
        """Forward and backward, reads of tables left out; each unit has the share of the backward pass that it has of the forward pass."""
        forward = {at: n for at, n in self.counts.items() if at[0] != "backward"}
        both = 1 + self.counts.get(("backward", ""), 0) / max(1, sum(forward.values()))
        return both * sum(n for (home, region), n in forward.items() if home == unit and region != _TABLES)

    def again(self, unit: str, regions: tuple[str, ...]) -> float:
        return float(sum(n for (home, region), n in self.counts.items() if home == unit and region in regions))


def regions(layer: nn.Module) -> dict[str, list[str]]:
    """Part of the model -> names of those modules of a layer that may be recomputed."""
    found: dict[str, list[str]] = {}
    for name, _ in layer.named_modules():
        for pattern, part in _REGIONS.items():
            if re.fullmatch(pattern, name):
                found.setdefault(part, []).append(name)
    return found


@dataclass
class _Storage:
    """A storage that something holds for backward; ``home`` is the unit that came first."""

    size: int
    home: str
    savers: set[tuple[str, str]]
    inputs: set[tuple[str, str]]

    def held(self, unit: str, again: frozenset[str]) -> bool:
        """Whether it is kept when the regions ``again`` of ``unit`` are recomputed: saved by another place, or an input of theirs."""
        elsewhere = any(u != unit or region not in again for u, region in self.savers)
        return elsewhere or any(u == unit and region in again for u, region in self.inputs)


def _pass(mode: FakeTensorMode, model: nn.Module, names: list[str], batch: Batch, counter: _Launches | None) -> list[_Storage]:
    """Storages that a forward pass saves or hands to a region; parameters do not count. ``counter`` counts it, and its backward."""
    parameters = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    alive: list[Tensor] = []
    found: dict[int, _Storage] = {}
    place = ["front", ""] if counter is None else counter.place
    hooks: list[Any] = []

    def note(tensor: Tensor) -> _Storage | None:
        storage = tensor.untyped_storage()
        if storage._cdata in parameters:
            return None
        if storage._cdata not in found:
            # held, so that no later storage takes its place
            alive.append(tensor)
            found[storage._cdata] = _Storage(storage.nbytes(), place[0], set(), set())
        return found[storage._cdata]

    def pack(tensor: Tensor) -> Tensor:
        storage = note(tensor)
        if storage is not None:
            storage.savers.add((place[0], place[1]))
        return tensor

    def watch(module: nn.Module, index: int, inside: str, after: str) -> None:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            place[index] = inside
            if index == 1:
                for value in (*args, *kwargs.values()):
                    storage = note(value) if isinstance(value, Tensor) and value.is_floating_point() else None
                    if storage is not None:
                        storage.inputs.add((place[0], inside))

        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(lambda *_: place.__setitem__(index, after)))

    tables = getattr(model, _TABLES, None)
    if isinstance(tables, nn.Module):
        hooks.append(tables.register_forward_pre_hook(lambda *_: place.__setitem__(1, _TABLES)))
        hooks.append(tables.register_forward_hook(lambda *_: place.__setitem__(1, "")))
    if names:
        stack: Any = model.layers
        for unit, layer in zip(names, stack):
            watch(layer, 0, unit, "heads")
            for region in (name for some in regions(layer).values() for name in some):
                watch(layer.get_submodule(region), 1, region, "")
    try:
        with (
            warnings.catch_warnings(),
            mode,
            counter or nullcontext(),
            pool_rows.counted(),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            # The backward pass compares addresses of gradients, which fake ones do not have.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            model.train()
            results = model(batch)
            if counter is not None:
                place[:] = ["backward", ""]
                torch.autograd.backward([t.sum() for t in tree_leaves(vars(results)) if isinstance(t, Tensor) and t.requires_grad])
    finally:
        for hook in hooks:
            hook.remove()
    return list(found.values())


def _batch(mode: FakeTensorMode, features: Features, samples: int, length: int) -> Batch:
    """Fake samples whose histories all have ``length`` events."""
    from gem_core.testing.models import random_batch

    real = random_batch(features, samples, lengths=[length] * samples if features.sequences else None)
    fake: Batch = _fake(mode, real)
    return fake


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    from gem_core.batch import _map

    def convert(tensor: Tensor) -> Tensor:
        fake = mode.from_tensor(tensor)
        if not tensor.is_floating_point():
            # offsets and lengths are read on the host: a fake tensor answers from the constant that it stands for
            fake.constant = tensor
        return fake

    return _map(value, convert)
