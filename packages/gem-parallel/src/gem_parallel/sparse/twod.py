"""The sparse strategy ``gem-2d``: tables sharded over the model axis, and each shard's storage over the replica axis.

Replica r of model rank m holds the r-th part of the rows of m's shard, weights and row-wise AdaGrad state alike. With
``exchange = "whole"`` full copies exist for a time, updated by each replica from its own samples and then averaged:

=================  ==================================  ==========================================
``schedule``       before and after forward            before and after backward
=================  ==================================  ==========================================
``"article"``      gather, look up, drop               gather, update, average (reduce-scatter)
``"torchrec"``     look up, average (reduce-scatter)   gather, update, keep until the next forward
=================  ==================================  ==========================================

So under "torchrec" a look-up sees the replica's own last update and the average comes after it. With ``exchange = "touched"`` replicas
fetch the rows that they read and send gradients back; rows are updated once, from the mean gradient, as without replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.batch import SparseGroup
from gem_core.config.schema import TableOptimizer
from gem_core.errors import ConfigError
from gem_core.model.contract import Shards, TableSet
from gem_core.train.collective import Gatherer, GatherOptions
from gem_core.train.mesh import Mesh
from gem_parallel.collectives import gatherer, topology
from gem_parallel.sparse.comm import Axes, axes
from gem_parallel.sparse.config import FbgemmConfig, Gem2dConfig
from gem_parallel.sparse.engines import DTYPES, TorchEngine, build_engine
from gem_parallel.sparse.exchange import Asked, Demand, Routes, Sizes
from gem_parallel.sparse.initial import drawn
from gem_parallel.sparse.layout import arrange
from gem_parallel.sparse.place import placed
from gem_parallel.sparse.rowwise import RowwiseOptions
from gem_parallel.sparse.touched import TouchedExchange, Wanted
from gem_parallel.sparse.units import Slot, TouchedUnit, WholeUnit


def build_fbgemm(tables: TableSet, mesh: Mesh, config: FbgemmConfig) -> nn.Module:
    """All tables in one process, read and updated by FBGEMM's kernels.

    :raises ConfigError: several processes.
    """
    if mesh.world > 1:
        raise ConfigError(
            f'sparse = "fbgemm" keeps all tables in one process, and {mesh.world} were started',
            where="parallel.sparse",
            fix='use sparse = "gem-2d" or "torchrec"',
        )
    device = torch.empty(0).device
    return Tables2d(tables, axes(mesh, device), Gem2dConfig(kernel="fbgemm", **dict(config)), "fbgemm")


def build_gem_2d(tables: TableSet, mesh: Mesh, config: Gem2dConfig) -> nn.Module:
    """:raises ConfigError: options that exclude each other, or a table that cannot be placed."""
    device = torch.empty(0).device
    return Tables2d(tables, axes(mesh, device, ctas=config.ctas), config)


@dataclass
class Step:
    """One batch on its way: what was exchanged, and the engines' tickets once it was looked up for training."""

    reads: Demand
    asked: Asked
    wanted: Wanted | None = None
    tickets: Any = None


@dataclass
class Ahead:
    """The next batch: its exchange under way, or done on the side stream at the event ``done``."""

    group: SparseGroup
    sizes: Sizes
    step: Step | None = None
    done: Any = None


class Tables2d(nn.Module):
    """See the module's text. Holds its tensors outside of the module's parameters and buffers: `state_items` tells them."""

    optimizer_in_backward = True

    def __init__(self, tables: TableSet, where: Axes, config: Gem2dConfig, strategy: str = "gem-2d") -> None:
        super().__init__()
        self.table_set, self.axes, self.config, self.strategy = tables, where, config, strategy
        self.output = output = DTYPES[config.output]
        self.whole = config.exchange == "whole"
        if not self.whole and config.schedule != "article":
            raise ConfigError(
                'schedule = "torchrec" says when whole copies are averaged, and exchange = "touched" has none',
                where="parallel.gem-2d.schedule",
                fix='leave schedule out, or set exchange = "whole"',
            )
        own_state = self.whole and where.replica > 1
        self.options = RowwiseOptions(scale=config.momentum_scale or (float(where.replica) if own_state else 1.0))
        options = placed(tables, config, strategy, where)
        for name, option in options.items():
            if option.sharding in ("column", "data") or option.ids == "zch" or (own_state and option.placement != "hbm"):
                raise ConfigError(
                    f"{strategy} cuts tables by rows and reads plain ids; table {name!r} asks for {option.model_dump()}"
                    + (', and only exchange = "touched" keeps rows outside of device memory' if option.placement != "hbm" else ""),
                    where=f"parallel.{strategy}.tables.{name}",
                    fix='use sparse = "torchrec" for column-wise, data-parallel and collision-managed tables',
                )
        self.chunks = config.chunks if self.whole else 1
        self.layout = arrange(
            tables, options, where.model, where.replica, chunks=self.chunks, unit_bytes=config.unit_mb << 20 if own_state else None
        )
        self.gathered_by = ""
        self.routes = Routes(tables, self.layout, where, output)
        units = self.layout.units[where.model_rank]
        copies = where.replica if self.whole else 1
        engines = [
            build_engine(
                config.kernel, u.rows * copies, u.dim, u.dtype, where.device, self.options, u.placement, config.cache_fraction, output
            )
            for u in units
        ]  # fmt: skip
        kinds = {"torch" if isinstance(engine, TorchEngine) else "fbgemm" for engine in engines}
        self.kernel = " and ".join(sorted(kinds)) or config.kernel
        by = self._gatherer() if own_state and config.collective != "default" else None
        self.whole_units = [WholeUnit(u, e, where, self.chunks, by) for u, e in zip(units, engines)] if self.whole else []
        self.touched_units = [] if self.whole else [TouchedUnit(u, e) for u, e in zip(units, engines)]
        self.touched = None if self.whole else TouchedExchange(self.touched_units, where, output)
        self.window = min(config.window, len(units)) if config.schedule == "article" else len(units)
        self.slots: list[Slot] = []
        self.ahead: Ahead | None = None
        self._ok: Tensor | None = None
        self._side = torch.cuda.Stream(where.device) if where.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._fill(tables)

    def _gatherer(self) -> Gatherer:
        group, device = self.axes.gather.group, self.axes.device
        ctas = self.config.ctas or (16 if self.config.collective == "copy-engine" else 8)
        options = GatherOptions(device, topology(group, device, self.config.per_host), slots=2, ctas=ctas)
        made, self.gathered_by = gatherer(self.config.collective, group, options)
        return made

    # State

    @torch.no_grad()
    def _fill(self, tables: TableSet) -> None:
        for name, whole in drawn(tables, self.axes.device, self._dtype):
            for piece, unit in self._held(name):
                first, last = piece.rows_of(self.axes.replica_rank)
                unit.weight[piece.base : piece.base + last - first].copy_(whole[first:last])
        for unit in self._units():
            unit.accumulator.zero_()

    def _held(self, table: str) -> Iterator[Any]:
        units = self._units()
        for piece in self.layout.pieces[table]:
            if piece.owner == self.axes.model_rank:
                yield piece, units[piece.unit]

    def _dtype(self, table: str) -> torch.dtype:
        """What the rows of a table are stored in."""
        return DTYPES[next(u.dtype for us in self.layout.units for u in us if any(p.table == table for p in u.pieces))]

    def _units(self) -> list[Any]:
        return [*self.whole_units, *self.touched_units]

    def state_items(self) -> Iterator[tuple[str, Shards]]:
        """Rows stored here, averaged over the replicas first where copies are out under the schedule "torchrec"."""
        self._settle()
        for table in self.table_set.tables:
            weights, accumulators = [], []
            for piece, unit in self._held(table.name):
                first, last = piece.rows_of(self.axes.replica_rank)
                if last > first:
                    rows = slice(piece.base, piece.base + last - first)
                    weights.append(((first, 0), unit.weight[rows]))
                    accumulators.append(((first,), unit.accumulator[rows]))
            yield f"{table.name}.weight", Shards((table.rows, table.dim), self._dtype(table.name), tuple(weights))
            yield f"{table.name}.accumulator", Shards((table.rows,), torch.float32, tuple(accumulators))

    @torch.no_grad()
    def _settle(self) -> None:
        for unit in self.whole_units:
            if unit.full:
                unit.arrive()
                unit.scatter()
        for unit in self.whole_units:
            unit.settle()
        for held in self._units():
            held.engine.flush()
        self._release()

    def state_loaded(self) -> None:
        for held in self._units():
            cache = getattr(getattr(held.engine, "module", None), "reset_cache_states", None)
            if cache is not None:
                cache()

    def configure_optimizer(self, config: TableOptimizer) -> None:
        """Learning rate, eps and initial accumulators of row-wise AdaGrad."""
        self.options.lr, self.options.eps = config.lr, config.eps
        if config.initial_accumulator:
            for unit in self._units():
                unit.accumulator.fill_(config.initial_accumulator)

    def set_learning_rate(self, lr: float) -> None:
        self.options.lr = lr

    # Passes

    def forward(self, group: SparseGroup) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """Results as `gem_core.model.contract.Lookup` says, fp32 unless another output was asked for. Collective over all ranks."""
        trains = torch.is_grad_enabled() and self.training
        step = self._taken(group)
        if trains:
            results = _LookUp.apply(self, step, torch.zeros(0, device=self.axes.device, requires_grad=True))  # type: ignore[no-untyped-call]
        else:
            results = self._look_up(step, False)
        found: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        for lookup, rows in zip(self.table_set.lookups, results):
            found[lookup.key] = (rows, step.asked.offsets[lookup.key]) if lookup.pooling == "none" else rows
        return found

    def prefetch(self, group: SparseGroup) -> None:
        """Begin the exchange of the next batch's ids on a side stream, and to gather for the backward pass that follows."""
        if self.whole:
            self._gather_ahead(with_state=True)
        with self._beside(wait=True):
            self.ahead = Ahead(group, self.routes.begin(group))

    def after_backward(self, ok: Tensor) -> None:
        """Go on with the exchange of the next batch's ids while the device still works on the backward pass."""
        ahead = self.ahead
        if ahead is not None and ahead.step is None:
            with self._beside(wait=False):
                ahead.step = self._exchanged(ahead.sizes)
                if self._side is not None:
                    ahead.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    ahead.done.record(self._side)

    @contextmanager
    def _beside(self, *, wait: bool) -> Iterator[None]:
        """On the side stream; ``wait``: after what the current stream holds now."""
        if self._side is None:
            yield
            return
        if wait:
            self._side.wait_stream(torch.cuda.current_stream(self.axes.device))
        with torch.cuda.stream(self._side):
            yield

    def _taken(self, group: SparseGroup) -> Step:
        ahead = self.ahead
        if ahead is None or ahead.group is not group:
            return self._exchanged(self.routes.begin(group))
        self.after_backward(torch.ones(()))
        self.ahead, step = None, ahead.step
        assert step is not None
        if ahead.done is not None:
            main = torch.cuda.current_stream(self.axes.device)
            main.wait_event(ahead.done)
            for tensor in _tensors(step):
                tensor.record_stream(main)
            for given in (group.values, group.lengths, group.weights):
                if given is not None:
                    given.record_stream(self._side)  # type: ignore[arg-type]
        return step

    def _exchanged(self, sizes: Sizes) -> Step:
        reads, asked = self.routes.finish(sizes)
        return Step(reads, asked, None if self.touched is None else self.touched.want(reads))

    def _look_up(self, step: Step, trains: bool) -> list[Tensor]:
        if self.touched is not None:
            assert step.wanted is not None
            found, step.tickets = self.touched.look_up(step.wanted, trains)
        else:
            found, step.tickets = self._look_up_whole(step.reads, trains)
        return self.routes.answer(found, step.reads, step.asked)

    def _draw_anew(self) -> None:
        """Let the noise that this step rounds with begin at a number of PyTorch's own generator: a checkpoint holds that one's state, so
        that a resumed run rounds as the first one would have."""
        if all(u.dtype == "fp32" for units in self.layout.units for u in units):
            return
        drawn, axes = int(torch.randint(2**62, (), device="cpu")), self.axes
        place = axes.model_rank * axes.replica + axes.replica_rank  # replicas that round alike would keep the noise in their mean
        for i, unit in enumerate(self._units()):
            generators = [getattr(unit.engine, "generator", None), getattr(unit, "generator", None)]
            for j, generator in enumerate(g for g in generators if g is not None):
                generator.manual_seed((drawn + 7919 * (place * 1009 + 2 * i + j)) % 2**63)

    def zero_unless(self, ok: Tensor) -> None:
        """Let gradients of the next backward pass be zeros where the flag ``ok`` is false, whatever they hold: no pass of its own."""
        self._ok = ok

    def _update(self, step: Step, gradients: tuple[Tensor | None, ...]) -> None:
        self._draw_anew()
        share = 1.0 / (self.axes.model * (1 if self.whole else self.axes.replica))
        # rows are added up before they travel to other replicas, and times their share then
        ok, self._ok = self._ok, None
        given = self.routes.give_back(list(gradients), step.reads, step.asked, share if self.touched is None else 1.0, ok)
        if self.touched is not None:
            assert step.wanted is not None
            self.touched.update(step.wanted, step.tickets, given, share)
        else:
            self._update_whole(step.tickets, given)

    def _look_up_whole(self, reads: Demand, trains: bool) -> tuple[list[Tensor], list[Any]]:
        article = self.config.schedule == "article"
        found, tickets = [], []
        self._gather_ahead(with_state=not article)
        for i, unit in enumerate(self.whole_units):
            unit.arrive()
            rows, ticket = unit.engine.look_up(reads.positions[i], reads.offsets[i], reads.weights[i], trains)
            found.append(rows)
            tickets.append(ticket)
            if article:
                unit.drop()
            elif trains:
                unit.scatter()
            self._gather_ahead(with_state=not article, after=i)
        if article or trains:
            self._release()
        return found, tickets

    def _update_whole(self, tickets: list[Any], gradients: list[Tensor]) -> None:
        self._gather_ahead(with_state=True)
        for i, unit in enumerate(self.whole_units):
            unit.arrive()
            unit.engine.update(tickets[i], gradients[i])
            if self.config.schedule == "article":
                unit.scatter()
            self._gather_ahead(with_state=True, after=i)

    # Full copies

    def _gather_ahead(self, *, with_state: bool, after: int = -1) -> None:
        """Begin gathers of the units behind ``after``, as many as have a slot."""
        if self.axes.replica == 1:
            return
        if not self.slots:
            size = max((u.bytes for u in self.whole_units), default=0)
            uniform = self.config.schedule == "article"
            sizes = [size] * self.window if uniform else [u.bytes for u in self.whole_units]
            self.slots = [Slot(torch.empty(n, dtype=torch.uint8, device=self.axes.device)) for n in sizes]
        for i, unit in enumerate(self.whole_units):
            slot = self.slots[i % self.window]
            if i > after and not unit.full and not any(u.slot is slot for u in self.whole_units):
                unit.gather(slot, with_state=with_state)
            elif i > after and not unit.full:
                return

    def _release(self) -> None:
        """Give the memory of full copies back. Blocks that a reduce-scatter still reads are reused only after it."""
        if self.axes.replica == 1:
            return
        for slot in self.slots:
            if self.axes.scatter.stream is not None and slot.busy is not None:
                slot.memory.record_stream(self.axes.scatter.stream)
        self.slots = []

    @property
    def copy_bytes(self) -> int:
        """Bytes of the storages that full copies hold now: of the slots, and of what the engines are bound to."""
        held = [s.memory for s in self.slots] + [t for u in self.whole_units if not u.alone for t in u.engine.bound]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())

    @property
    def outside_bytes(self) -> int:
        """Bytes of device memory that CUDA's allocator does not count: what replicas read of each other by copies."""
        gatherers = {id(u.gatherer): u.gatherer for u in self.whole_units}
        return sum(getattr(g, "outside_bytes", 0) for g in gatherers.values())

    def describe(self) -> list[str]:
        """Plan, bytes a rank, and what overlaps what."""
        layout, axes = self.layout, self.axes
        stored = sum(u.rows * (u.dim * DTYPES[u.dtype].itemsize + 4) for u in layout.units[axes.model_rank])
        lines = [
            f"tables: {self.strategy}, model {axes.model} x replica {axes.replica}, exchange {self.config.exchange}, "
            f"schedule {self.config.schedule}, kernel {self.kernel}, momentum scale {self.options.scale:g}",
            f"tables: {stored / 2**20:.1f} MiB stored on this rank in {len(layout.units[axes.model_rank])} units",
        ]
        for name, pieces in layout.pieces.items():
            kind = f"rows over {len(pieces)} model ranks" if len(pieces) > 1 else f"whole on model rank {pieces[0].owner}"
            lines.append(f"  {name}: {kind}, {pieces[0].block} rows a replica")
        if self.whole and axes.replica > 1:
            full = sum(u.bytes for u in self.whole_units)
            at_once = max((u.bytes for u in self.whole_units), default=0) * self.window if self.config.schedule == "article" else full
            if self.gathered_by:
                lines.append(f"gathers of the tables: {self.gathered_by}")
            lines.append(f"tables: full copies of {at_once / 2**20:.1f} MiB at a time, gathered in {self.chunks} chunks a unit")
        lines.append("pipelined: ids of the next batch with the backward pass" + ("" if axes.device.type == "cuda" else " (on CUDA only)"))
        if self.whole and axes.replica > 1:
            lines.append("pipelined: gathers with the dense backward pass and the units before; reduce-scatters behind the units after")
        lines.append("not pipelined: rows back to the samples' ranks, and their gradients")
        return lines


def _tensors(step: Step) -> Iterator[Tensor]:
    groups: list[Any] = [step.reads.positions, step.reads.offsets, step.reads.weights, [step.asked.order]]
    groups += [step.asked.offsets.values(), step.asked.divisors.values()]
    if step.wanted is not None:
        w = step.wanted
        groups += [w.rows, *([r.rows, r.place, r.bag, r.bounds, r.weights] for r in w.reads)]
    for group in groups:
        yield from (t for t in group if t is not None and t.is_cuda)


class _LookUp(torch.autograd.Function):
    """The whole exchange as one node: its backward updates the tables."""

    @staticmethod
    def forward(ctx: Any, tables: Tables2d, step: Step, _anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.tables, ctx.step = tables, step
        ctx.set_materialize_grads(False)
        return tuple(tables._look_up(step, True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        ctx.tables._update(ctx.step, gradients)
        ctx.step = None
        return None, None, None
