"""One unit of the two-dimensional arrangement: its stored rows, and how replicas exchange them.

`WholeUnit` gathers all rows before they are used and averages them after they were updated. `TouchedUnit` moves the rows that this step
uses, and their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_core.train.collective import Gatherer, Source
from gem_parallel.sparse.comm import Axes, Lane
from gem_parallel.sparse.engines import DTYPES, Engine
from gem_parallel.sparse.layout import Unit
from gem_parallel.sparse.rowwise import rounded


@dataclass
class Slot:
    """Memory for one full copy, reused by one unit after another; ``busy`` is the event after its last reader on another stream."""

    memory: Tensor
    busy: Any = None


class WholeUnit:
    """``weight [rows, dim]`` and ``accumulator [rows]`` stored by this replica; full copies of ``replicas * rows`` rows for a time.

    ``full`` says whether the engine is bound to a full copy. Without replicas the stored rows are the full copy.
    """

    def __init__(self, unit: Unit, engine: Engine, axes: Axes, chunks: int, gatherer: Gatherer | None = None) -> None:
        self.unit, self.engine, self.axes, self.chunks = unit, engine, axes, chunks
        self.gatherer = gatherer
        self.source: Source | None = None
        self.dtype, device = DTYPES[unit.dtype], axes.device
        self.generator = torch.Generator(device)
        self.generator.manual_seed(torch.initial_seed() % 2**63)
        self.slot: Slot | None = None
        self._views: tuple[Tensor, Tensor] | None = None
        self._arrived: Any = None
        self._averaged: Any = None
        self.alone = axes.replica == 1
        if self.alone:
            self.weight, self.accumulator = engine.weight, engine.accumulator
        else:
            engine.bind(None, None)
            if gatherer is None:
                self.weight = torch.zeros(unit.rows, unit.dim, dtype=self.dtype, device=device)
                self.accumulator = torch.zeros(unit.rows, device=device)
            else:
                self.source = gatherer.source(self._start(unit.rows) + unit.rows * 4)
                self.weight, self.accumulator = self._cut(self.source.memory, unit.rows)

    @property
    def bytes(self) -> int:
        """Of a full copy with its accumulators, each part aligned to 512 bytes."""
        rows = self.unit.rows * self.axes.replica
        return self._start(rows) + rows * 4

    def _start(self, rows: int) -> int:
        """Where the accumulators of so many rows begin behind their weights."""
        return -(-rows * self.unit.dim * self.dtype.itemsize // 512) * 512

    def _cut(self, memory: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        weights, start = rows * self.unit.dim * self.dtype.itemsize, self._start(rows)
        return memory[:weights].view(self.dtype).view(rows, self.unit.dim), memory[start : start + rows * 4].view(torch.float32)

    @property
    def full(self) -> bool:
        return self._views is not None

    @torch.no_grad()
    def gather(self, slot: Slot, *, with_state: bool) -> None:
        """Begin to fill ``slot`` with the full copy; the rows may be read after `arrive`."""
        if self.alone or self.full:
            return
        self._views = self._cut(slot.memory, self.unit.rows * self.axes.replica)
        self.slot = slot
        lane: Lane = self.axes.gather
        moves: list[tuple[Tensor, Tensor]] = []
        for full, stored in zip(self._views, (self.weight, self.accumulator)):
            if full.dim() == 2 or with_state:
                moves += zip(full.chunk(self.chunks), stored.chunk(self.chunks))
        with lane.behind(slot.busy, self._averaged):
            if self.source is not None:
                base = self.source.memory.data_ptr()
                self.source.gather([(out, part.data_ptr() - base) for out, part in moves])
            else:
                for out, part in moves:
                    lane.all_gather(out, part)
            self._arrived = lane.mark()
        slot.busy = None

    def arrive(self) -> None:
        """Let the current stream wait for the gather, and the engine use the copy."""
        if not self.alone:
            assert self._views is not None
            self.axes.gather.wait(self._arrived)
            self.engine.bind(*self._views)

    @torch.no_grad()
    def scatter(self) -> None:
        """Average the full copies of all replicas into the stored rows, on the scatter stream, and let go of the copy."""
        if self.alone:
            return
        assert self._views is not None
        assert self.slot is not None
        lane = self.axes.scatter
        with lane.behind():
            if self.source is not None:
                self.source.reclaim()
            for full, stored in zip(self._views, (self.weight, self.accumulator)):
                for whole, part in zip(full.chunk(self.chunks), stored.chunk(self.chunks)):
                    self._average(lane, whole, part)
            self.slot.busy = self._averaged = lane.mark()
        self.drop()

    def _average(self, lane: Lane, whole: Tensor, part: Tensor) -> None:
        if whole.dtype == torch.float32:
            if self.gatherer is None:
                lane.reduce_mean(part, whole)
            else:
                self.gatherer.mean(part, whole)
            return
        # A sum in 16 bits would round the mean, always to nearest, and so undo small updates that stochastic rounding kept.
        n = part.shape[0]
        received = lane.all_to_all(whole, [n] * lane.size, [n] * lane.size)
        part.copy_(rounded(received.view(lane.size, *part.shape).float().mean(0), part.dtype, self.generator))

    def drop(self) -> None:
        """Forget the full copy; its memory goes back with the slot."""
        if not self.alone:
            self.engine.bind(None, None)
            self._views = self.slot = None

    def settle(self) -> None:
        """Let the current stream wait for the last average, and until no replica reads the stored rows any more."""
        self.axes.scatter.wait(self._averaged)
        if self.source is not None:
            self.source.reclaim()


class TouchedUnit:
    """The rows that this replica stores, always in the engine, which is asked for single rows by all replicas."""

    def __init__(self, unit: Unit, engine: Engine) -> None:
        self.unit, self.engine = unit, engine
        self.weight, self.accumulator = engine.weight, engine.accumulator
