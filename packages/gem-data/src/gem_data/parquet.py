"""Parquet files as a source of packed batches: streamed by row group, sharded, shuffled, resumable, with work done ahead in threads.

An epoch's order: row groups (in the order of their files, or shuffled) are gathered into windows of at least ``window`` rows; a shuffled
epoch also shuffles the rows within each window. Ranks read contiguous shares of that order (`gem_core.sources.order`), so a rank decodes
its own row groups and, at the two ends of its share, one that it shares with a neighbour. Two windows are in memory at a time, whatever the
number of rows.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.batch import Batch
from gem_core.config.features import Dense, Features, Ids
from gem_core.errors import ConfigError, DataError
from gem_core.sources.hashing import GOLDEN, key_of, mix64, mix64_
from gem_core.sources.order import Cursor, Plan, Span
from gem_data import quarantine
from gem_data.arrow import Ints
from gem_data.block import Block
from gem_data.columns import Chunk, locate
from gem_data.decode import Decoder
from gem_data.files import DataFile, Path, Reader, find_files
from gem_data.filters import Filter
from gem_data.prefetch import Ahead

_log = logging.getLogger(__name__)


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


class ParquetSource:
    """Implements `gem_core.sources.contract.Source` over Parquet files; ``len()`` is the number of batches of an epoch.

    :param paths: files, folders, patterns or fsspec URLs; see `files.find_files`.
    :param features: the ``[features]`` table.
    :param shuffle: shuffle each epoch by (seed, epoch).
    :param window: rows shuffled together, at least.
    :param filter: row filter beside ``features.filter``; see `filters`.
    :param prefetch: batches kept ready by background threads; 0: everything happens in the caller's thread.
    :param quarantine: folder for rows that a feature with policy = "quarantine" refuses. Positions count them, so batches that lose rows
        are smaller; ``quarantined`` counts the rows so far.
    :raises DataError: everything that is wrong with the files; ConfigError: with the declaration.
    """

    def __init__(
        self,
        paths: Path | Sequence[Path],
        features: Features,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        window: int = 65_536,
        filter: str | None = None,
        prefetch: int = 4,
        quarantine: str | None = None,
        root: str = ".",
    ) -> None:
        self.features, self.seed, self.shuffle, self.window = features, seed, shuffle, window
        self.quarantine, self.quarantined = quarantine, 0
        self._prefetch = prefetch
        self._decoder = Decoder(features)
        self._check_quarantine()
        self.files = find_files(paths, root)
        for file in {(f.schema, tuple(k for k, _ in f.partition)): f for f in reversed(self.files)}.values():
            self._decoder.check(file)
        self._filters = [Filter(text) for text in (features.filter, filter) if text]
        for file in self.files:
            for name in self._filter_columns:
                locate(file, name)
        self._units = self._count()
        total = sum(unit.rows for unit in self._units)
        if not total:
            raise self._nothing()
        self._cursor = Cursor(total, batch_size, rank, world_size, drop_last)

    @property
    def rows(self) -> int:
        """Samples of an epoch over all ranks."""
        return self._cursor.total

    def __len__(self) -> int:
        return self._cursor.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        epoch, plan, first = self._cursor.begin()
        batches = self._batches(epoch, plan, first)
        ahead = Ahead(lambda: batches, self._prefetch, "gem-data batches") if self._prefetch else None
        try:
            for batch in ahead or batches:
                self._cursor.advance()
                yield batch
            self._cursor.finish()
        finally:
            if ahead is not None:
                ahead.close()
            else:
                batches.close()

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity, **self._cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, now in self._identity.items():
            if state[key] != now:
                raise DataError(
                    f"the stored position belongs to another reading: {key} was {state[key]!r}, now it is {now!r}",
                    fix="resume with the files and options of the stored run, or start a new run",
                )
        self._cursor.load_state_dict(state)

    # --- what an epoch holds ------------------------------------------------------------------------------------------------------

    @property
    def _filter_columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for f in self._filters for name in f.columns))

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What a position means nothing without."""
        digest = hashlib.sha256()
        for unit in self._units:
            digest.update(f"{unit.file.path.rsplit('/', 1)[-1]}:{unit.row_group}:{unit.rows};".encode())
        seed = self.seed if self.shuffle else None
        return {"seed": seed, "window": self.window if self.shuffle else None, "files": len(self.files), "digest": digest.hexdigest()}

    def _count(self) -> list[Unit]:
        """All row groups with rows that pass the filters. Reads the filters' columns, but for row groups that statistics rule out."""
        if not self._filters:
            return [Unit(file, i, rows) for file in self.files for i, rows in enumerate(file.rows) if rows]
        reader, units = Reader(), []
        for file in self.files:
            for i, rows in enumerate(file.rows):
                if not rows:
                    continue
                statistics = reader.statistics(file, i)
                if all(f.may_match(statistics) for f in self._filters):
                    leaves = [leaf for name in self._filter_columns for leaf in locate(file, name).leaves]
                    mask = self._mask(file, reader.row_group(file, i, leaves), rows)
                    kept = pc.sum(mask).as_py() or 0
                    units += [Unit(file, i, kept)] if kept else []
        reader.close()
        return units

    def _mask(self, file: DataFile, table: pa.Table, rows: int) -> pa.Array:
        chunk = Chunk(file, 0, table, rows)
        view = pa.table({name: chunk.scalar(name) for name in self._filter_columns})
        masks = [f.mask(view, file.path) for f in self._filters]
        mask = masks[0]
        for other in masks[1:]:
            mask = pc.and_(mask, other)
        return mask

    def _nothing(self) -> DataError:
        rows = sum(sum(f.rows) for f in self.files)
        where = ", ".join(f.path for f in self.files[:3]) + (", ..." if len(self.files) > 3 else "")
        if not rows:
            return DataError("the files hold no rows", where=where, fix="check the paths and how the files were written")
        texts = " and ".join(repr(f.text) for f in self._filters)
        return DataError(
            f"none of the {rows} rows passes the filter {texts}", where=where, fix="correct the filter (features.filter, or the split's)"
        )

    def _check_quarantine(self) -> None:
        f = self.features
        kinds: list[tuple[str, Dense | Ids]] = [*f.dense.items(), *f.id_features().items()]
        using = [name for name, spec in kinds if spec.policy == "quarantine"]
        using += [
            n for g in f.sequences.values() for n, field in g.fields.items() if field.kind == "float" and field.policy == "quarantine"
        ]
        if using and self.quarantine is None:
            raise ConfigError(
                'policy = "quarantine" needs a folder for the refused rows',
                where=f"features: {', '.join(using)}",
                fix='set [data.parquet] quarantine = "folder"',
            )

    # --- reading ------------------------------------------------------------------------------------------------------------------

    def _windows(self, epoch: int) -> list[Window]:
        units = self._units
        if self.shuffle:
            units = [units[i] for i in _permutation(len(units), mix64(key_of(self.seed) ^ mix64(epoch)))]
        windows: list[Window] = []
        held: list[Unit] = []
        start = at = 0
        for i, unit in enumerate(units):
            held.append(unit)
            at += unit.rows
            if not self.shuffle or at - start >= self.window or i == len(units) - 1:
                windows.append(Window(len(windows), tuple(held), start, at))
                held, start = [], at
        return windows

    def _batches(self, epoch: int, plan: Plan, first: int) -> Generator[Batch, None, None]:
        windows = self._windows(epoch)
        rank = self._cursor.rank
        steps = (plan.read(rank, step) for step in range(first, plan.steps))
        make = self._decoded(_needed(windows, plan.read(rank, first, plan.steps)), epoch)
        ahead = Ahead(lambda: make, 1, "gem-data row groups") if self._prefetch else None
        try:
            yield from self._assembled(iter(ahead) if ahead else make, steps)
        finally:
            if ahead is not None:
                ahead.close()
            else:
                make.close()

    def _decoded(self, windows: list[Window], epoch: int) -> Generator[tuple[Window, Block, Ints | None], None, None]:
        reader = Reader()
        try:
            for window in windows:
                block = Block.join([self._decode(unit, reader) for unit in window.units])
                order = None
                if self.shuffle:
                    order = _permutation(block.size, mix64(mix64(key_of(self.seed) ^ mix64(epoch)) ^ (window.number + 1)))
                yield window, block, order
                del block, order
        finally:
            reader.close()

    def _decode(self, unit: Unit, reader: Reader) -> Block:
        file, group = unit.file, unit.row_group
        table = reader.row_group(file, group, self._decoder.leaves(file, self._filter_columns))
        kept = None
        if self._filters:
            mask = self._mask(file, table, file.rows[group])
            kept = np.flatnonzero(mask.to_numpy(zero_copy_only=False))
            table = table.filter(mask)
        chunk = Chunk(file, group, table, unit.rows, kept)
        block = self._decoder.decode(chunk)
        if chunk.reasons:
            assert self.quarantine is not None  # _check_quarantine
            path = quarantine.write(self.quarantine, chunk, reader)
            self.quarantined += len(chunk.reasons)
            _log.warning("%d rows of %s, row group %d, went to %s", len(chunk.reasons), file.path, group, path)
        return block

    def _assembled(self, decoded: Iterator[tuple[Window, Block, Ints | None]], steps: Iterable[list[Span]]) -> Iterator[Batch]:
        window, block, order = None, None, None
        for spans in steps:
            parts: list[Block] = []
            for start, stop in spans:
                while start < stop:
                    if window is None or start >= window.stop or start < window.start:
                        window = block = order = None
                        window, block, order = next(decoded)
                    end = min(stop, window.stop)
                    assert block is not None
                    low, high = start - window.start, end - window.start
                    parts.append(block.take(slice(low, high) if order is None else order[low:high]))
                    start = end
            yield Block.join(parts).to_batch(self.features) if parts else self._empty()

    def _empty(self) -> Batch:
        file = self.files[0]
        return self._decoder.decode(Chunk(file, 0, file.schema.empty_table(), 0)).to_batch(self.features)


def _needed(windows: list[Window], spans: list[Span]) -> list[Window]:
    """The windows that hold the spans, in order."""
    starts = np.array([w.start for w in windows])
    found: list[Window] = []
    for start, stop in spans:
        first = int(np.searchsorted(starts, start, side="right")) - 1
        last = int(np.searchsorted(starts, stop, side="left"))
        found += [w for w in windows[first:last] if not found or found[-1] is not w]
    return found


def _permutation(n: int, key: int) -> Ints:
    """Seeded permutation, the same on every machine and in every version of NumPy."""
    mixed = mix64_(np.arange(n, dtype=np.uint64) * GOLDEN ^ np.uint64(key))
    return np.argsort(mixed, kind="stable")
