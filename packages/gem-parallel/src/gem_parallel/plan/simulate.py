"""One step of one candidate over all ranks: each draws its own batch from the length law, and collectives wait for their last member."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_parallel.plan.candidates import Dense, Sparse
from gem_parallel.plan.cluster import Cluster
from gem_parallel.plan.engine import Op, Trace, run
from gem_parallel.plan.memory import dense_memory, table_memory, table_points
from gem_parallel.plan.program import compute_times, step
from gem_parallel.plan.shards import layout
from gem_parallel.plan.workload import Lengths, Workload

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Simulation:
    """``seconds``: of the step, the last rank's end. Per rank, ``[world]``: ``compute`` s alone, ``end`` s, ``waiting`` s in which its
    computation stood still, ``events`` of its histories, ``table_bytes`` that it holds and ``memory`` bytes at its peak."""

    ops: tuple[Op, ...]
    trace: Trace
    compute: Floats
    end: Floats
    events: Floats
    table_bytes: Floats
    memory: Floats

    @property
    def seconds(self) -> float:
        return float(self.end.max())

    @property
    def waiting(self) -> Floats:
        return self.end - self.compute

    @property
    def imbalance(self) -> float:
        """Computation of the slowest rank over the mean."""
        return float(self.compute.max() / self.compute.mean())


def simulate(
    workload: Workload, cluster: Cluster, dense: Dense, sparse: Sparse, *, seed: int = 0, lengths: Lengths | None = None
) -> Simulation:
    """Simulate one step.

    :param lengths: histories of every rank, ``[world, B]``; None: drawn from the workload's pool with ``seed``.
    """
    world = dense.world
    lengths = workload.draw(world, seed) if lengths is None else lengths
    ops = step(workload, cluster, compute_times(workload, cluster, lengths), dense, sparse, every_rank=True)
    trace = run(ops, slowdown=cluster.collectives.slowdown, world=world)
    compute = np.zeros(world)
    for op in ops:
        if op.computes:
            compute = compute + op.seconds
    events = np.zeros(world)
    for name, values in lengths.items():
        if name:
            events = events + values.sum(-1)
    held, memory = _memory(workload, cluster, dense, sparse, events)
    return Simulation(tuple(ops), trace, compute, np.broadcast_to(trace.step, (world,)), events, held, memory)


def _memory(workload: Workload, cluster: Cluster, dense: Dense, sparse: Sparse, events: Floats) -> tuple[Floats, Floats]:
    """Bytes of tables on each rank, and peak memory: activations grow with a rank's events, tables are those of its place."""
    world = dense.world
    where = layout(sparse.tables(workload), sparse.cuts, sparse.model) if workload.tables else None
    place = np.zeros(world, dtype=np.int64)
    for degree, stride in sparse.axes("model"):
        place = np.arange(world) // stride % degree
    held = np.array(where.held)[place] / (sparse.replica if sparse.spread_over_replicas else 1) if where else np.zeros(world)
    tables = table_memory(workload, sparse)

    def peaks(amount: float) -> Floats:
        points = dense_memory(workload, cluster, dense, amount)
        more = table_points([name for name, _ in points], tables)
        return np.array([sum(amounts.values()) + extra for (_, amounts), extra in zip(points, more)])

    base, slope = peaks(0.0), peaks(1.0) - peaks(0.0)
    peak = (base + slope * events[:, None]).max(1)
    return held, peak - tables.held + held + cluster.gpu.reserved_gb * 1e9
