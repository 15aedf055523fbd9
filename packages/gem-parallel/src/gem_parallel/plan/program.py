"""The operations of one training step of a candidate, in the order in which its streams issue them.

Streams: ``compute``; ``gather`` and ``reduce`` of the dense part; ``tables`` for the exchange of embeddings; ``replicas`` for what table
replicas owe one another; ``inputs`` for the ids of the next batch. The order is that of FSDP2 (a layer is gathered while the one before it
computes; its gradients are reduced while the next computes), of expert parallelism for summed experts, and of the table strategies. The
host (``launches``) runs ahead of the GPU from one step into the next, so that a step takes no less time than the host needs for all of its
operations, in whatever order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gem_parallel.plan.candidates import COPY_ENGINE, Dense, Sparse
from gem_parallel.plan.cluster import Cluster
from gem_parallel.plan.engine import HOST, Op, Times
from gem_parallel.plan.network import Axes, Cost, Group, Kind, cost
from gem_parallel.plan.shards import Layout, layout
from gem_parallel.plan.workload import Lengths, PartWork, Unit, Workload
from gem_parallel.sparse.config import Gem2dConfig

ADAMW_BYTES = 28
"""Read and written for a parameter by AdamW: parameter, gradient and both moments in, parameter and both moments out, fp32."""
ID = 8


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of a unit, alone on the GPU at its local MFU: without its experts, and of all its experts together."""

    forward: Times
    backward: Times
    experts_forward: Times = 0.0
    experts_backward: Times = 0.0


def compute_times(workload: Workload, cluster: Cluster, lengths: Lengths) -> tuple[UnitTimes, ...]:
    """Seconds of each unit on ranks whose batches have ``lengths [..., B]``; arrays ``[...]``. Units that do the same work share theirs."""
    known: dict[tuple[int, tuple[str, ...]], UnitTimes] = {}

    def seconds(works: Iterable[tuple[str, PartWork]], backward: bool) -> Any:
        return part_seconds(works, lengths, workload, cluster, backward=backward)

    def of(unit: Unit) -> UnitTimes:
        key = id(unit.work), unit.again
        if key not in known:
            inside = [] if unit.experts is None else list(unit.experts.work.items()) * unit.experts.count
            both = [seconds(works, backward) for works in (unit.work.items(), inside) for backward in (False, True)]
            both[1] = both[1] + seconds([(part, unit.work[part]) for part in unit.again if part in unit.work], False)
            known[key] = UnitTimes(*both)
        return known[key]

    return tuple(of(unit) for unit in workload.units)


def part_seconds(
    works: Iterable[tuple[str, PartWork]], lengths: Lengths, workload: Workload, cluster: Cluster, *, backward: bool = False
) -> Any:
    """Seconds of parts within a step, ``[...]`` for lengths ``[..., B]``."""
    total: Any = 0.0
    peak = cluster.flops(workload.recipe) * cluster.gpu.in_step
    for part, work in works:
        flops = work.gemm * 2 + work.attention_backward if backward else work.gemm + work.attention
        total = total + flops.over(lengths) / (peak * cluster.local_mfu(part, workload.width, backward=backward))
    return total


def typical(times: tuple[UnitTimes, ...], world: int) -> tuple[int, tuple[UnitTimes, ...]]:
    """The rank that computes longest in its step, and its times; where ``times [steps * world]`` are of several steps, in the step whose
    slowest rank is the median of all."""
    total = np.asarray(sum(t.forward + t.backward + t.experts_forward + t.experts_backward for t in times)).reshape(-1, world)
    at = int(np.argsort(total.max(1), kind="stable")[(len(total) - 1) // 2])
    rank = at * world + int(np.argmax(total[at]))

    def one(value: Any) -> float:
        return float(value[rank]) if np.ndim(value) else float(value)

    return rank, tuple(UnitTimes(one(t.forward), one(t.backward), one(t.experts_forward), one(t.experts_backward)) for t in times)


class _Builder:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.ops: list[Op] = []

    def compute(self, name: str, what: str, seconds: Times, after: Iterable[int | None] = ()) -> int:
        return self._add(Op(name, what, "compute", _known(after), seconds))

    def collective(
        self, name: str, what: str, stream: str, kind: Kind, size: float, group: Group, axes: Axes, after: Iterable[int | None] = ()
    ) -> int | None:
        """None, and no operation, for a group of one."""
        return self.send(name, what, stream, cost(kind, size, group, self.cluster.network), axes, after) if axes else None

    def send(self, name: str, what: str, stream: str, price: Cost, axes: Axes, after: Iterable[int | None] = (), by: str = "") -> int:
        """``by``: the back end; copies inside a host have a rate of their own there and take no SM."""
        quiet = by == COPY_ENGINE
        if quiet:
            price = Cost(price.latency, (price.loads[0] / (self.cluster.collectives.copy_engine or 1.0), *price.loads[1:]))
        return self._add(Op(name, what, stream, _known(after), cost=price, axes=axes, quiet=quiet))

    def launches(self, operations: float, hooked: int) -> None:
        """What the host starts: so many operations, and what it does around the collectives of sharded layers, and as often around those of
        ``hooked`` layers that have none."""
        sharded = 3 * hooked + sum(op.what in ("parameter gather", "gradient reduce-scatter") for op in self.ops)
        seconds = (operations * self.cluster.gpu.launch_us + sharded * self.cluster.collectives.host_us) * 1e-6
        if seconds:
            self._add(Op("launches", "launches", HOST, (), seconds))

    def _add(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1


def _known(after: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(i for i in after if i is not None)


def step(
    workload: Workload,
    cluster: Cluster,
    times: tuple[UnitTimes, ...],
    dense: Dense | None,
    sparse: Sparse | None,
    *,
    every_rank: bool = False,
) -> list[Op]:
    """The program of one step; without ``dense`` or ``sparse`` their collectives (and table work) are left out.

    ``every_rank``: reads of tables take each rank its own time, an array; otherwise that of the busiest rank.
    """
    build = _Builder(cluster)
    tables = _Tables(build, workload, sparse, every_rank) if sparse is not None else None
    ready = tables.forward() if tables else None
    part = _Dense(build, workload, dense, times)
    loss = part.forward(ready)
    if dense is not None and dense.world > 1:
        everyone = dense.axes("replicate", "shard", "expert")
        group = dense.group(cluster, "replicate", "shard", "expert")
        # The loss is checked on all ranks before backward, so that a bad step touches no table.
        loss = build.send("agree on the loss", "synchronisation", "agree", cost("barrier", 0, group, cluster.network), everyone, [loss])
    if tables:
        tables.while_backward(loss)
    last = part.backward(loss)
    if tables:
        tables.backward(last)
    part.finish()
    build.compute("host", "host", cluster.gpu.overhead_ms * 1e-3)
    if not workload.captured:
        hooked = len(workload.units) if dense is not None and dense.hooked else 0
        build.launches(workload.launches + (tables.calls if tables else 0), hooked)
    return build.ops


class _Dense:
    """Forward, backward and optimizer of the dense part."""

    def __init__(self, build: _Builder, workload: Workload, dense: Dense | None, times: tuple[UnitTimes, ...]) -> None:
        self.build, self.workload, self.dense, self.times = build, workload, dense, times
        self.units = workload.units
        self.reduced: list[int | None] = []
        self.computed: int | None = None

    def _gather(self, unit: Unit, when: str, after: int | None) -> int | None:
        """All-gather of a unit's parameters; experts live on another group than the rest."""
        dense, build = self.dense, self.build
        if dense is None or dense.spread == 1:
            return None
        group = dense.group(build.cluster, "shard", "expert")
        # Everything outside the layers is gathered in fp32.
        width = dense.gathered_bytes(self.workload) if unit.experts or unit.name.startswith("layer") else 4
        price = cost("all-gather", unit.parameters * width, group, build.cluster.network)
        if unit.experts:
            own = unit.experts.count / dense.expert * unit.experts.parameters * width
            price = price + cost("all-gather", own, dense.group(build.cluster, "shard"), build.cluster.network)
        axes = dense.axes("shard", "expert")
        return build.send(f"gather {unit.name}, {when}", "parameter gather", "gather", price, axes, [after], dense.collective)

    def _reduce(self, unit: Unit, after: int) -> None:
        dense, build = self.dense, self.build
        if dense is None or dense.world == 1:
            return
        own = unit.experts.count * unit.experts.parameters / dense.expert if unit.experts else 0.0
        done: int | None = after
        if dense.spread > 1:
            price = cost("reduce-scatter", unit.parameters * 4, dense.group(build.cluster, "shard", "expert"), build.cluster.network)
            price = price + cost("reduce-scatter", own * 4, dense.group(build.cluster, "shard"), build.cluster.network)
            done = build.send(f"reduce {unit.name}", "gradient reduce-scatter", "reduce", price, dense.axes("shard", "expert"), [after])
        # Captured steps average gradients where the products' copies of the weights have them.
        width = self.workload.compute_bytes if self.workload.captured and dense.spread == 1 else 4
        size = width * (unit.parameters / dense.spread + own / dense.shard)
        copies = dense.group(build.cluster, "replicate")
        whole = build.collective(
            f"average {unit.name}", "gradient all-reduce", "reduce", "all-reduce", size, copies, dense.axes("replicate"), [done]
        )
        self.reduced.append(done if whole is None else whole)

    def _unit(self, unit: Unit, times: UnitTimes, backward: bool, after: Iterable[int | None]) -> int:
        """Computation of a unit, the exchange of the experts' inputs and outputs in its middle (forward: trunk first; backward: last)."""
        build, dense, word = self.build, self.dense, "backward" if backward else "forward"
        trunk = times.backward if backward else times.forward
        experts = times.experts_backward if backward else times.experts_forward
        if unit.experts is None or dense is None or dense.expert == 1:
            return build.compute(f"{unit.name} {word}", "computation", trunk + experts, after)
        group, axes = dense.group(build.cluster, "expert"), dense.axes("expert")
        sample = self.workload.batch * dense.expert * self.workload.compute_bytes
        into, out = unit.experts.elements_in * sample, unit.experts.elements_out * sample
        if backward:
            into, out = out, into
        before = after
        if not backward:
            before = [build.compute(f"{unit.name} {word}", "computation", trunk, after)]

        def exchange(verb: str, kind: Kind, size: float, wait: Iterable[int | None]) -> int | None:
            return build.collective(f"experts of {unit.name} {verb}, {word}", "expert exchange", "experts", kind, size, group, axes, wait)

        given = exchange("get", "all-gather", into, before)
        work = build.compute(f"experts of {unit.name} {word}", "computation", experts, [given])
        taken = exchange("give", "reduce-scatter", out, [work])
        return build.compute(f"{unit.name} {word}, after", "computation", trunk if backward else 0.0, [taken])

    def _split(self) -> tuple[Unit, tuple[Unit, ...], Unit | None]:
        """The front, the layers and, for a model of several units, the heads."""
        return (self.units[0], self.units[1:-1], self.units[-1]) if len(self.units) > 1 else (self.units[0], (), None)

    def forward(self, embedded: int | None) -> int:
        front, layers, heads = self._split()
        ends = self._gather(front, "forward", None)
        if heads is not None:
            ends = self._gather(heads, "forward", None) or ends
        following = self._gather(layers[0], "forward", None) if layers else None
        self.computed = self._unit(front, self.times[0], False, [ends, embedded])
        for i, unit in enumerate(layers):
            gathered = following
            # A layer is gathered while the one before it computes, so its gather waits for the end of the one before that.
            following = self._gather(layers[i + 1], "forward", self.computed) if i + 1 < len(layers) else None
            self.computed = self._unit(unit, self.times[i + 1], False, [gathered, self.computed])
        if heads is not None:
            self.computed = self._unit(heads, self.times[-1], False, [self.computed])
        return self.computed

    def backward(self, loss: int) -> int:
        front, layers, heads = self._split()
        done = loss
        if heads is not None:
            done = self._unit(heads, self.times[-1], True, [loss])
        again = self.dense is not None and self.dense.reshard
        following: int | None = None
        for i in reversed(range(len(layers))):
            gathered = following
            # The last layer stays gathered from its forward; the others are gathered while the layer behind them computes.
            following = self._gather(layers[i - 1], "backward", done) if again and i else None
            done = self._unit(layers[i], self.times[i + 1], True, [gathered, done])
            if not self.workload.captured:
                self._reduce(layers[i], done)
        done = self._unit(front, self.times[0], True, [done])
        # Gradients of a captured step are averaged behind the graph that holds all of the backward pass.
        late = (*layers, front) if self.workload.captured else (front,)
        for unit in (*late, *([heads] if heads is not None else [])):
            self._reduce(unit, done)
        return done

    def finish(self) -> None:
        dense, build = self.dense, self.build
        spread = 1 if dense is None else dense.spread
        seconds = ADAMW_BYTES * self.workload.parameters / spread / (build.cluster.gpu.memory_gbs * 1e9)
        build.compute("optimizer", "optimizer", seconds, self.reduced)


class _Tables:
    """What the tables do in a step."""

    def __init__(self, build: _Builder, workload: Workload, sparse: Sparse, every_rank: bool) -> None:
        self.build, self.workload, self.sparse = build, workload, sparse
        self.layout: Layout = layout(sparse.tables(workload), sparse.cuts, sparse.model)
        cluster = build.cluster
        self.over_model = sparse.axes("model"), sparse.group(cluster, "model")
        self.over_replicas = sparse.axes("replica"), sparse.group(cluster, "replica")
        self.rows_rate = cluster.gpu.memory_gbs * 1e9 * cluster.gpu.row_efficiency
        self.update_rate = cluster.gpu.memory_gbs * 1e9 * cluster.gpu.plain_row_efficiency if sparse.strategy == "local" else self.rows_rate
        self.batch = workload.batch * sparse.model
        self.read: Times = self.layout.read_max
        if every_rank:
            coordinates = np.zeros(sparse.world, dtype=np.int64)
            for degree, stride in sparse.axes("model"):
                coordinates = np.arange(sparse.world) // stride % degree
            self.read = np.array(self.layout.read)[coordinates]
        self.full: int | None = None

    @property
    def calls(self) -> float:
        """Operations of ``gem-2d`` that move whole copies, unit by unit, weights and state apart: gathers before one pass or both, and
        averages. Each copy between GPUs has a wait for its peer beside it."""
        if self.sparse.strategy != "gem-2d" or self.sparse.exchange != "whole" or not self.over_replicas[0]:
            return 0.0
        passes = 3 if self.sparse.schedule == "article" else 2
        by_copies = 2 if self.sparse.collective == COPY_ENGINE else 1
        return math.ceil(self.layout.held_max / (Gem2dConfig().unit_mb * 2.0**20)) * 2 * passes * by_copies

    def _exchange(self, name: str, per_sample_mean: float, per_sample_max: float, stream: str, after: Iterable[int | None]) -> int | None:
        axes, group = self.over_model
        size = max(self.workload.batch * per_sample_mean, self.batch * per_sample_max) * self.sparse.width
        return self.build.collective(name, "embedding all-to-all", stream, "all-to-all", size, group, axes, after)

    def _whole(self, name: str, kind: Kind, after: Iterable[int | None]) -> int | None:
        axes, group = self.over_replicas
        if not axes:
            return None
        price = cost(kind, self.layout.held_max, group, self.build.cluster.network)
        return self.build.send(name, "table replicas", "replicas", price, axes, after, self.sparse.collective)

    def _touched(self, name: str, after: Iterable[int | None], *, rows: bool) -> int | None:
        """Rows that the busiest rank fetches from its replicas' storage, or their gradients on the way back."""
        axes, group = self.over_replicas
        size = self.batch * (self.layout.read_max * self.sparse.width if rows else self.layout.touched_max * ID)
        return self.build.collective(name, "table replicas", "replicas", "all-to-all", size, group, axes, after)

    def forward(self) -> int | None:
        """Up to the embeddings of this batch; returns what the front of the model waits for."""
        build, sparse, layout = self.build, self.sparse, self.layout
        if not self.workload.tables:
            return None
        asked = layout.asked * ID * self.workload.batch
        axes, group = self.over_model
        # The ids of the next batch travel beside this batch's step.
        build.collective("ids of the next batch", "ids all-to-all", "inputs", "all-to-all", asked, group, axes)
        present: int | None = None
        if sparse.exchange == "whole" and sparse.schedule == "article":
            present = self._whole("gather tables, forward", "all-gather", [])
        elif sparse.exchange == "touched":
            wanted = self._touched("ask replicas for rows", [], rows=False)
            present = self._touched("fetch rows", [wanted], rows=True)
        read = build.compute("look up", "table look-up", 2 * self.batch * self.read / self.rows_rate, [present])
        if sparse.exchange == "whole" and sparse.schedule == "torchrec":
            self._whole("average tables", "reduce-scatter", [read])
        return self._exchange("embeddings", layout.received, layout.sent_max, "tables", [read]) or read

    def while_backward(self, loss: int) -> None:
        """Full copies for the update are gathered beside the dense backward."""
        if self.sparse.exchange == "whole" and self.workload.tables:
            self.full = self._whole("gather tables, backward", "all-gather", [loss])

    def backward(self, last: int) -> None:
        """From the gradients of the embeddings to updated tables."""
        build, sparse, layout = self.build, self.sparse, self.layout
        if not self.workload.tables:
            return
        axes, group = self.over_replicas
        updated = self.batch * self.read
        back = self._exchange("gradients of embeddings", layout.received, layout.sent_max, "tables", [last]) or last
        if sparse.strategy == "local" and sparse.world > 1:
            pairs = sparse.world * self.workload.batch * (layout.read_max + layout.asked * ID)
            back = build.collective("row gradients of all", "table replicas", "replicas", "all-gather", pairs, group, axes, [back]) or back
            updated = updated * sparse.world
        elif sparse.exchange == "touched":
            back = self._touched("return row gradients", [back], rows=True) or back
        update = build.compute("update tables", "table update", 4 * updated / self.update_rate, [back, self.full])
        if sparse.exchange == "whole" and sparse.schedule == "article":
            self._whole("average tables", "reduce-scatter", [update])
        elif sparse.exchange == "average":
            self._whole("average tables", "all-reduce", [update])
