"""Packed rows on the host, between a decoded row group and a Batch: take, join, convert."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config.features import Features
from gem_core.jagged import Jagged

Array = NDArray[Any]
Ints = NDArray[np.int64]
TIMES = "\0time"
"""Key of the event times in a group's bag: no field can have this name."""
Rows = slice | Ints
"""Which rows: a slice of step 1, or row numbers in any order."""


def flat_index(offsets: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """(offsets of the taken rows ``[k+1]``, positions of their values)."""
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    taken = np.zeros(rows.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=taken[1:])
    index = np.repeat(starts - taken[:-1], lengths)
    index += np.arange(taken[-1])
    return taken, index


_RUN = 32
"""Values copied at once where rows are long."""


@dataclass(frozen=True)
class Runs:
    """How to copy rows of values: runs of ``_RUN`` values from ``source`` to ``target`` positions, the last run of a row overlapping the
    one before it, and the values of short rows one by one. Half the time of a plain gather at 200 values a row."""

    source: Ints
    target: Ints
    short_source: Ints
    short_target: Ints
    n: int

    @staticmethod
    def of(offsets: Ints, rows: Ints, taken: Ints) -> Runs:
        lengths = np.diff(taken)
        starts, targets = offsets[rows], taken[:-1]
        long = lengths >= _RUN
        counts = -(-lengths[long] // _RUN)
        step = np.minimum(_within(counts) * _RUN, np.repeat(lengths[long] - _RUN, counts))
        short = lengths[~long]
        inside = _within(short)
        return Runs(
            np.repeat(starts[long], counts) + step,
            np.repeat(targets[long], counts) + step,
            np.repeat(starts[~long], short) + inside,
            np.repeat(targets[~long], short) + inside,
            int(taken[-1]),
        )

    def copy(self, values: Array, out: Array) -> None:
        """Fill ``out [n]`` from ``values [N]``, both contiguous."""
        if self.source.size:
            whole, size = np.dtype(f"V{_RUN * values.itemsize}"), values.itemsize
            target = np.ndarray((out.size - _RUN + 1,), whole, out, strides=(size,))
            target[self.target] = np.ndarray((values.size - _RUN + 1,), whole, values, strides=(size,))[self.source]
        out[self.short_target] = values[self.short_source]


def _within(counts: Ints) -> Ints:
    """0 .. c-1 for each count, one after another."""
    ends = np.cumsum(counts)
    index = np.arange(ends[-1] if ends.size else 0)
    index -= np.repeat(ends - counts, counts)
    return index


@dataclass(frozen=True)
class Bag:
    """Values that share ``offsets [n+1]``: each ``[N, ...]``, or again a Bag over the N values."""

    offsets: Ints
    values: dict[str, Array | Bag]

    def array(self, key: str) -> Array:
        """Values that are no Bag."""
        found = self.values[key]
        assert isinstance(found, np.ndarray)
        return found

    def take(self, rows: Rows) -> Bag:
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.offsets.size - 1)
            a, b = self.offsets[start], self.offsets[stop]
            return Bag(self.offsets[start : stop + 1] - a, _take_all(self.values, slice(a, b), int(b - a)))
        taken = np.zeros(rows.size + 1, dtype=np.int64)
        np.cumsum(self.offsets[rows + 1] - self.offsets[rows], out=taken[1:])
        n = int(taken[-1])
        if n >= 2 * _RUN * rows.size and all(isinstance(v, np.ndarray) and v.ndim == 1 for v in self.values.values()):
            return Bag(taken, _take_all(self.values, Runs.of(self.offsets, rows, taken), n))
        return Bag(taken, _take_all(self.values, flat_index(self.offsets, rows)[1], n))

    @staticmethod
    def join(bags: Sequence[Bag]) -> Bag:
        ends = np.cumsum([b.offsets[-1] for b in bags])
        offsets = [bags[0].offsets, *(b.offsets[1:] + end for b, end in zip(bags[1:], ends))]
        joined: dict[str, Array | Bag] = {}
        for key, first in bags[0].values.items():
            parts: Any = [b.values[key] for b in bags]
            joined[key] = Bag.join(parts) if isinstance(first, Bag) else np.concatenate(parts)
        return Bag(np.concatenate(offsets), joined)


@dataclass(frozen=True)
class Block:
    """``size`` rows: ``fixed`` arrays ``[n, ...]`` and ``bags``, by keys such as "dense", "labels", "sparse.NAME", "sequences.GROUP".

    ``good [n]`` is False for rows that were quarantined, None if all are good.
    """

    size: int
    fixed: dict[str, Array] = field(default_factory=dict)
    bags: dict[str, Bag] = field(default_factory=dict)
    good: NDArray[np.bool_] | None = None

    def take(self, rows: Rows, *, drop: bool = True) -> Block:
        """A copy of these rows; quarantined ones are left out, or with ``drop = False`` stay marked."""
        good = None
        if self.good is not None and drop:
            rows = np.arange(self.size)[rows] if isinstance(rows, slice) else rows
            rows = rows[self.good[rows]]
        elif self.good is not None:
            good = self.good[rows]
        size = len(range(*rows.indices(self.size))) if isinstance(rows, slice) else rows.size
        return Block(size, {k: _rows(v, rows) for k, v in self.fixed.items()}, {k: b.take(rows) for k, b in self.bags.items()}, good)

    @property
    def events(self) -> Ints:
        """Events of each row ``[n]`` over all histories."""
        lengths = [np.diff(bag.offsets) for key, bag in self.bags.items() if key.startswith("sequences.")]
        return np.sum(lengths, axis=0) if lengths else np.zeros(self.size, dtype=np.int64)

    @staticmethod
    def join(blocks: Sequence[Block]) -> Block:
        """The rows of all blocks, one after another."""
        if len(blocks) == 1:
            return blocks[0]
        first = blocks[0]
        good = None
        if any(b.good is not None for b in blocks):
            good = np.concatenate([np.ones(b.size, dtype=bool) if b.good is None else b.good for b in blocks])
        return Block(
            sum(b.size for b in blocks),
            {k: np.concatenate([b.fixed[k] for b in blocks]) for k in first.fixed},
            {k: Bag.join([b.bags[k] for b in blocks]) for k in first.bags},
            good,
        )

    def to_batch(self, features: Features) -> Batch:
        """The rows as a Batch of the declared features. Shares memory with the block."""
        fixed = {k: torch.from_numpy(v) for k, v in self.fixed.items() if v.dtype != object}
        ids = self.fixed.get("sample_ids")
        return Batch(
            size=self.size,
            dense=fixed.get("dense"),
            dense_names=tuple(features.dense),
            vectors={name: fixed[f"vectors.{name}"] for name in features.vectors},
            sparse=self._sparse(features) if features.sparse else None,
            sequences={name: self._sequence(name, features) for name in features.sequences},
            labels=fixed.get("labels"),
            label_names=tuple(features.labels),
            label_mask=fixed.get("label_mask"),
            weights=fixed.get("weights"),
            timestamps=fixed.get("timestamps"),
            columns={name: fixed[f"columns.{name}"] for name in features.columns},
            sample_ids=ids.tolist() if ids is not None and ids.dtype == object else fixed.get("sample_ids"),
        )

    def _sparse(self, features: Features) -> SparseGroup:
        bags = [self.bags.get(f"sparse.{name}") for name in features.sparse]
        values = [self.fixed[f"sparse.{name}"] if bag is None else bag.array("ids") for name, bag in zip(features.sparse, bags)]
        lengths = np.ones((len(bags), self.size), dtype=np.int64)
        for row, bag in zip(lengths, bags):
            if bag is not None:
                np.subtract(bag.offsets[1:], bag.offsets[:-1], out=row)
        weights = None
        if any(spec.weights is not None for spec in features.sparse.values()):
            parts: list[Array] = []
            for (name, spec), bag, ids in zip(features.sparse.items(), bags, values):
                if spec.weights is None:
                    parts.append(np.ones(len(ids), dtype=np.float32))
                else:
                    parts.append(self.fixed[f"sparse.{name}.weights"] if bag is None else bag.array("weights"))
            weights = torch.from_numpy(np.concatenate(parts))
        ends = itertools.accumulate((len(v) for v in values), initial=0)
        return SparseGroup(
            tuple(features.sparse),
            torch.from_numpy(np.concatenate(values)),
            torch.from_numpy(lengths.reshape(-1)),
            weights,
            tuple(ends),
        )

    def _sequence(self, name: str, features: Features) -> SequenceGroup:
        bag, spec = self.bags[f"sequences.{name}"], features.sequences[name]
        values = {k: _tensor(v) for k, v in bag.values.items() if k in spec.fields}
        times = None if spec.timestamps is None else torch.from_numpy(bag.array(TIMES))
        return SequenceGroup(torch.from_numpy(bag.offsets), values, times, spec.max_length)


def _take_all(values: dict[str, Array | Bag], rows: Rows | Runs, n: int) -> dict[str, Array | Bag]:
    """``n`` rows of everything. The arrays share one buffer: a few large pages cost far less than many small ones."""
    places, end = {}, 0
    for key, array in values.items():
        if not isinstance(array, Bag):
            places[key] = end, end + n * array.itemsize * math.prod(array.shape[1:])
            end = -(-places[key][1] // 64) * 64
    buffer = np.empty(end, dtype=np.uint8)
    found: dict[str, Array | Bag] = {}
    for key, v in values.items():
        if isinstance(v, Bag):
            assert not isinstance(rows, Runs)  # Bag.take
            found[key] = v.take(rows)
            continue
        start, stop = places[key]
        out: Array = buffer[start:stop].view(v.dtype).reshape(n, *v.shape[1:])
        found[key] = out
        if isinstance(rows, Runs):
            rows.copy(v, out)
        elif isinstance(rows, slice):
            out[:] = v[rows]
        else:
            # Positions come from offsets and are in range; "raise" would go through a second buffer.
            v.take(rows, axis=0, out=out, mode="clip")
    return found


def _rows(values: Array, rows: Rows) -> Array:
    return values[rows].copy() if isinstance(rows, slice) else values.take(rows, axis=0)


def _tensor(value: Array | Bag) -> Any:
    if isinstance(value, Bag):
        return Jagged(torch.from_numpy(value.array("ids")), torch.from_numpy(value.offsets))
    return torch.from_numpy(value)
