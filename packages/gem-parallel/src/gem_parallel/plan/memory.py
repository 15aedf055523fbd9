"""Memory of the busiest rank by category, at the points of a step where it changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gem_parallel.plan.candidates import COPY_ENGINE, Dense, Sparse
from gem_parallel.plan.cluster import Cluster
from gem_parallel.plan.shards import layout
from gem_parallel.plan.workload import Unit, Workload
from gem_parallel.sparse.config import Gem2dConfig

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "gathered copies", "embeddings", "buffers")


@dataclass(frozen=True)
class Memory:
    """``points``: (name, bytes by category) in the order of the step; ``peak``: index of the fullest. ``outside``: bytes of them that the
    allocator of torch does not count, besides the buffers."""

    points: tuple[tuple[str, Mapping[str, float]], ...]
    outside: float = 0.0

    @property
    def peak(self) -> int:
        return max(range(len(self.points)), key=lambda i: sum(self.points[i][1].values()))

    @property
    def bytes(self) -> float:
        return sum(self.points[self.peak][1].values())

    @property
    def at_peak(self) -> Mapping[str, float]:
        return self.points[self.peak][1]


def dense_memory(workload: Workload, cluster: Cluster, dense: Dense, events: float) -> list[tuple[str, dict[str, float]]]:
    """Points of the dense part: "start", each unit's forward, each unit's backward, "end".

    :param events: history events of the busiest rank's batch.
    """
    spread, units = dense.spread, workload.units
    fixed = {"parameters": 4.0 * workload.parameters / spread, "optimizer": 8.0 * workload.parameters / spread}
    saved = [unit.saved.bytes(workload.batch, events) for unit in units]
    copies = [_gathered(unit, workload, dense) for unit in units]
    cast = workload.compute_bytes < 4 and (spread == 1 or dense.gathered_bytes(workload) == 4)
    casts = sum(u.saved.fixed for u in units) if cast else 0.0
    shard = [4.0 * unit.total_parameters / spread for unit in units]
    whole = [4.0 * _own(unit, dense) for unit in units]
    last = len(units) - 1
    always = sum(copies[i] for i in {0, last}) if spread > 1 else 0.0
    points: list[tuple[str, dict[str, float]]] = []
    # a graph's gradients stay where they are, and those that travel have a place of their own
    kept = (1 + (dense.world > 1)) * sum(shard) if workload.captured else 0.0

    def add(name: str, activations: float, gathered: float, gradients: float) -> None:
        gradients = max(gradients, kept)
        points.append((name, {**fixed, "activations": activations + casts, "gathered copies": gathered, "gradients": gradients}))

    def around(i: int, forward: bool) -> float:
        """Gathered layers while layer i computes: its own, the next one of the direction, and those that were never freed."""
        if spread == 1:
            return 0.0
        near = {i, i + 1 if forward else i - 1}
        if not dense.reshard:
            near.update(range(1, i + forward + 1))
        return always + sum(copies[j] for j in near if 0 < j < last)

    add("start", 0.0, always, 0.0)
    held = 0.0
    for i, unit in enumerate(units):
        held += saved[i]
        add(f"{unit.name} forward", held, around(i, True), 0.0)
    gradients = 0.0
    for i in reversed(range(len(units))):
        # What the layer saved is still there while its backward makes the gradients of it; a layer's gradients are reduced one layer later.
        late = whole[i] + (whole[i + 1] if i + 1 < len(units) else 0.0) if spread > 1 else whole[i]
        again = units[i].restored.bytes(workload.batch, events)
        add(f"{units[i].name} backward", held + again + cluster.gpu.transient * (saved[i] + again), around(i, False), gradients + late)
        held -= saved[i]
        gradients += shard[i]
    add("end", 0.0, always, gradients)
    return points


def _own(unit: Unit, dense: Dense) -> float:
    """Parameters of a unit that pass through one rank."""
    return unit.parameters + (unit.experts.count * unit.experts.parameters / dense.expert if unit.experts else 0.0)


def _gathered(unit: Unit, workload: Workload, dense: Dense) -> float:
    return _own(unit, dense) * (dense.gathered_bytes(workload) if unit.name.startswith("layer") else 4)


@dataclass(frozen=True)
class TableMemory:
    """``held``: tables and accumulators for the whole step; ``front``, ``back``: what comes on top before the first layer's forward and
    after the last gradient; ``backward``: all through backward. ``outside``: what of ``held`` other GPUs may read, which the allocator of
    torch does not count."""

    held: float
    front: float
    back: float
    backward: float = 0.0
    outside: float = 0.0


def table_memory(workload: Workload, sparse: Sparse) -> TableMemory:
    """Memory of the tables on the rank that holds most."""
    if not workload.tables:
        return TableMemory(0.0, 0.0, 0.0)
    where = layout(sparse.tables(workload), sparse.cuts, sparse.model)
    batch, width = workload.batch * sparse.model, sparse.width
    own = workload.batch * where.received * width
    rows = own + batch * where.sent_max * width
    # The rows that graphs read are shared by all rooms, with an eighth to spare; each room has gradients of them of its own.
    fixed = (1.125 + rooms(workload)) * own if workload.captured else 0.0
    if sparse.strategy == "local" and sparse.world > 1:
        rows += sparse.world * workload.batch * where.read_max
    if not sparse.spread_over_replicas:
        return TableMemory(where.held_max + fixed, rows, rows)
    held = where.held_max / sparse.replica + fixed
    if sparse.exchange == "touched":
        touched = batch * where.read_max * width
        return TableMemory(held, rows + touched, rows + 2 * touched)
    outside = where.held_max / sparse.replica if sparse.collective == COPY_ENGINE else 0.0
    # Under the article's schedule a few units of tables are whole at a time, which are gathered for the update beside the dense part; under
    # TorchRec's all are, from backward to the look-up. TorchRec itself gathers them once backward has come to the look-ups.
    if sparse.schedule == "article":
        options = Gem2dConfig()
        copy = min(where.held_max, options.window * options.unit_mb * 2.0**20)
        return TableMemory(held, rows + copy, rows + copy, copy, outside)
    ahead = where.held_max if sparse.strategy == "gem-2d" else 0.0
    return TableMemory(held, rows + where.held_max, rows + where.held_max, ahead, outside)


MOST, BAND, SPREAD = 16, 0.02, 3.0
"""Rooms of captured steps (`gem_core.train.captured`): at most so many that lie close, each for batches of up to 2 % fewer events; and the
standard deviations of a batch's events that they span in a run of some hundred steps."""


def rooms(workload: Workload) -> int:
    """Rooms that a run of captured steps has, from how much the events of its batches vary."""
    lengths = sum(values for name, values in workload.lengths.items() if name)
    if isinstance(lengths, int) or not lengths.any():
        return 1
    deviation = float(lengths.std() / lengths.mean()) / (workload.batch * workload.dealt) ** 0.5
    return max(1, min(MOST, round(SPREAD * deviation / BAND)))


def table_points(names: Sequence[str], tables: TableMemory) -> list[float]:
    """Bytes of the tables at each point of `dense_memory`."""
    first = next((i for i, name in enumerate(names) if name.endswith("backward")), len(names))
    amounts = []
    for i in range(len(names)):
        front = tables.front if i <= 1 else 0.0
        back = max(0.0, tables.back - tables.backward) if i >= len(names) - 2 else 0.0
        amounts.append(tables.held + front + back + (tables.backward if i >= first else 0.0))
    return amounts


def step_memory(dense: Sequence[tuple[str, dict[str, float]]], tables: TableMemory, cluster: Cluster) -> Memory:
    """Both parts together, with what the cluster file reserves."""
    more = table_points([name for name, _ in dense], tables)
    reserved = cluster.gpu.reserved_gb * 1e9
    points = tuple((name, {**amounts, "embeddings": extra, "buffers": reserved}) for (name, amounts), extra in zip(dense, more))
    return Memory(points, tables.outside)
