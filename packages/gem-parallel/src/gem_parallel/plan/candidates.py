"""What the planner chooses from: arrangements of the dense part and of the tables, each with the order of its axes over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations, product
from typing import TYPE_CHECKING, Literal

from gem_parallel.plan.cluster import Cluster
from gem_parallel.plan.network import Axes, Group, place, strides
from gem_parallel.plan.workload import Table, Workload
from gem_parallel.sparse.layout import BYTES

if TYPE_CHECKING:
    from gem_parallel.plan.fixed import Fixed

DENSE_ORDER = ("expert", "shard", "replicate")
"""Axes from the innermost, as `gem_core.train.mesh.Mesh` lays ranks out."""
SPARSE_ORDER = ("replica", "model")

Sharding = Literal["table", "row", "column"]
COPY_ENGINE = "copy-engine"
COLUMNS = 32
"""Least width of a column-wise piece."""


@dataclass(frozen=True)
class Dense:
    """``order`` names the axes from the innermost. ``reshard``: gathered layers are freed after forward and gathered again.
    ``collective``: the back end of the gathers. ``hooked``: layers are FSDP's although nobody shares their parameters, as under ``hsdp``
    with shard groups of one: the host does for them what it does for shared ones. ``param_dtype``: the type in which FSDP gathers the
    layers' parameters; None: that which the layers compute in."""

    replicate: int
    shard: int
    expert: int
    order: tuple[str, ...] = DENSE_ORDER
    reshard: bool = True
    collective: str = "default"
    hooked: bool = False
    param_dtype: str | None = None

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.expert

    @property
    def spread(self) -> int:
        """Ranks that hold different pieces of a parameter."""
        return self.shard * self.expert

    @property
    def averages(self) -> bool:
        """Whether all that ranks do for the dense part is to average gradients, which is what captured steps can hold."""
        return self.strategy in ("single", "ddp")

    def gathered_bytes(self, workload: Workload) -> int:
        """Of a gathered parameter of a layer."""
        return workload.compute_bytes if self.param_dtype is None else BYTES[self.param_dtype]

    @property
    def strategy(self) -> str:
        """Name of the dense strategy in ``[parallel]``."""
        if self.world == 1:
            return "single"
        return ("hsdp" if self.hooked else "ddp") if self.spread == 1 else "fsdp" if self.replicate == 1 else "hsdp"

    @property
    def runnable(self) -> bool:
        """Whether the mesh lays ranks out so."""
        return self.order == DENSE_ORDER

    @cached_property
    def _strides(self) -> dict[str, int]:
        return strides(self.order, {axis: getattr(self, axis) for axis in DENSE_ORDER})

    def axes(self, *names: str) -> Axes:
        """Degree and stride of the axes that have several ranks."""
        return tuple((degree, self._strides[axis]) for axis in names if (degree := int(getattr(self, axis))) > 1)

    def group(self, cluster: Cluster, *names: str) -> Group:
        return place(self.axes(*names), self.world, cluster.domains)

    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in DENSE_ORDER}


@dataclass(frozen=True)
class Sparse:
    """How tables are spread: ``strategy`` of ``[parallel]`` with its options, and how each class of tables is cut over the model axis.

    ``exchange``: "none" (every rank holds all rows of its model shard), "average" (whole copies, averaged every step), "whole" or "touched"
    (storage sharded over the replicas). ``collective``: the back end that whole copies are gathered and averaged by. ``element``: bytes of
    a value of looked-up rows and of their gradients. ``stored``: bytes of a stored value of each table; empty: as the tables say.
    """

    strategy: Literal["local", "fbgemm", "torchrec", "torchrec-2d", "gem-2d"]
    model: int
    replica: int
    order: tuple[str, ...] = SPARSE_ORDER
    exchange: Literal["none", "average", "whole", "touched"] = "none"
    schedule: Literal["article", "torchrec"] = "article"
    cuts: tuple[Sharding, ...] = ()
    collective: str = "default"
    element: int = 4
    stored: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        return self.model * self.replica

    def tables(self, workload: Workload) -> tuple[Table, ...]:
        """Those of the workload, in the types that this strategy stores them in."""
        pairs = zip(workload.tables, self.stored)
        return tuple(replace(table, element=n) for table, n in pairs) if self.stored else workload.tables

    @property
    def width(self) -> float:
        """Bytes of looked-up rows over those of fp32, which layouts count in."""
        return self.element / 4

    @property
    def spread_over_replicas(self) -> bool:
        return self.exchange in ("whole", "touched")

    @property
    def runnable(self) -> bool:
        return self.order == SPARSE_ORDER or self.strategy == "torchrec-2d"

    @cached_property
    def _strides(self) -> dict[str, int]:
        return strides(self.order, {"model": self.model, "replica": self.replica})

    def axes(self, *names: str) -> Axes:
        return tuple((degree, self._strides[axis]) for axis in names if (degree := int(getattr(self, axis))) > 1)

    def group(self, cluster: Cluster, *names: str) -> Group:
        return place(self.axes(*names), self.world, cluster.domains)

    def degrees(self) -> dict[str, int]:
        return {"replica": self.replica, "model": self.model}


@dataclass(frozen=True)
class Widths:
    """What a configuration sets for a strategy of tables; see `Sparse`."""

    element: int = 4
    stored: tuple[int, ...] = ()


@dataclass(frozen=True)
class TableClass:
    """Tables that are cut alike because they are alike: of one size and number of reads, up to a factor of two, whatever type they have."""

    names: tuple[str, ...]


def table_classes(tables: Sequence[Table], most: int = 4) -> list[TableClass]:
    """At most ``most`` classes; the last one takes the tables with the smallest traffic where there would be more."""
    found: dict[tuple[int, int, bool], list[Table]] = {}
    for table in tables:
        key = (round(math.log2(table.rows * table.dim)), round(math.log2(table.ids + 1)), bool(table.event_ids))
        found.setdefault(key, []).append(table)
    classes = sorted(found.values(), key=lambda group: -sum(t.ids * t.dim for t in group))
    if len(classes) > most:
        classes[most - 1 :] = [[table for group in classes[most - 1 :] for table in group]]
    return [TableClass(tuple(t.name for t in group)) for group in classes]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def typed(dense: Dense, workload: Workload) -> Dense:
    """``dense`` with None for the type that its layers compute in."""
    return replace(dense, param_dtype=None) if dense.param_dtype == workload.computes_in else dense


def dense_candidates(workload: Workload, world: int, cluster: Cluster, fixed: Fixed | None = None) -> list[Dense]:
    """All factorisations in all orders, but one of those that sit alike in the network (the one that the mesh can build, if any); with
    what the configuration sets (``fixed``). A captured step leaves whole copies only."""
    spreadable = set(divisors(workload.experts))
    found: dict[object, Dense] = {}
    for expert in divisors(world):
        if expert not in spreadable:
            continue
        for shard in divisors(world // expert):
            replicate = world // expert // shard
            for order, reshard in product(_orders(DENSE_ORDER, expert, shard, replicate), (True, False)):
                one = Dense(replicate, shard, expert, order, reshard)
                if cluster.collectives.copy_engine is not None and one.group(cluster, "shard", "expert").uses(0):
                    one = replace(one, collective=COPY_ENGINE)
                if not reshard and one.spread == 1:
                    continue
                if fixed is not None:
                    kept = fixed.dense(one)
                    if kept is None:
                        continue
                    one = typed(kept, workload)
                if workload.captured and not one.averages:
                    continue
                seat = tuple(one.group(cluster, *names) for names in (("expert",), ("shard",), ("replicate",), ("shard", "expert")))
                found.setdefault((replicate, shard, expert, reshard, seat), one)
    return list(found.values())


def _orders(canonical: tuple[str, ...], *degrees: int) -> Iterator[tuple[str, ...]]:
    """The canonical order first; axes of degree 1 stay where they are."""
    wide = [axis for axis, degree in zip(canonical, degrees) if degree > 1]
    narrow = [axis for axis in canonical if axis not in wide]
    yield canonical
    for order in permutations(wide):
        if list(order) != wide:
            yield (*order, *narrow)


def sparse_candidates(
    workload: Workload,
    world: int,
    cluster: Cluster,
    only: Sequence[str] = (),
    widths: Mapping[str, Widths] | None = None,
    fixed: Fixed | None = None,
) -> list[Sparse]:
    """All strategies (of the names in ``only``, if any), groups, orders and cuts of the classes of tables, likewise. ``widths``: types that
    the configuration sets, by strategy."""
    if not workload.tables:
        return [Sparse("local", 1, world)]
    groups = table_classes(workload.tables)
    classes = len(groups)
    found: dict[object, Sparse] = {}

    def add(one: Sparse) -> None:
        if only and one.strategy not in only:
            return
        seat = one.group(cluster, "model"), one.group(cluster, "replica")
        copied = one.strategy == "gem-2d" and one.exchange == "whole" and cluster.collectives.copy_engine is not None
        one = replace(one, collective=COPY_ENGINE) if copied and seat[1].uses(0) else one
        kept = one if fixed is None else fixed.sparse(one, groups)
        if kept is None:
            return
        if widths and one.strategy in widths:
            kept = replace(kept, element=widths[one.strategy].element, stored=widths[one.strategy].stored)
        found.setdefault((one.strategy, one.exchange, one.schedule, one.cuts, seat), kept)

    # What has a simpler equal is considered only where the configuration asks for it.
    asked = fixed.values.get("parallel.sparse") if fixed is not None else None
    add(Sparse("local", 1, world))
    if world == 1:
        add(Sparse("fbgemm", 1, 1))
    if world == 1 and asked is None:
        return list(found.values())
    all_kinds: tuple[Sharding, ...] = ("row", "table", "column") if world > 1 else ("table",)
    every = list(product(all_kinds, repeat=classes))
    for cuts in every:
        add(Sparse("torchrec", world, 1, cuts=cuts))
    for model in divisors(world):
        replica = world // model
        if replica == 1 and asked != "gem-2d":
            continue
        possible = every if model > 1 else [cuts for cuts in every if set(cuts) == {"table"}]
        for order in _orders(SPARSE_ORDER, replica, model):
            for cuts in possible:
                if model > 1 and replica > 1:
                    add(Sparse("torchrec-2d", model, replica, order, "average", cuts=cuts))
                    add(Sparse("torchrec-2d", model, replica, order, "whole", "torchrec", cuts))
                if "column" in cuts:
                    continue
                add(Sparse("gem-2d", model, replica, order, "touched", "article", cuts))
                add(Sparse("gem-2d", model, replica, order, "whole", "article", cuts))
                add(Sparse("gem-2d", model, replica, order, "whole", "torchrec", cuts))
    return list(found.values())
