"""Packed rows on the host, between a decoded row group and a Batch: take, join, convert."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config.features import Features
from gem_core.errors import DataError
from gem_core.jagged import Jagged
from gem_core.requests import by_request
from gem_core.sources.hashing import GOLDEN, mix64_

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


@dataclass(frozen=True)
class Bag:
    """Values that share ``offsets [n+1]``: each ``[N, ...]``, or again a Bag over the N values."""

    offsets: Ints
    values: dict[str, Values]

    def array(self, key: str) -> Array:
        """Values that are no Bag."""
        found = self.values[key]
        assert isinstance(found, np.ndarray)
        return found

    def take(self, rows: Rows) -> Bag:
        return self.split([rows])[0]

    def split(self, parts: Sequence[Rows], *, consume: bool = False) -> list[Bag]:
        """The rows of each part, copied unless they are a slice; ``consume``: arrays are let go as they are cut, the bag is spent."""
        offsets, picks = zip(*(self._picked(rows) for rows in parts))
        nested = any(isinstance(v, Bag) for v in self.values.values())
        inner = [_values_of(self.offsets, rows) for rows in parts] if nested else []
        at: dict[int, pa.Buffer] = {}

        found: list[dict[str, Values]] = [{} for _ in parts]
        for key in list(self.values):
            values = self.values.pop(key) if consume else self.values[key]
            if isinstance(values, list):
                values = _joined(values)
            if isinstance(values, Bag):
                copies: Sequence[Array | Bag] = values.split(inner, consume=consume)
            else:
                copies = [_copied(values, self.offsets, pick, int(o[-1]), at) for pick, o in zip(picks, offsets)]
            del values
            for bag, copy in zip(found, copies):
                bag[key] = copy
        return [Bag(o, bag) for o, bag in zip(offsets, found)]

    def _picked(self, rows: Rows) -> tuple[Ints, slice | pa.Array]:
        """(offsets of the rows, what to copy: a slice of the values, or row numbers)."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.offsets.size - 1)
            a, b = self.offsets[start], self.offsets[stop]
            return self.offsets[start : stop + 1] - a, slice(a, b)
        taken = np.zeros(rows.size + 1, dtype=np.int64)
        np.cumsum(self.offsets[rows + 1] - self.offsets[rows], out=taken[1:])
        return taken, pa.array(rows)

    @staticmethod
    def join(bags: Sequence[Bag], *, consume: bool = False) -> Bag:
        """The rows of all bags; ``consume``: values stay apart until they are split, the bags are spent."""
        ends = np.cumsum([b.offsets[-1] for b in bags])
        offsets = [bags[0].offsets, *(b.offsets[1:] + end for b, end in zip(bags[1:], ends))]
        joined: dict[str, Values] = {}
        for key, first in list(bags[0].values.items()):
            parts: Any = [b.values.pop(key) if consume else b.values[key] for b in bags]
            joined[key] = Bag.join(parts, consume=consume) if isinstance(first, Bag) else parts if consume else np.concatenate(parts)
        return Bag(np.concatenate(offsets), joined)


Values = Array | Bag | list[Array]
"""What a key of a `Bag` holds; a list: arrays that `Bag.split` puts together when their turn comes."""


@dataclass(frozen=True)
class Block:
    """``size`` rows: ``fixed`` arrays ``[n, ...]`` and ``bags``, by keys such as "dense", "labels", "sparse.NAME", "sequences.GROUP".

    ``good [n]`` is False for rows that were quarantined, None if all are good.
    """

    size: int
    fixed: dict[str, Array] = field(default_factory=dict)
    bags: dict[str, Bag] = field(default_factory=dict)
    good: NDArray[np.bool_] | None = None

    def take(self, rows: Rows) -> Block:
        """These rows; quarantined ones are left out."""
        return self.split([rows])[0]

    def split(self, parts: Sequence[Rows], *, drop: bool = True, consume: bool = False) -> list[Block]:
        """`take` for several sets of rows; with ``drop`` False quarantined ones stay marked. ``consume`` as for `Bag.split`."""
        good: list[NDArray[np.bool_] | None] = [None] * len(parts)
        if self.good is not None and drop:
            numbers = [np.arange(self.size)[rows] if isinstance(rows, slice) else rows for rows in parts]
            parts = [rows[self.good[rows]] for rows in numbers]
        elif self.good is not None:
            good = [self.good[rows] for rows in parts]
        sizes = [len(range(*rows.indices(self.size))) if isinstance(rows, slice) else rows.size for rows in parts]
        blocks = [Block(size, good=mask) for size, mask in zip(sizes, good)]
        for key in list(self.bags):
            bag = self.bags.pop(key) if consume else self.bags[key]
            for block, copy in zip(blocks, bag.split(parts, consume=consume)):
                block.bags[key] = copy
            del bag
        for key, values in self.fixed.items():
            for block, rows in zip(blocks, parts):
                block.fixed[key] = _rows(values, rows)
        return blocks

    @property
    def events(self) -> Ints:
        """Events of each row ``[n]`` over all histories."""
        lengths = [np.diff(bag.offsets) for key, bag in self.bags.items() if key.startswith("sequences.")]
        return np.sum(lengths, axis=0) if lengths else np.zeros(self.size, dtype=np.int64)

    @staticmethod
    def deal(blocks: Sequence[Block], parts: Sequence[Rows], *, drop: bool) -> list[Block]:
        """`split` of the rows of all blocks, one after another; beside what comes out, one column is held. The blocks are spent."""
        return Block.join(blocks, consume=True).split(parts, drop=drop, consume=True)

    @staticmethod
    def join(blocks: Sequence[Block], *, consume: bool = False) -> Block:
        """The rows of all blocks, one after another; ``consume`` as for `Bag.join`."""
        if len(blocks) == 1:
            return blocks[0]
        first = blocks[0]
        good = None
        if any(b.good is not None for b in blocks):
            good = np.concatenate([np.ones(b.size, dtype=bool) if b.good is None else b.good for b in blocks])
        return Block(
            sum(b.size for b in blocks),
            {k: np.concatenate([b.fixed[k] for b in blocks]) for k in first.fixed},
            {k: Bag.join([b.bags[k] for b in blocks], consume=consume) for k in first.bags},
            good,
        )

    def to_batch(self, features: Features) -> Batch:
        """The rows as a Batch of the declared features. Shares memory with the block."""
        fixed = {k: torch.from_numpy(v) for k, v in self.fixed.items() if v.dtype != object and k != "request"}
        ids = self.fixed.get("sample_ids")
        batch = Batch(
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
        return batch if features.request is None else self._by_request(batch, features)

    def _by_request(self, batch: Batch, features: Features) -> Batch:
        _, first, index = np.unique(self.fixed["request"], return_index=True, return_inverse=True)
        # Requests in the order of their first samples, not in that of their hashes.
        turn = np.argsort(first, kind="stable")
        first, index = first[turn], np.argsort(turn, kind="stable")[index.reshape(-1)]
        for name, group in batch.sequences.items():
            lengths, offsets = group.lengths.numpy(), group.offsets.numpy()
            factors = _by_place(offsets)  # once for all columns of the events
            told = {"": lengths} | {k: _digests(v, offsets, factors) for k, v in self.bags[f"sequences.{name}"].values.items()}
            for key, numbers in told.items():
                wrong = np.flatnonzero(numbers != numbers[first][index])
                if wrong.size:
                    a, b = int(first[index[wrong[0]]]), int(wrong[0])
                    ids = batch.sample_ids
                    named = f"samples {ids[a]} and {ids[b]}" if ids is not None else f"samples {a} and {b} of a batch"
                    how = "other events" if key else f"histories of {int(lengths[a])} and {int(lengths[b])} events"
                    raise DataError(
                        f"{named} have one request and {how}",
                        where=f"column {features.request!r}, features.sequences.{name}",
                        fix="rows of one request must repeat its history; or leave features.request out",
                    )
        return by_request(batch, torch.from_numpy(index), torch.from_numpy(first))

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


def _joined(pieces: list[Array]) -> Array:
    """The pieces one after another, in memory that Arrow's allocator keeps for the next column; each goes when it is copied."""
    kind, shape = np.result_type(*pieces), pieces[0].shape[1:]
    n = sum(len(piece) for piece in pieces)
    size = n * math.prod(shape) * kind.itemsize
    if kind.hasobject or not size:
        return np.concatenate(pieces)
    whole = np.frombuffer(pa.allocate_buffer(size), dtype=kind).reshape(n, *shape)
    pieces.reverse()
    at = 0
    while pieces:
        piece = pieces.pop()
        whole[at : at + len(piece)] = piece
        at += len(piece)
    return whole


def _digests(values: Values, offsets: Ints, factors: Ints) -> Ints:
    """``[n]``: a number of each row's values in their order; equal ones of other values or another order would be chance. ``factors``:
    `_by_place` of the offsets."""
    if isinstance(values, Bag):
        inside = _digests(values.array("ids"), values.offsets, _by_place(values.offsets))
        values = inside + np.diff(values.offsets) * GOLDEN.view(np.int64)  # ids 0 add nothing inside
    assert isinstance(values, np.ndarray)
    bits = np.ascontiguousarray(values).view(f"i{values.itemsize}").astype(np.int64, copy=False)
    if bits.ndim > 1:
        bits = bits @ _factors(bits.shape[1])
    running: Ints = np.zeros(factors.size + 1, dtype=np.int64)
    np.cumsum(bits[offsets[0] : offsets[-1]] * factors, out=running[1:])
    found: Ints = running[offsets[1:] - offsets[0]] - running[offsets[:-1] - offsets[0]]
    return found


def _by_place(offsets: Ints) -> Ints:
    """The factor of each value by its place in its row."""
    lengths = np.diff(offsets)
    places = np.arange(offsets[0], offsets[-1]) - np.repeat(offsets[:-1], lengths)
    found: Ints = _factors(int(lengths.max(initial=0)))[places]
    return found


def _factors(n: int) -> Ints:
    """Random odd numbers ``[n]`` of 64 bits: sums with them, modulo 2^64, tell sequences of integers apart."""
    factors: Ints = mix64_(np.arange(1, n + 1, dtype=np.uint64) * GOLDEN).view(np.int64)
    return factors | 1


def _values_of(offsets: Ints, rows: Rows) -> Rows:
    """Which values the rows hold."""
    if isinstance(rows, slice):
        start, stop, _ = rows.indices(offsets.size - 1)
        return slice(int(offsets[start]), int(offsets[stop]))
    return flat_index(offsets, rows)[1]


def _copied(values: Array, offsets: Ints, pick: slice | pa.Array, n: int, at: dict[int, pa.Buffer]) -> Array:
    """``n`` values: those of a slice as they are, or copies of those of the picked rows, a row at once (to Arrow, it is a byte string).

    ``at``: offsets in bytes by the width of a value, made once for all parts. Arrow's allocator keeps large buffers, so that their pages
    are not given to the process again for every batch.
    """
    width = values.itemsize * math.prod(values.shape[1:])
    if not n * width:
        return np.empty((n, *values.shape[1:]), dtype=values.dtype)
    if isinstance(pick, slice):
        return _writable(values[pick])
    if width not in at:
        at[width] = pa.py_buffer(offsets * width)
    strings = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), offsets.size - 1, [None, at[width], pa.py_buffer(np.ascontiguousarray(values))]
    )
    data = pc.take(strings, pick, boundscheck=False).buffers()[2]
    return np.frombuffer(data, dtype=values.dtype, count=n * width // values.itemsize).reshape(n, *values.shape[1:])


class _Memory:
    """Memory of Arrow's that NumPy may write to: batches are their consumer's, and the row group is read no more."""

    def __init__(self, values: Array) -> None:
        self._owner = values
        self.__array_interface__ = {**values.__array_interface__, "data": (values.__array_interface__["data"][0], False)}


def _writable(values: Array) -> Array:
    return values if values.flags.writeable else np.asarray(_Memory(values))


def _rows(values: Array, rows: Rows) -> Array:
    return values[rows].copy() if isinstance(rows, slice) else values.take(rows, axis=0)


def _tensor(value: Values) -> Any:
    if isinstance(value, Bag):
        return Jagged(torch.from_numpy(value.array("ids")), torch.from_numpy(value.offsets))
    return torch.from_numpy(value)
