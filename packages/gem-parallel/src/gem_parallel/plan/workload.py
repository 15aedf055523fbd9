"""What a rank has to do in one step, taken from the model itself: FLOPs, parameters, saved activations and table reads, unit by unit.

A unit is what a sharding strategy gathers at once: the front (feature and event tokens), each layer, the heads. The model is built without
allocating it. FLOPs come from its own ``count_flops``; what backward needs saved is read off a forward pass on fake tensors, under the
chosen precision recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gem_core.config import Config, Features, ResolvedConfig
from gem_core.errors import ConfigError
from gem_core.model.base import RankingModel
from gem_core.model.contract import TableSet
from gem_core.model.flops import ModelFlops
from gem_core.model.tables import deferred_tables
from gem_core.plugins import manager
from gem_parallel.plan.activations import Choice, Kept, Saved, saved_bytes

Floats = NDArray[np.float64]
Lengths = Mapping[str, NDArray[np.int64]]
"""History name -> lengths, all arrays of one shape: sample i of every history is the same sample."""


@dataclass(frozen=True)
class Curve:
    """A quantity that every sample adds to: ``constant`` and, for each history, ``by_length[name][L]`` for a history of L events."""

    constant: float = 0.0
    by_length: Mapping[str, Floats] = field(default_factory=dict)

    def __add__(self, other: Curve) -> Curve:
        names = dict.fromkeys((*self.by_length, *other.by_length))
        tables = {n: self.by_length.get(n, 0.0) + other.by_length.get(n, 0.0) for n in names}
        return Curve(self.constant + other.constant, cast(Mapping[str, Floats], tables))

    def __mul__(self, factor: float) -> Curve:
        return Curve(self.constant * factor, {n: t * factor for n, t in self.by_length.items()})

    def over(self, lengths: Lengths) -> Any:
        """Sum over the last axis of the lengths, ``[..., B] -> [...]``; with no history the constant times B needs ``lengths`` too."""
        shape = next(iter(lengths.values())).shape
        total: Any = np.full(shape[:-1], self.constant * shape[-1])
        for name, table in self.by_length.items():
            total = total + table[lengths[name]].sum(-1)
        return total


@dataclass(frozen=True)
class PartWork:
    """FLOPs of one part of the model: linear maps forward (backward is twice as much), attention forward and backward."""

    gemm: Curve
    attention: Curve = Curve()
    attention_backward: Curve = Curve()


@dataclass(frozen=True)
class Experts:
    """Summed experts of a unit, which may be spread over ranks. ``elements_in``, ``elements_out``: of their input and output, a sample."""

    count: int
    parameters: int
    work: Mapping[str, PartWork]
    elements_in: int
    elements_out: int


@dataclass(frozen=True)
class Unit:
    """``parameters`` without the experts', ``work`` likewise; ``saved`` is what backward needs of one step's forward, experts included.

    ``choices``: sets of regions that could be recomputed instead. ``restored``: what backward makes again before it runs, by the
    forward of the parts ``again``. ``launches``: operations of forward and backward.
    """

    name: str
    parameters: int
    work: Mapping[str, PartWork]
    saved: Saved
    experts: Experts | None = None
    choices: tuple[Choice, ...] = ()
    restored: Saved = field(default_factory=Saved)
    again: tuple[str, ...] = ()
    launches: float = 0.0

    @property
    def total_parameters(self) -> int:
        return self.parameters + (self.experts.count * self.experts.parameters if self.experts else 0)


@dataclass(frozen=True)
class Table:
    """One table and its reads a sample: ``bags`` pooled lookups of ``pooled_ids`` ids in all, ``event_ids`` ids read one by one."""

    name: str
    rows: int
    dim: int
    bags: int = 0
    pooled_ids: float = 0.0
    event_ids: float = 0.0
    element: int = 4

    @property
    def weight_bytes(self) -> int:
        return self.rows * self.dim * self.element

    @property
    def bytes(self) -> int:
        """Weights and the fp32 accumulator of a row."""
        return self.weight_bytes + 4 * self.rows

    @property
    def ids(self) -> float:
        return self.pooled_ids + self.event_ids


@dataclass(frozen=True)
class Workload:
    """``lengths``: a pool of samples that the batches are drawn from. ``compute_bytes``: bytes of a value that layers compute in (2 under
    bf16). ``captured``: the step is one graph, which the host launches at once. ``dealt``: batches to which a rank's samples are dealt by
    length; 1: as they come. ``width``: of the model's events, which rates depend on; 0: it has none. ``balancing``: how the source would
    deal batches of equal work, in words; empty: nobody knows. ``capturable``: nothing that the configuration says stands against captured
    steps."""

    name: str
    recipe: str
    batch: int
    units: tuple[Unit, ...]
    tables: tuple[Table, ...]
    lengths: Lengths
    compute_bytes: int = 2
    captured: bool = False
    dealt: int = 1
    width: int = 0
    balancing: str = ""
    capturable: bool = True

    @property
    def launches(self) -> float:
        """Operations of a step that is not captured; those of tables and optimizer left out."""
        return sum(u.launches for u in self.units)

    @property
    def computes_in(self) -> str:
        """The type of ``compute_bytes``, by the name that configurations use."""
        return "fp32" if self.compute_bytes == 4 else "bf16"

    @property
    def parameters(self) -> int:
        return sum(u.total_parameters for u in self.units)

    @property
    def experts(self) -> int:
        """Experts that can be spread evenly: the greatest common divisor of the units' counts, 1 without any."""
        counts = [u.experts.count for u in self.units if u.experts]
        return int(np.gcd.reduce(counts)) if counts else 1

    def draw(self, ranks: int, seed: int) -> Lengths:
        """Lengths ``[ranks, batch]`` of one step, each rank's samples drawn from the pool."""
        random, first = np.random.default_rng(seed), next(iter(self.lengths.values()))
        chosen = random.integers(first.size, size=(ranks, self.batch * self.dealt))
        if self.dealt > 1:
            chosen = np.take_along_axis(chosen, np.argsort(first[chosen], 1), 1).reshape(ranks, self.batch, self.dealt)
            batch = random.integers(self.dealt, size=(ranks, 1))
            place = np.where(np.arange(self.batch) % 2, batch, self.dealt - 1 - batch)
            chosen = np.take_along_axis(chosen, place[..., None], 2)[..., 0]
        return {name: values[chosen] for name, values in self.lengths.items()}

    def part_flops(self) -> dict[str, tuple[float, float]]:
        """Model FLOPs of a mean step of one rank by part, forward and backward."""
        pool = self.lengths
        share = self.batch / next(iter(pool.values())).size
        found: dict[str, tuple[float, float]] = {}
        for unit in self.units:
            inside = [] if unit.experts is None else list(unit.experts.work.items()) * unit.experts.count
            for name, part in (*unit.work.items(), *inside):
                forward, backward = found.get(name, (0.0, 0.0))
                forward += float((part.gemm + part.attention).over(pool)) * share
                found[name] = forward, backward + float((part.gemm * 2 + part.attention_backward).over(pool)) * share
        return found

    def flops(self) -> float:
        """Model FLOPs of a mean training step of one rank."""
        return sum(sum(both) for both in self.part_flops().values())

    def with_batch(self, batch: int) -> Workload:
        return replace(self, batch=batch)


def measure(name: str, resolved: ResolvedConfig, features: Features, lengths: Lengths, ids: Mapping[str, float]) -> Workload:
    """The workload of a resolved configuration.

    :param lengths: the pool of history lengths, by history.
    :param ids: ids a sample (of an event field: an event) of each lookup, by its key; 1 for those that are missing.
    :raises ConfigError: a model that counts no FLOPs.
    """
    config = resolved.config
    build = manager().find("model", config.model.name).build
    with torch.device("meta"), deferred_tables():
        model = build(resolved.model, features)
    if not isinstance(model, RankingModel):
        raise ConfigError(
            f"the model {config.model.name!r} does not tell its FLOPs, which the plan is made from",
            where="model.name",
            fix="choose a model of the core, or let it derive from gem_core.model.base.RankingModel",
        )
    if not lengths:
        lengths = {"": np.zeros(1, dtype=np.int64)}
    saved = saved_bytes(resolved, features)
    recipe = config.precision.recipe
    return Workload(
        name, recipe, config.data.batch_size, units(model, lengths, saved), tables(model.table_set, lengths, ids), lengths,
        compute_bytes=4 if recipe == "fp32" else 2, captured=config.train.capture,
        dealt=dealt(resolved.source), width=_width(getattr(model, "config", None)),
        balancing=_balancing(config.data.source, resolved.source), capturable=_capturable(model, config),
    )  # fmt: skip


def _width(options: Any) -> int:
    """Of the events that the gem model reads; of several towers' the widest."""
    towers = [*getattr(options, "groups", {}).values(), getattr(options, "sequence", None)]
    return max((int(tower.dim) for tower in towers if hasattr(tower, "dim")), default=0)


def dealt(source: Any) -> int:
    """Batches to which a source with these options deals samples by length; 1: it does not."""
    return int(source.window) if getattr(source, "balanced", False) else 1


def _capturable(model: nn.Module, config: Config) -> bool:
    """As `gem_core.train.captured.check_capture`, which sees more of a run, has it."""
    return bool(getattr(model, "takes_slack", False)) and config.train.accumulate == 1 and not config.train.compile


def _balancing(name: str, source: Any) -> str:
    fields = type(source).model_fields
    if "balanced" in fields:
        return f"data.{name}.balanced = true deals them"
    if "batching" in fields:
        return f"data.{name}.batching chooses: {fields['batching'].description}"
    return ""


def units(model: RankingModel, lengths: Lengths, saved: Mapping[str, Kept]) -> tuple[Unit, ...]:
    """Units of a model in the order of its forward pass; one for a model without ``layers``."""
    stack = getattr(model, "layers", None)
    layers: list[Any] = list(stack) if isinstance(stack, nn.ModuleList) else []
    if not hasattr(model, "heads") or not layers or not all(hasattr(layer, "interaction") for layer in layers):
        count = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("tables."))
        return (Unit("model", count, curves(model, lengths), saved["front"].saved, launches=saved["front"].launches),)
    with _layers(model, []):
        ends = curves(model, lengths)
    heads = {part: ends.pop(part) for part in ("heads",) if part in ends}
    inside = sum(p.numel() for layer in layers for p in layer.parameters())
    head = sum(p.numel() for n, p in model.named_parameters() if n.startswith("heads."))
    dense = sum(p.numel() for n, p in model.named_parameters() if not n.startswith("tables."))
    found = [Unit("front", dense - inside - head, ends, saved["front"].saved, launches=saved["front"].launches)]
    known: dict[str, Unit] = {}
    for i, layer in enumerate(layers):
        key = signature(layer)
        if key not in known:
            known[key] = _layer_unit(model, layer, lengths, {**ends, **heads}, saved[key])
        found.append(replace(known[key], name=f"layer {i}"))
    return (*found, Unit("heads", head, heads, saved["heads"].saved, launches=saved["heads"].launches))


def signature(layer: nn.Module) -> str:
    """Equal for layers that do the same work: kinds of modules and shapes of parameters."""
    kinds = [f"{type(m).__name__}:{getattr(m, 'kind', '')}" for m in layer.modules()]
    return " ".join([*kinds, *(f"{n}{tuple(p.shape)}" for n, p in layer.named_parameters())])


def _layer_unit(model: RankingModel, layer: Any, lengths: Lengths, ends: Mapping[str, PartWork], kept: Kept) -> Unit:
    with _layers(model, [layer]):
        whole = _minus(curves(model, lengths), ends)
    everything = sum(p.numel() for p in layer.parameters())
    experts = getattr(layer.interaction, "experts", None)
    if not isinstance(experts, nn.ModuleList) or not len(experts):
        return Unit("", everything, whole, kept.saved, choices=kept.choices, launches=kept.launches)
    with _layers(model, [layer]):
        layer.interaction.experts = nn.ModuleList()
        trunk = _minus(curves(model, lengths), ends)
        layer.interaction.experts = experts
    n, one = len(experts), sum(p.numel() for p in experts[0].parameters())
    share = {part: replace(work, gemm=work.gemm * (1 / n)) for part, work in _minus(whole, trunk).items() if work.gemm.constant}
    dim = model.config.dim
    elements = (layer.own + layer.pooled) * dim, layer.interaction.tokens * dim
    outside = everything - sum(p.numel() for p in experts.parameters())
    return Unit("", outside, trunk, kept.saved, Experts(n, one, share, *elements), kept.choices, launches=kept.launches)


def curves(model: RankingModel, lengths: Lengths) -> dict[str, PartWork]:
    """FLOPs of each part as functions of a sample's history lengths; read at a few lengths and interpolated (within 0.3 %)."""
    names = [n for n in lengths if n]
    zero = {n: torch.zeros(1, dtype=torch.int64) for n in names}
    base = model.count_flops(zero, 1)
    tables: dict[str, dict[tuple[str, str], Floats]] = {}
    for name in names:
        top = int(lengths[name].max(initial=1))
        knots = _knots(top)
        rows: dict[tuple[str, str], list[float]] = {}
        for length in knots:
            flops = model.count_flops({**zero, name: torch.tensor([length])}, 1)
            for key, value in _amounts(flops).items():
                rows.setdefault(key, []).append(value - _amounts(base)[key])
        tables[name] = {key: np.interp(np.arange(top + 1), knots, values) for key, values in rows.items()}
    parts: dict[str, dict[str, Curve]] = {}
    for (kind, part), constant in _amounts(base).items():
        curve = Curve(constant, {n: tables[n][kind, part] for n in names if tables[n][kind, part].any()})
        parts.setdefault(part, {})[kind] = curve
    return {part: PartWork(**kinds) if "gemm" in kinds else PartWork(Curve(), **kinds) for part, kinds in parts.items()}


def _amounts(flops: ModelFlops) -> dict[tuple[str, str], float]:
    found = {("gemm", p): float(v) for p, v in flops.gemm.items()}
    found |= {("attention", p): float(v) for p, v in flops.attention.items()}
    found |= {("attention_backward", p): float(v) for p, v in flops.attention_backward.items()}
    if flops.auxiliary:
        found["gemm", "auxiliary"] = float(flops.auxiliary)
    return found


def _knots(top: int) -> list[int]:
    knots = list(range(min(top, 8) + 1))
    while knots[-1] < top:
        knots.append(min(top, max(knots[-1] + 1, int(knots[-1] * 1.1))))
    return knots


def _minus(whole: Mapping[str, PartWork], part: Mapping[str, PartWork]) -> dict[str, PartWork]:
    def less(a: Curve, b: Curve) -> Curve:
        return a + b * -1

    none = PartWork(Curve())
    return {
        name: PartWork(
            less(work.gemm, part.get(name, none).gemm),
            less(work.attention, part.get(name, none).attention),
            less(work.attention_backward, part.get(name, none).attention_backward),
        )
        for name, work in whole.items()
    }


@contextmanager
def _layers(model: Any, layers: list[nn.Module]) -> Any:
    """The model with only these layers."""
    kept = model.layers
    model.layers = nn.ModuleList(layers)
    try:
        yield
    finally:
        model.layers = kept


def tables(table_set: TableSet, lengths: Lengths, ids: Mapping[str, float]) -> tuple[Table, ...]:
    """Reads of every table, from the mean lengths of the histories."""
    found = {t.name: Table(t.name, t.rows, t.dim, element={"fp32": 4, "fp16": 2, "bf16": 2}[t.dtype]) for t in table_set.tables}
    for lookup in table_set.lookups:
        table, count = found[lookup.table], ids.get(lookup.key, 1.0)
        if lookup.pooling == "none":
            history = lookup.key.split(".")[1]
            found[lookup.table] = replace(table, event_ids=table.event_ids + count * float(lengths[history].mean()))
        else:
            found[lookup.table] = replace(table, bags=table.bags + 1, pooled_ids=table.pooled_ids + count)
    return tuple(found.values())


def sample(config: Config, resolved: ResolvedConfig, features: Features, size: int) -> tuple[Lengths, dict[str, float]]:
    """History lengths and ids a sample of ``size`` samples that the configured source gives."""
    batch_size = min(size, config.data.batch_size)
    spec = manager().find("source", config.data.source)
    source = spec.build(resolved.source, features, split="train", batch_size=batch_size, shard=(0, 1), seed=config.run.seed)
    lengths: dict[str, list[Any]] = {}
    counts: dict[str, int] = {}
    events: dict[str, int] = {}
    seen = 0
    for batch in source:
        seen += batch.size
        for name, group in batch.sequences.items():
            lengths.setdefault(name, []).append(group.lengths.numpy())
            for key, value in group.fields.items():
                if not isinstance(value, torch.Tensor):
                    path = f"sequences.{name}.fields.{key}"
                    counts[path] = counts.get(path, 0) + value.values.shape[0]
                    events[path] = events.get(path, 0) + int(group.lengths.sum())
        if batch.sparse is not None:
            bounds = batch.sparse.key_bounds()
            for i, key in enumerate(batch.sparse.keys):
                counts[f"sparse.{key}"] = counts.get(f"sparse.{key}", 0) + bounds[i + 1] - bounds[i]
        if seen >= size:
            break
    pool = {name: np.concatenate(parts).astype(np.int64) for name, parts in lengths.items()}
    return pool, {key: n / max(1, events.get(key, seen)) for key, n in counts.items()}
