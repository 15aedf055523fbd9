"""What the sparse strategies must compute, in one process on plain tensors; and a worker that runs the real ones on the same batches.

The tests and the benchmarks compare the two. A toy loss with a quadratic part makes gradients depend on what was looked up, so that an
order of gathers and averages other than the schedule's shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.batch import SparseGroup
from gem_core.config.schema import TableOptimizer
from gem_core.jagged import Jagged
from gem_core.model.contract import Lookup, Shards, TableSet, TableSpec
from gem_core.train.mesh import Mesh
from gem_parallel.sparse import specs
from gem_parallel.sparse.rowwise import segment_sum

Results = Mapping[str, Any]


def toy_tables(multiple: int = 1) -> TableSet:
    """Tables of two widths; one is read pooled and event by event, one only event by event. Rows are rounded up to ``multiple``."""
    sizes = {"a": (37, 8), "b": (5, 8), "c": (64, 4), "d": (11, 8)}
    tables = tuple(TableSpec(name, -(-rows // multiple) * multiple, dim, 0.3) for name, (rows, dim) in sizes.items())
    reads = (("a.sum", "a", "sum"), ("b.mean", "b", "mean"), ("d.sum", "d", "sum"), ("a.events", "a", "none"), ("c.events", "c", "none"))
    return TableSet(tables, tuple(Lookup(*r) for r in reads))  # type: ignore[arg-type]


def random_group(tables: TableSet, samples: int, seed: int, *, weighted: bool = False, longest: int = 5) -> SparseGroup:
    """Bags of 0 to ``longest`` ids, repeated ids included."""
    g = torch.Generator().manual_seed(seed)
    features = {}
    for k in tables.lookups:
        lengths = torch.randint(0, longest + 1, (samples,), generator=g)
        features[k.key] = Jagged.from_lengths(torch.randint(0, tables.table(k.table).rows, (int(lengths.sum()),), generator=g), lengths)
    weights = {k: torch.rand(j.values.numel(), generator=g) + 0.5 for k, j in features.items()} if weighted else None
    return SparseGroup.from_jagged(features, weights)


def toy_loss(results: Results, seed: int) -> Tensor:
    """``sum(r * c + r^2 / 4)`` over all results r, with random c that depend on ``seed`` and the result's place."""
    total = torch.zeros(())
    for i, value in enumerate(results.values()):
        rows = value[0] if isinstance(value, tuple) else value
        g = torch.Generator().manual_seed(seed * 100 + i)
        c = torch.randn(rows.shape, generator=g).to(rows.device)
        total = total.to(rows.device) + (rows * c + rows.square() / 4).sum()
    return total


def look_up(tables: TableSet, weights: Mapping[str, Tensor], group: SparseGroup) -> dict[str, Any]:
    """`gem_core.model.contract.Lookup` word by word: per-id weights multiply rows; "mean" divides by their sum, or by the count."""
    found: dict[str, Any] = {}
    for k in tables.lookups:
        ids = group[k.key]
        w = None if group.weights is None else group.jagged(k.key, group.weights).values
        offsets = ids.offsets.to(torch.int64)
        if k.pooling == "none":
            rows = weights[k.table][ids.values]
            found[k.key] = (rows if w is None else rows * w.unsqueeze(1), ids.offsets)
            continue
        rows = weights[k.table].index_select(0, ids.values)
        bag = torch.repeat_interleave(torch.arange(group.batch_size, device=offsets.device), offsets.diff())
        pooled = rows.new_zeros(group.batch_size, rows.shape[1]).index_add(0, bag, rows if w is None else rows * w.unsqueeze(1))
        if k.pooling == "mean":
            total = ids.lengths.float() if w is None else segment_sum(w.unsqueeze(1), torch.arange(w.numel()), offsets).squeeze(1)
            pooled = pooled / total.where(total != 0, torch.ones_like(total)).unsqueeze(1)
        found[k.key] = pooled
    return found


class Simulator:
    """Row-wise AdaGrad on ``replicas`` copies of all tables, exchanged in the order that a schedule says.

    "article": one copy at every look-up; each replica updates it by its own samples; weights and accumulators are averaged.
    "torchrec": look-ups see the replica's own copy; then copies are averaged; then each replica updates by its own samples.
    "mean": one copy, updated from the mean gradient of all ranks: unsharded training.
    "local": copies that are averaged every ``sync_every`` steps after the update.
    ``own_states``: accumulators are not averaged with the weights (but by `average`), as TorchRec's fully sharded strategy keeps them.
    """

    def __init__(
        self, tables: TableSet, weights: Mapping[str, Tensor], *, model: int, replicas: int, schedule: str, optimizer: TableOptimizer,
        scale: float = 1.0, sync_every: int = 1, own_states: bool = False,
    ) -> None:  # fmt: skip
        self.tables, self.model, self.schedule, self.scale = tables, model, schedule, scale
        self.lr, self.eps, self.sync_every, self.steps = optimizer.lr, optimizer.eps, sync_every, 0
        self.replicas, self.own_states = replicas, own_states
        copies = 1 if schedule == "mean" else replicas
        self.weights = [{n: w.clone() for n, w in weights.items()} for _ in range(copies)]
        self.states = [{n: torch.full((w.shape[0],), optimizer.initial_accumulator) for n, w in weights.items()} for _ in range(copies)]

    def step(self, groups: Sequence[SparseGroup], seeds: Sequence[int]) -> list[dict[str, Any]]:
        """One step on a group a rank; returns what every rank looked up."""
        results: list[dict[str, Any]] = []
        sums: list[dict[str, Tensor]] = [{} for _ in self.weights]
        for rank, (group, seed) in enumerate(zip(groups, seeds)):
            copy = rank % self.replicas % len(self.weights)
            leaves = {n: w.clone().requires_grad_() for n, w in self.weights[copy].items()}
            found = look_up(self.tables, leaves, group)
            toy_loss(found, seed).backward()  # type: ignore[no-untyped-call]
            for n, leaf in leaves.items():
                grad = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                sums[copy][n] = sums[copy].get(n, torch.zeros_like(leaf)) + grad
            results.append({k: (v[0] if isinstance(v, tuple) else v).detach() for k, v in found.items()})
        ranks = len(groups) // len(self.weights)
        if self.schedule == "torchrec":
            self.average(states=not self.own_states)
        for weights, states, grads in zip(self.weights, self.states, sums):
            for n, g in grads.items():
                g = g / ranks
                states[n] += g.square().mean(1)
                weights[n] -= self.lr * g / ((states[n] / self.scale).sqrt() + self.eps).unsqueeze(1)
        self.steps += 1
        if self.schedule == "article" or (self.schedule == "local" and self.steps % self.sync_every == 0):
            self.average()
        return results

    def average(self, states: bool = True) -> None:
        """Mean of weights and accumulators over the copies, to all of them."""
        for held in (self.weights, self.states) if states else (self.weights,):
            for n in held[0]:
                mean = torch.stack([copy[n] for copy in held]).mean(0)
                for copy in held:
                    copy[n] = mean.clone()


def groups_of(task: Mapping[str, Any], tables: TableSet, step: int) -> list[SparseGroup]:
    """The batch of every rank in one step of a scenario: ``samples[step % len][rank]`` samples each."""
    sizes = task["samples"][step % len(task["samples"])]
    groups = [random_group(tables, n, 1000 * step + rank, weighted=task.get("weighted", False)) for rank, n in enumerate(sizes)]
    return [replace(g, values=g.values * task["factor"]) if "factor" in task else g for g in groups]


def run_ranks(rank: int, world: int, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Worker for `gem_core.testing.strategies.run_processes`: every scenario of ``tasks`` by name.

    A scenario has ``strategy``, ``config``, ``model`` (degree), ``steps``, ``samples``, ``optimizer``, ``weighted``, ``prefetch``,
    ``factor`` (of all ids), ``multiple`` (of rows), ``evaluate``, ``then`` (strategy, config and model that take the state over).
    Gives the results of each step, initial and final state as (name, shape, offsets, tensor), copy bytes between the phases.
    """
    return {name: run_rank(rank, world, task) for name, task in tasks.items()}


def run_rank(rank: int, world: int, task: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """One scenario on one rank; see `run_ranks`."""
    tables, module = toy_tables(task.get("multiple", 1)), build(rank, world, task, device)
    optimizer = TableOptimizer.model_validate(task["optimizer"])
    module.configure_optimizer(optimizer)
    module.set_learning_rate(optimizer.lr)
    module.train()
    first = local_state(module)
    steps, memory = [], []
    batches = [groups_of(task, tables, step)[rank] for step in range(task["steps"])]
    batches = [_on(group, device) for group in batches]
    for step, group in enumerate(batches):
        results = module(group)
        memory.append(getattr(module, "copy_bytes", 0))
        if task.get("prefetch") and step + 1 < len(batches):
            module.prefetch(batches[step + 1])
        steps.append([(v[0] if isinstance(v, tuple) else v).detach().cpu().clone() for v in results.values()])
        toy_loss(results, 7 * step + rank).backward()  # type: ignore[no-untyped-call]
        if hasattr(module, "after_backward"):
            module.after_backward(torch.ones((), dtype=torch.bool, device=device))
        memory.append(getattr(module, "copy_bytes", 0))
    if task.get("evaluate"):
        steps.append(_evaluated(module, batches[0]))
    found = {"first": first, "steps": steps, "last": local_state(module), "memory": memory}
    if "then" in task:
        found["then"] = _reloaded(rank, world, task["then"], local_state(module), batches[0], device)
    return found


def build(rank: int, world: int, task: Mapping[str, Any], device: str) -> Any:
    """The strategy of a scenario on the toy tables."""
    spec: Any = next(s for s in specs() if s.name == task["strategy"])
    mesh = Mesh(world, model=task["model"], replica=-1, rank=rank)
    torch.manual_seed(task.get("seed", 3))
    with torch.device(device):
        return spec.build(toy_tables(task.get("multiple", 1)), mesh, spec.config_type.model_validate(task["config"]))


def _evaluated(module: Any, group: SparseGroup) -> list[Tensor]:
    module.eval()
    with torch.no_grad():
        return [(v[0] if isinstance(v, tuple) else v).cpu().clone() for v in module(group).values()]


def _reloaded(rank: int, world: int, task: Mapping[str, Any], state: Any, group: SparseGroup, device: str) -> dict[str, Any]:
    """The state in a module with another plan: what it looks up, and its state."""
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, state)
    whole, module = joined(ranks), build(rank, world, {"seed": 4, **task}, device)
    with torch.no_grad():
        for name, held in module.state_items():
            for offsets, part in held.parts if isinstance(held, Shards) else (((0,) * held.dim(), held),):
                part.copy_(whole[name][tuple(slice(o, o + n) for o, n in zip(offsets, part.shape))])
    module.state_loaded()
    return {"steps": [_evaluated(module, group)], "last": local_state(module)}


def local_state(module: Any) -> list[tuple[str, list[int], list[int], Tensor]]:
    """This rank's boxes of the module's state."""
    boxes = []
    for name, state in module.state_items():
        if isinstance(state, Shards):
            boxes += [(name, list(state.shape), list(offsets), t.detach().cpu().clone()) for offsets, t in state.parts]
        else:
            boxes.append((name, list(state.shape), [0] * state.dim(), state.detach().cpu().clone()))
    return boxes


def joined(ranks: Sequence[Sequence[tuple[str, list[int], list[int], Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' boxes; what no rank holds is NaN, or -1."""
    whole: dict[str, Tensor] = {}
    for boxes in ranks:
        for name, shape, offsets, part in boxes:
            empty = float("nan") if part.dtype.is_floating_point else -1
            target = whole.setdefault(name, torch.full(shape, empty, dtype=part.dtype))
            target[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape))] = part
    return whole


def _on(group: SparseGroup, device: str) -> SparseGroup:
    weights = None if group.weights is None else group.weights.to(device)
    return SparseGroup(group.keys, group.values.to(device), group.lengths.to(device), weights, group.offsets_per_key)
