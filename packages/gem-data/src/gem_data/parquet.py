"""Parquet files as a source of packed batches: streamed by row group, sharded, shuffled, resumable, with work done ahead in threads.

An epoch's order: row groups (in the order of their files, or shuffled) are gathered into windows of at least ``window`` rows; a shuffled
epoch also shuffles the rows within each window. Ranks read contiguous shares of that order (`gem_core.sources.order`), so a rank decodes
its own row groups and, at the two ends of its share, one that it shares with a neighbour. Less than two windows are in memory at a time,
whatever the number of rows (`gem_data.stream`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from gem_core.batch import Batch
from gem_core.config.features import Dense, Features, Ids
from gem_core.errors import ConfigError, DataError
from gem_core.sources.order import Cursor, Plan, Span
from gem_data.arrow import Ints
from gem_data.balance import Balanced, Batching, Fixed, Global, GlobalPlan, TokenPlan, Tokens
from gem_data.columns import Chunk, carried_columns, check_alike, locate
from gem_data.files import Path, Reader, find_files
from gem_data.rows import RowReader
from gem_data.stream import Course, Stream, sizes
from gem_data.units import Epochs, Unit, holding


class ParquetSource(IterableDataset[Batch]):
    """Implements `gem_core.sources.contract.Source` over Parquet files; ``len()`` is the number of batches of an epoch.

    It can also be the ``dataset`` of a torch ``DataLoader`` or a torchdata ``StatefulDataLoader`` with ``batch_size=None``: each worker of
    the loader then reads its own part.

    :param paths: files, folders, patterns or fsspec URLs; see `files.find_files`.
    :param features: the ``[features]`` table.
    :param shuffle: shuffle each epoch by (seed, epoch).
    :param window: rows shuffled together, at least.
    :param filter: row filter beside ``features.filter``; see `filters`.
    :param prefetch: batches kept ready by background threads; 0: everything happens in the caller's thread.
    :param workers: processes that decode; 0: none. Order, batches and positions do not depend on it.
    :param batching: how samples are cut into batches; see `balance`.
    :param quarantine: folder for rows that a feature with policy = "quarantine" refuses. Positions count them, so batches that lose rows
        are smaller; ``quarantined`` counts the rows so far.
    :param section: of the configuration; errors name it.
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
        prefetch: int = 2,
        workers: int = 0,
        quarantine: str | None = None,
        batching: Batching = Fixed(),  # noqa: B008 (frozen)
        root: str = ".",
        section: str = "data.parquet",
    ) -> None:
        self.features, self.seed, self.batching, self._section = features, seed, batching, section
        most = max(16, 4 * (os.cpu_count() or 1))
        if workers > most:  # each holds an interpreter and a window: hundreds take a machine down
            raise ConfigError(
                f"{workers} processes that decode are too many for {os.cpu_count()} cores",
                where=f"{section}.workers",
                fix=f"set at most {most}",
            )
        self._prefetch, self._workers = prefetch, workers
        self._rows = RowReader(features, [text for text in (features.filter, filter) if text], quarantine)
        self._check_quarantine()
        self.files = find_files(paths, root, section)
        # Before pyarrow 22 a schema with metadata, as pandas writes it, cannot be hashed.
        alike = {(f.schema.remove_metadata(), tuple(k for k, _ in f.partition)): f for f in reversed(self.files)}
        for file in alike.values():
            self._rows.decoder.check(file)
        check_alike(list(alike.values()), self._rows.decoder.columns, carried_columns(features))
        for file in self.files:
            for name in self._rows.filter_columns:
                locate(file, name)
        self._epochs = Epochs(tuple(self._count()), seed, window if shuffle else None)
        total = sum(unit.rows for unit in self._epochs.units)
        if not total:
            raise self._nothing()
        self.following: int | None = 0
        """Iterations that will come after the one that begins next; see `gem_core.sources.contract.Source`."""
        self._stream: Stream | None = None
        self._is_part = False
        self._known_events: dict[tuple[str, int], NDArray[np.int32]] = {}
        self._check_batching(batch_size)
        self._cursor = Cursor(total, batch_size, rank, world_size, drop_last)
        if batching.steps > 1:
            self._cursor.group, self._cursor.arranged = batching.steps, self._arranged
        if isinstance(batching, Tokens | Global):
            self._cursor.make_plan = self._costed_plan

    @property
    def rows(self) -> int:
        """Samples of an epoch over all ranks."""
        return self._cursor.total

    @property
    def hashed(self) -> dict[str, list[str]]:
        """What the columns of hashed ids hold; see `gem_core.sources.contract.Source`."""
        return self._rows.decoder.hashed

    @property
    def lists(self) -> dict[str, bool]:
        """Which columns of ids hold lists; see `gem_core.sources.contract.Source`."""
        return self._rows.decoder.lists

    @property
    def units(self) -> tuple[Unit, ...]:
        """All row groups with rows that pass the filters, in the order of the files."""
        return self._epochs.units

    @property
    def quarantined(self) -> int:
        """Rows that went to the quarantine so far."""
        return self._rows.refused

    def chunk(self, unit: Unit, reader: Reader) -> Chunk:
        """The undecoded rows of a unit, with all columns that the features read."""
        return self._rows.chunk(unit, reader)

    def __len__(self) -> int:
        return self._cursor.steps_per_epoch

    @property
    def left(self) -> int:
        """Batches that the next iteration gives."""
        return self._cursor.left

    def __iter__(self) -> Iterator[Batch]:
        self._as_loader_worker()
        stream, self._stream = self._stream, None
        first = 0
        try:
            # The stream that read ahead in the last iteration, if there is one and it has more.
            begun = None if stream is None else next(stream, None)
            if begun is not None:
                plan = begun[0]
                self._cursor.begin(plan)
            else:
                if stream is not None:
                    stream.close()
                epoch, plan, first = self._cursor.begin()
                stream = self._start(epoch, plan, first)
            for _ in range(first, plan.steps):
                assert stream is not None
                _, batch = next(stream) if begun is None else begun
                begun = None
                self._cursor.advance()
                yield batch
                del batch
            self._cursor.finish()
            if self.following != 0:
                stream, self._stream = None, stream
        finally:
            if stream is not None:
                stream.close()

    def close(self) -> None:
        """End what reads ahead into the next iteration; it begins anew then."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity, **self._cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, now in self._identity.items():
            if state[key] != now:
                raise DataError(
                    f"the stored position belongs to another reading: {key} was {state[key]!r}, now it is {now!r}",
                    fix="resume with the files and options of the stored run, or start a new run",
                )
        self.close()
        self._as_loader_worker()
        self._cursor.load_state_dict(state)

    def _start(self, epoch: int, plan: Plan, first: int) -> Stream:
        last = None if self.following is None else epoch + self.following
        how: Any = {"prefetch": self._prefetch, "workers": self._workers}
        return Stream(self._rows, self._epochs, self.batching, self._courses(epoch, plan, first, last), **how)

    def _courses(self, epoch: int, plan: Plan, first: int, last: int | None) -> Iterator[Course]:
        """This epoch and those that follow it, up to ``last``."""
        rank, together = self._cursor.rank, self.batching.steps
        while plan.steps > first:
            yield Course(epoch, plan, rank, first, together)
            epoch, first = epoch + 1, 0
            if last is not None and epoch > last:
                return
            plan = self._cursor.whole(epoch)

    def _as_loader_worker(self) -> None:
        """In a worker of a torch DataLoader: take this worker's part of the rank's part."""
        info, cursor = get_worker_info(), self._cursor
        if info is not None and not self._is_part:
            self._is_part = True
            cursor.rank, cursor.world = cursor.rank * info.num_workers + info.id, cursor.world * info.num_workers

    # --- what an epoch holds ------------------------------------------------------------------------------------------------------

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What a position means nothing without."""
        digest = hashlib.sha256()
        for unit in self._epochs.units:
            digest.update(f"{unit.file.path.rsplit('/', 1)[-1]}:{unit.row_group}:{unit.rows};".encode())
        shuffled = self._epochs.window is not None
        return {
            "seed": self.seed if shuffled else None,
            "window": self._epochs.window,
            "batching": self.batching.model_dump(mode="json"),
            "files": len(self.files),
            "digest": digest.hexdigest(),
        }

    def _count(self) -> list[Unit]:
        """All row groups with rows that pass the filters: reads the filters' columns once; what has no match is not read again.

        Statistics in the footer are not asked: pyarrow ends the process over those of a damaged column chunk.
        """
        rows_of = self._rows
        if not rows_of.filters:
            return [Unit(file, i, rows) for file in self.files for i, rows in enumerate(file.rows) if rows]
        reader, units = Reader(), []
        for file in self.files:
            leaves = [leaf for name in rows_of.filter_columns for leaf in locate(file, name).leaves]
            for i, rows in enumerate(file.rows):
                if rows:
                    kept = pc.sum(rows_of.mask(file, reader.row_group(file, i, leaves), rows)).as_py() or 0
                    units += [Unit(file, i, kept)] if kept else []
        reader.close()
        return units

    def _nothing(self) -> DataError:
        rows = sum(sum(f.rows) for f in self.files)
        where = ", ".join(f.path for f in self.files[:3]) + (", ..." if len(self.files) > 3 else "")
        if not rows:
            return DataError("the files hold no rows", where=where, fix="check the paths and how the files were written")
        texts = " and ".join(repr(f.text) for f in self._rows.filters)
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
        if using and self._rows.quarantine is None:
            raise ConfigError(
                'policy = "quarantine" needs a folder for the refused rows',
                where=f"features: {', '.join(using)}",
                fix=f'set [{self._section}] quarantine = "folder"',
            )

    def _check_batching(self, batch_size: int) -> None:
        if self.features.request is not None and not isinstance(self.batching, Fixed):
            raise ConfigError(
                f"batching by length ({self.batching.kind}) would part the samples of a request",
                where=f"[{self._section}.batching]",
                fix='set kind = "fixed", or leave features.request out',
            )
        if not isinstance(self.batching, Fixed) and not self.features.sequences:
            raise ConfigError(
                f"batching by length ({self.batching.kind}) needs a history", where=f"[{self._section}.batching]", fix='set kind = "fixed"'
            )
        if isinstance(self.batching, Balanced) and batch_size % self.batching.base:
            raise ConfigError(
                f"batch_size {batch_size} is no multiple of the base batches' {self.batching.base} samples",
                where=f"[{self._section}.batching]",
                fix="change batch_size or base",
            )

    # --- lengths without the rest -----------------------------------------------------------------------------------------------------

    def _arranged(self, epoch: int, plan: Plan, rank: int, first: int, stop: int) -> Ints:
        """`gem_core.sources.order.Arranged`: what ``rank`` was given in these steps, known from the lengths of its rows."""
        spans = plan.read(rank, first, stop)
        positions = np.concatenate([np.arange(a, b) for a, b in spans]) if spans else np.zeros(0, dtype=np.int64)
        return positions[self.batching.arrange(self._events(epoch, spans), sizes(plan, rank, first, stop))]

    def _costed_plan(self, epoch: int, spans: tuple[Span, ...], world: int, batch_size: int, drop_last: bool) -> Plan:
        assert isinstance(self.batching, Tokens | Global)
        events, cost = self._events(epoch, spans), self.batching.cost
        if isinstance(self.batching, Global):
            return GlobalPlan(spans, world, batch_size, drop_last, cost.of(events))
        return TokenPlan(spans, world, batch_size, drop_last, cost.of(np.maximum(events, 1)), self.batching)

    def _events(self, epoch: int, spans: Sequence[Span]) -> Ints:
        """Events of the samples of ``spans``, in their order."""
        found = []
        windows = iter(holding(self._epochs.windows(epoch), spans))
        window, events = None, np.zeros(0, dtype=np.int64)
        for start, stop in spans:
            while start < stop:
                if window is None or start >= window.stop:
                    window = next(windows)
                    events = np.concatenate([self._unit_events(unit) for unit in window.units])
                    order = self._epochs.order(epoch, window)
                    events = events if order is None else events[order]
                    continue
                end = min(stop, window.stop)
                found.append(events[start - window.start : end - window.start])
                start = end
        return np.concatenate(found).astype(np.int64) if found else events

    def _unit_events(self, unit: Unit) -> NDArray[np.int32]:
        key = unit.file.path, unit.row_group
        if key not in self._known_events:
            with closing(Reader()) as reader:
                chunk = self._rows.chunk(unit, reader, self._rows.decoder.length_columns)
            self._known_events[key] = self._rows.decoder.events(chunk).astype(np.int32)
        return self._known_events[key]
