"""What backward needs saved, read off the model's own forward pass on fake tensors: nothing is allocated and nothing computed.

The bytes of a unit are ``fixed + per_sample * B + per_event * N`` for B samples with N events in all; three passes at different sizes give
the three numbers. Layers that do the same work as an earlier one are left out of the passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gem_core.batch import Batch
from gem_core.config import Features, ResolvedConfig
from gem_core.model.tables import LocalTables
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


def saved_bytes(resolved: ResolvedConfig, features: Features) -> dict[str, Saved]:
    """Saved bytes of "front", "heads" and of each kind of layer by its `workload.signature`."""
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
    runs = [_pass(mode, model, names, _batch(mode, features, samples, length)) for samples, length in shapes]
    histories = len(features.sequences)
    found = {}
    for unit in ("front", *names, "heads"):
        base, wider, longer = (float(run.get(unit, 0)) for run in runs)
        per_event = (longer - base) / (few * (long - short) * histories) if histories else 0.0
        per_sample = (wider - base) / few - per_event * short * histories
        found[unit] = Saved(max(0.0, 2 * base - wider), per_sample, per_event)
    return found


def _pass(mode: FakeTensorMode, model: nn.Module, names: list[str], batch: Batch) -> dict[str, int]:
    """Bytes of the storages that a forward pass saves, by the unit that saves them first; parameters do not count."""
    parameters = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    seen: dict[int, Tensor] = {}
    found: dict[str, int] = {}
    current = ["front"]
    hooks: list[Any] = []

    def enter(unit: str, after: str) -> None:
        module = model.heads if unit == "heads" else model.layers[names.index(unit)]  # type: ignore[index]
        hooks.append(module.register_forward_pre_hook(lambda *_: current.__setitem__(0, unit)))  # type: ignore[union-attr]
        hooks.append(module.register_forward_hook(lambda *_: current.__setitem__(0, after)))  # type: ignore[union-attr]

    if names:
        for unit in (*names, "heads"):
            enter(unit, "heads")

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters and storage._cdata not in seen:
            # held, so that no later storage takes its place
            seen[storage._cdata] = tensor
            found[current[0]] = found.get(current[0], 0) + storage.nbytes()
        return tensor

    try:
        with mode, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.train()
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return found


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
