"""One unit of the two-dimensional arrangement: its stored rows, and how replicas exchange them.

`WholeUnit` gathers all rows before they are used and averages them after they were updated. `TouchedUnit` moves the rows that this step
uses, and their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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

    def __init__(self, unit: Unit, engine: Engine, axes: Axes, chunks: int) -> None:
        self.unit, self.engine, self.axes, self.chunks = unit, engine, axes, chunks
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
            self.weight = torch.zeros(unit.rows, unit.dim, dtype=self.dtype, device=device)
            self.accumulator = torch.zeros(unit.rows, device=device)

    @property
    def bytes(self) -> int:
        """Of a full copy with its accumulators, each part aligned to 512 bytes."""
        rows = self.unit.rows * self.axes.replica
        weights = rows * self.unit.dim * self.dtype.itemsize
        return -(-weights // 512) * 512 + rows * 4

    @property
    def full(self) -> bool:
        return self._views is not None

    @torch.no_grad()
    def gather(self, slot: Slot, *, with_state: bool) -> None:
        """Begin to fill ``slot`` with the full copy; the rows may be read after `arrive`."""
        if self.alone or self.full:
            return
        rows = self.unit.rows * self.axes.replica
        weights = rows * self.unit.dim * self.dtype.itemsize
        start = -(-weights // 512) * 512
        self._views = (
            slot.memory[:weights].view(self.dtype).view(rows, self.unit.dim),
            slot.memory[start : start + rows * 4].view(torch.float32),
        )
        self.slot = slot
        lane: Lane = self.axes.gather
        with lane.behind(slot.busy, self._averaged):
            for full, stored in zip(self._views, (self.weight, self.accumulator)):
                if full.dim() == 1 and not with_state:
                    continue
                for out, part in zip(full.chunk(self.chunks), stored.chunk(self.chunks)):
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
            for full, stored in zip(self._views, (self.weight, self.accumulator)):
                for whole, part in zip(full.chunk(self.chunks), stored.chunk(self.chunks)):
                    self._average(lane, whole, part)
            self.slot.busy = self._averaged = lane.mark()
        self.drop()

    def _average(self, lane: Lane, whole: Tensor, part: Tensor) -> None:
        if whole.dtype == torch.float32:
            lane.reduce_mean(part, whole)
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
        """Let the current stream wait for the last average."""
        self.axes.scatter.wait(self._averaged)


class TouchedUnit:
    """The rows that this replica stores, always in the engine, which is asked for single rows by all replicas."""

    def __init__(self, unit: Unit, engine: Engine) -> None:
        self.unit, self.engine = unit, engine
        self.weight, self.accumulator = engine.weight, engine.accumulator
