"""The fastest candidate that fits: every pair of a dense and a sparse arrangement, with bounds that spare most of them a simulation.

A step can be no faster than with the dense collectives alone or with the tables alone. Both are simulated for every arrangement of one
side, with as much recomputation as a pair needs; pairs are then taken in the order of their bounds, until no bound is below the best time
found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gem_core.errors import ConfigError
from gem_parallel.plan.budget import Level, levels
from gem_parallel.plan.candidates import DENSE_ORDER, Dense, Sparse, Widths, dense_candidates, sparse_candidates
from gem_parallel.plan.cluster import Cluster
from gem_parallel.plan.engine import HOST, Op, Trace, run
from gem_parallel.plan.fixed import Fixed
from gem_parallel.plan.memory import Memory, dense_memory, step_memory, table_memory, table_points
from gem_parallel.plan.program import UnitTimes, compute_times, step, typical
from gem_parallel.plan.workload import Lengths, Workload

SLACK = 1.05
"""Room of a captured step for events over those that it has."""
DRAWS = 33
"""Batches that are drawn at least."""
TIE = 0.01
"""Steps that differ by less are equally long: the model is not better than that."""
MARGIN = 0.9
"""Bounds count this share of what communication adds: where links are shared, one more collective can free the way for another."""


@dataclass(frozen=True)
class Estimate:
    """One candidate: ``seconds`` of a step (of the rank that computes longest, all others waiting for it) and ``memory`` of the busiest.

    ``recomputed``: modules whose activations are made again in backward, those of the space's ``level``."""

    dense: Dense
    sparse: Sparse
    memory: Memory
    ops: tuple[Op, ...] = field(repr=False)
    trace: Trace = field(repr=False)
    level: int = 0
    recomputed: tuple[str, ...] = ()

    @cached_property
    def seconds(self) -> float:
        return float(self.trace.step)

    @cached_property
    def device_seconds(self) -> float:
        """Of a step whose host is never waited for."""
        return float(self.trace.device(self.ops))

    @cached_property
    def host_seconds(self) -> float:
        """Of the host's work alone."""
        return float(sum(op.seconds for op in self.ops if op.stream == HOST))

    @cached_property
    def breakdown(self) -> dict[str, float]:
        """Where the step's time goes: computation, its slow-down by collectives, and each kind of collective as far as it is exposed."""
        found: dict[str, float] = {}
        before = self._before()

        def add(what: str, seconds: float) -> None:
            if seconds > 0:
                found[what] = found.get(what, 0.0) + seconds

        def waited(since: float, until: float, last: int) -> None:
            """Time in which nothing was computed, for the chain of collectives that ended with ``last``."""
            now, at = until, last
            while now > since:
                begin = max(since, self.trace.start[at])
                add(self.ops[at].what, now - begin)
                now = begin
                earlier = [k for k in before[at] if self.trace.end[k] > since]
                if not earlier:
                    add(self.ops[at].what, now - since)
                    return
                at = max(earlier, key=lambda k: self.trace.end[k])

        free = 0.0
        for i, op in enumerate(self.ops):
            if op.computes:
                if self.trace.start[i] > free:
                    waited(free, self.trace.start[i], max(op.after, key=lambda k: self.trace.end[k]))
                add(op.what, float(op.seconds))
                add("contention", self.trace.stretch[i])
                free = self.trace.end[i]
        if self.seconds > free:
            waited(free, self.seconds, max(range(len(self.ops)), key=lambda k: self.trace.end[k]))
        return found

    def _before(self) -> list[list[int]]:
        """What each operation waits for: its dependencies and the operation before it in its stream."""
        last: dict[str, int] = {}
        found = []
        for i, op in enumerate(self.ops):
            found.append([*op.after, *([last[op.stream]] if op.stream in last else [])])
            last[op.stream] = i
        return found

    @cached_property
    def collectives(self) -> dict[str, tuple[float, float]]:
        """Of each kind of collective: seconds on the network, and seconds of these that computation waits for."""
        exposed = self.breakdown
        found: dict[str, float] = {}
        for i, op in enumerate(self.ops):
            if op.cost is not None:
                found[op.what] = found.get(op.what, 0.0) + self.trace.end[i] - self.trace.start[i]
        return {what: (total, min(total, exposed.get(what, 0.0))) for what, total in found.items()}


@dataclass
class Space:
    """All candidates of one workload on one cluster, and what they cost.

    ``times`` and history ``lengths [1, B]`` are those of the rank that stands for all, ``events`` those of the fullest batch.
    """

    workload: Workload
    cluster: Cluster
    world: int
    times: tuple[UnitTimes, ...]
    events: float
    lengths: Lengths
    dense: list[Dense]
    sparse: list[Sparse]
    fixed: Fixed = field(default_factory=Fixed)
    evaluated: int = 0
    levels: list[Level] = field(default_factory=list)
    _dense_memory: dict[tuple[Dense, int], list[tuple[str, dict[str, float]]]] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        workload: Workload,
        cluster: Cluster,
        world: int,
        *,
        sparse: Sequence[str] = (),
        widths: Mapping[str, Widths] | None = None,
        fixed: Fixed | None = None,
        seed: int = 0,
    ) -> Space:
        """:param sparse: names of the sparse strategies to consider; none: all.
        :param widths: types of rows and tables that the configuration sets, by sparse strategy.
        :param fixed: what else it sets.
        :raises ConfigError: nothing agrees with ``fixed``.
        """
        cluster.check_world(world)
        # Few ranks are drawn several times: the slowest rank of a typical step stands for time, the fullest of any for memory.
        steps = max(1, DRAWS // world)
        lengths = workload.draw(world * steps, seed)
        rank, times = typical(compute_times(workload, cluster, lengths), world)
        events = (SLACK if workload.captured else 1.0) * float(
            np.max(sum(values.sum(-1) for name, values in lengths.items() if name) if "" not in lengths else 0.0)
        )
        own = {name: values[rank : rank + 1] for name, values in lengths.items()}
        fixed = fixed or Fixed()
        space = cls(workload, cluster, world, times, events, own, [], [], fixed)
        space.levels = levels(workload, cluster, times, own, events, fixed.recomputed)
        space.dense = dense_candidates(workload, world, cluster, fixed)
        space.sparse = sparse_candidates(workload, world, cluster, sparse, widths, fixed)
        if not space.dense or not space.sparse:
            raise fixed.refuse(world, workload.captured and world > 1)
        return space

    @property
    def compute(self) -> float:
        """Seconds that the slowest rank computes."""
        return _computed(self.times)

    @property
    def room(self) -> float:
        return self.cluster.gpu.memory_gb * 1e9

    def dense_memory(self, dense: Dense, level: int = 0) -> list[tuple[str, dict[str, float]]]:
        if (dense, level) not in self._dense_memory:
            self._dense_memory[dense, level] = dense_memory(self.levels[level].workload, self.cluster, dense, self.events)
        return self._dense_memory[dense, level]

    def memory(self, dense: Dense, sparse: Sparse, level: int = 0) -> Memory:
        return step_memory(self.dense_memory(dense, level), table_memory(self.workload, sparse), self.cluster)

    def peaks(self, level: int = 0) -> NDArray[np.float64]:
        """Peak memory of every pair at a level of recomputation, ``[dense, sparse]`` bytes."""
        names = [name for name, _ in self.dense_memory(self.dense[0])]
        ours = np.array([[sum(amounts.values()) for _, amounts in self.dense_memory(d, level)] for d in self.dense])
        theirs = np.array([table_points(names, table_memory(self.workload, s)) for s in self.sparse])
        return np.array([(row + theirs).max(1) for row in ours]) + self.cluster.gpu.reserved_gb * 1e9

    def first_level(self) -> NDArray[np.int64]:
        """The least recomputation with which each pair fits, ``[dense, sparse]``; -1: none is enough."""
        last = len(self.levels) - 1
        found = np.where(self.peaks(last) <= self.room, last, -1)
        for level in range(last):
            fits = self.peaks(level) <= self.room
            found = np.where(fits & ((found < 0) | (found > level)), level, found)
            if (fits | (found < 0)).all():
                break
        return found

    def level_of(self, dense: Dense, sparse: Sparse) -> int:
        """The least recomputation with which a pair fits; 0 where none is enough."""
        return next((i for i in range(len(self.levels)) if self.memory(dense, sparse, i).bytes <= self.room), 0)

    def estimate(self, dense: Dense, sparse: Sparse, level: int = 0) -> Estimate:
        self.evaluated += 1
        at = self.levels[level]
        ops = step(at.workload, self.cluster, at.times, dense, sparse)
        memory = self.memory(dense, sparse, level)
        return Estimate(dense, sparse, memory, tuple(ops), run(ops, slowdown=self.cluster.collectives.slowdown), level, at.modules)

    def bound(self, dense: Dense | None, sparse: Sparse | None, level: int = 0) -> tuple[float, float]:
        """Seconds of a step in which only one side communicates: of the device, and of the host."""
        at = self.levels[level]
        ops = step(at.workload, self.cluster, at.times, dense, sparse)
        trace = run(ops, slowdown=self.cluster.collectives.slowdown)
        return float(trace.device(ops)), sum(float(op.seconds) for op in ops if op.stream == HOST)

    def bounds(self, first: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds that no pair can be faster than, ``[2, dense, sparse]``, at the level of recomputation that it needs (``first``): of the
        step, and of its device alone. Infinite where a pair does not fit."""
        found = np.full((2, *first.shape), np.inf)
        for level in np.unique(first[first >= 0]):
            here, alone = first == level, _computed(self.levels[level].times)
            ours = np.array([self.bound(d, None, level) if used else (0.0, 0.0) for d, used in zip(self.dense, here.any(1))])
            theirs = np.array([self.bound(None, s, level) if used else (0.0, 0.0) for s, used in zip(self.sparse, here.any(0))])
            device = alone + MARGIN * (np.maximum(ours[:, None, 0], theirs[:, 0]) - alone)
            found = np.where(here, [np.maximum(device, np.maximum(ours[:, None, 1], theirs[:, 1])), device], found)
        return found


def _computed(times: Sequence[UnitTimes]) -> float:
    return float(sum(t.forward + t.backward + t.experts_forward + t.experts_backward for t in times))


def rank_key(estimate: Estimate) -> tuple[float, float, bool, tuple[int, int, bool], int]:
    """Faster first; where the host bounds both what the device does in less time; among equals what can run, then what is simpler."""
    dense, sparse = estimate.dense, estimate.sparse
    fast = _rounded(estimate.seconds, estimate.device_seconds)
    return *fast, not (dense.runnable and sparse.runnable), simplicity(dense, sparse, estimate.level), _plain(dense, sparse)


_TABLES = ("local", "fbgemm", "gem-2d", "torchrec", "torchrec-2d")
_LAYERS = ("single", "ddp", "fsdp", "hsdp")


def simplicity(dense: Dense, sparse: Sparse, level: int = 0) -> tuple[int, int, bool]:
    """Less is simpler: first what the tables need, then the dense part, then recomputation."""
    return _TABLES.index(sparse.strategy), _LAYERS.index(dense.strategy), level > 0


def _plain(dense: Dense, sparse: Sparse) -> int:
    """Of one strategy with another mesh or other cuts."""
    axes = sum(d > 1 for d in (*dense.degrees().values(), *sparse.degrees().values()))
    return axes + len(set(sparse.cuts)) + (not dense.reshard)


def _rounded(seconds: float, device: float) -> tuple[float, float]:
    return float(f"{seconds:.5g}"), float(f"{device:.5g}")


@dataclass(frozen=True)
class Plan:
    """``best``: the fastest that fits, in any order of the axes; ``runnable``: of all that fit and that the mesh can lay out, the simplest
    that is as fast as the others (within `TIE`).

    They are the same object unless ``best`` cannot be run and is faster by more than `TIE`.
    """

    space: Space
    best: Estimate
    runnable: Estimate


def plan(space: Space, *, exhaustive: bool = False) -> Plan:
    """Search ``space``. ``exhaustive`` simulates every pair that fits.

    :raises ConfigError: nothing fits; the message names the least that is missing and the largest batch that would do.
    """
    first = space.first_level()
    if (first < 0).all():
        raise _too_large(space)
    bounds = space.bounds(first)
    order = np.lexsort((bounds[1].ravel(), bounds[0].ravel()))
    best: Estimate | None = None
    runnable: Estimate | None = None
    for at in order[: int((first >= 0).sum())]:
        i, j = divmod(int(at), len(space.sparse))
        d, s, lower = space.dense[i], space.sparse[j], _rounded(*bounds[:, i, j])
        runs = d.runnable and s.runnable
        if not exhaustive:
            good = runnable if runs else best
            if runnable and best and lower > max(rank_key(best)[:2], rank_key(runnable)[:2]):
                break
            if good and lower > rank_key(good)[:2]:
                continue
        found = space.estimate(d, s, int(first[i, j]))
        if best is None or rank_key(found) < rank_key(best):
            best = found
        if runs and (runnable is None or rank_key(found) < rank_key(runnable)):
            runnable = found
    assert best is not None
    if runnable is None:
        raise ConfigError("no arrangement that the mesh can lay out fits", where="--world", fix="start more processes, or a smaller batch")
    runnable = _simplest(space, first, bounds[0], runnable)
    return Plan(space, best if best.seconds * (1 + TIE) < runnable.seconds else runnable, runnable)


def _simplest(space: Space, first: NDArray[np.int64], bounds: NDArray[np.float64], fastest: Estimate) -> Estimate:
    """Of all that run and take no more than `TIE` longer than ``fastest`` the simplest, of equally simple ones the fastest."""
    limit = fastest.seconds * (1 + TIE)
    runs = np.outer([d.runnable for d in space.dense], [s.runnable for s in space.sparse])
    pairs = [
        (simplicity(space.dense[i], space.sparse[j], int(first[i, j])), float(bounds[i, j]), int(i), int(j))
        for i, j in np.argwhere(runs & (bounds <= limit))
    ]
    found, plain = fastest, simplicity(fastest.dense, fastest.sparse, fastest.level)
    for simple, lower, i, j in sorted(pairs):
        if simple > plain:
            break
        if simple == plain and lower > found.seconds:
            continue
        one = space.estimate(space.dense[i], space.sparse[j], int(first[i, j]))
        if one.seconds <= limit and (simple < plain or rank_key(one) < rank_key(found)):
            found, plain = one, simple
    return found


def _too_large(space: Space) -> ConfigError:
    lean = _leanest(space.dense)

    def least(batch: int) -> Memory:
        share = batch / space.workload.batch
        scaled = [replace(level, workload=level.workload.with_batch(batch)) for level in space.levels]
        other = replace(space, workload=space.workload.with_batch(batch), levels=scaled, events=space.events * share, _dense_memory={})
        return min((other.memory(d, s, len(scaled) - 1) for d in lean for s in space.sparse), key=lambda m: m.bytes)

    needed, room = least(space.workload.batch), space.room
    batch = space.workload.batch
    while batch and least(batch).bytes > room:
        batch //= 2
    parts = ", ".join(f"{what} {size / 1e9:.1f}" for what, size in needed.at_peak.items() if size >= 5e7)
    fix = f"set data.batch_size = {batch} or less, or " if batch else ""
    return ConfigError(
        f"nothing fits: the leanest arrangement of {space.world} GPUs needs {needed.bytes / 1e9:.1f} GB of {room / 1e9:.1f} GB "
        f"(GB: {parts}; at {needed.points[needed.peak][0]!r})",
        where=f"--world {space.world}, data.batch_size = {space.workload.batch}",
        fix=f"{fix}start more processes, or plan for GPUs with more memory"
        + ("; with train.capture = false the dense part can be sharded" if space.workload.captured and space.world > 1 else "")
        + (f"; or plan with --free KEY what is set: {space.fixed.text()}" if space.fixed else ""),
    )


def _leanest(dense: Sequence[Dense]) -> list[Dense]:
    top = max(d.spread for d in dense)
    return [d for d in dense if d.spread == top and d.reshard and d.order == DENSE_ORDER] or list(dense)
