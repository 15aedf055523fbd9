"""The order of an epoch: row groups, gathered into windows, and the rows within a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_core.sources.hashing import key_of, mix64
from gem_core.sources.order import Span
from gem_core.sources.shuffle import permutation
from gem_data.arrow import Ints
from gem_data.block import flat_index
from gem_data.files import DataFile


@dataclass(frozen=True)
class Unit:
    """One row group with ``rows`` rows that pass the filter."""

    file: DataFile
    row_group: int
    rows: int


@dataclass(frozen=True)
class Window:
    """Units read together, the samples ``start <= i < stop`` of the epoch's order; ``number`` seeds the shuffle of its rows."""

    number: int
    units: tuple[Unit, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Epochs:
    """Orders of all epochs. ``window``: rows shuffled together, at least; None: no shuffle, every row group is a window."""

    units: tuple[Unit, ...]
    seed: int
    window: int | None

    def windows(self, epoch: int) -> list[Window]:
        units: Sequence[Unit] = self.units
        if self.window is not None:
            units = [units[i] for i in permutation(len(units), self._key(epoch, 0))]
        windows: list[Window] = []
        held: list[Unit] = []
        start = at = 0
        for i, unit in enumerate(units):
            held.append(unit)
            at += unit.rows
            if self.window is None or at - start >= self.window or i == len(units) - 1:
                windows.append(Window(len(windows), tuple(held), start, at))
                held, start = [], at
        return windows

    def order(self, epoch: int, window: Window, requests: NDArray[Any] | None = None) -> Ints | None:
        """Rows of the window's units, one after another, in the order of the epoch; None: as they are.

        ``requests [rows]``: neighbouring rows of one value stay neighbours, in their order.
        """
        if self.window is None:
            return None
        rows, key = window.stop - window.start, self._key(epoch, window.number + 1)
        if requests is None or not rows:
            return permutation(rows, key)
        starts = np.flatnonzero(np.concatenate([[True], requests[1:] != requests[:-1]]))
        return flat_index(np.append(starts, rows), permutation(starts.size, key))[1]

    def _key(self, epoch: int, number: int) -> int:
        return mix64(mix64(key_of(self.seed) ^ mix64(epoch)) ^ number)


def holding(windows: Sequence[Window], spans: Sequence[Span]) -> list[Window]:
    """The windows that hold ``spans``, in order."""
    starts = np.array([w.start for w in windows])
    found: list[Window] = []
    for start, stop in spans:
        first = int(np.searchsorted(starts, start, side="right")) - 1
        last = int(np.searchsorted(starts, stop, side="left"))
        found += [w for w in windows[first:last] if not found or found[-1] is not w]
    return found
