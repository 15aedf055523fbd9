"""Batches of one epoch after another, made ahead in threads: what `parquet.ParquetSource` hands out.

One thread decodes row groups and cuts each window into the parts of all steps, another one makes batches of the parts. Neither stops where
an epoch ends: while the last batches of an epoch are used, the next one's first row groups are decoded. `Room` bounds what is held: decoded
rows that no batch has taken yet are at most 1.25 times those of the largest window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa

from gem_core.batch import Batch
from gem_core.sources.order import Plan, Span
from gem_data.balance import Batching
from gem_data.block import Block, Rows
from gem_data.columns import Chunk
from gem_data.files import Reader
from gem_data.prefetch import Ahead, Room
from gem_data.rows import RowReader
from gem_data.units import Epochs, Window, holding
from gem_data.workers import Workers

_RELEASE_EVERY = 3
"""Windows after which Arrow's allocator gives back what it holds unused: pages given back must be made again by the system, which costs as
much as a tenth of the decoding."""

Parts = list[tuple[int, Block]]
"""Parts of steps in their order, each with its number of samples, quarantined ones included."""


@dataclass(frozen=True)
class Course:
    """An epoch as a rank goes through it, from step ``first`` on. ``together``: steps whose samples are arranged together."""

    epoch: int
    plan: Plan
    rank: int
    first: int = 0
    together: int = 1

    @property
    def begin(self) -> int:
        """An arranged group of steps is made from its first step on, also where the run goes on in its middle."""
        return self.first // self.together * self.together

    @property
    def groups(self) -> Iterator[tuple[int, int]]:
        """(first, stop) of the steps arranged together."""
        steps = self.plan.steps
        return ((step, min(step + self.together, steps)) for step in range(self.begin, steps, self.together))

    def spans(self) -> Iterator[list[Span]]:
        """What is read for each group."""
        return (self.plan.read(self.rank, *group) for group in self.groups)

    def sizes(self, first: int, stop: int) -> list[int]:
        """Samples of each step."""
        return sizes(self.plan, self.rank, first, stop)


def sizes(plan: Plan, rank: int, first: int, stop: int) -> list[int]:
    """Samples that ``rank`` reads in each of the steps ``first <= step < stop``."""
    return [plan.taken(rank, step + 1) - plan.taken(rank, step) for step in range(first, stop)]


class Stream:
    """Iterates (plan, batch) over ``courses``, which are asked for as they are due; one in which this rank reads nothing is the last.

    ``close`` ends its threads and processes. With ``prefetch = 0`` nothing is done ahead, but by ``workers``.

    :raises DataError: what a thread or process met in the files, where the batch was due.
    """

    def __init__(
        self, rows: RowReader, epochs: Epochs, batching: Batching, courses: Iterable[Course], *, prefetch: int, workers: int
    ) -> None:
        self._rows, self._epochs, self._batching, self._courses, self._workers = rows, epochs, batching, courses, workers
        self._room = Room()
        self._cuts = self._cut()
        self._cutter = Ahead(lambda: self._cuts, None, "gem-data row groups") if prefetch else None
        self._made = self._make(iter(self._cutter or self._cuts))
        self._maker = Ahead(lambda: self._made, prefetch, "gem-data batches") if prefetch else None
        self._batches: Iterator[tuple[Plan, Batch]] = iter(self._maker or self._made)

    def __iter__(self) -> Iterator[tuple[Plan, Batch]]:
        return self

    def __next__(self) -> tuple[Plan, Batch]:
        return next(self._batches)

    def close(self) -> None:
        self._room.close()
        for ahead, made in ((self._maker, self._made), (self._cutter, self._cuts)):
            if ahead is not None:
                ahead.close()
            else:
                made.close()

    # --- row groups to the parts of steps -----------------------------------------------------------------------------------------

    def _cut(self) -> Generator[Course | Parts, None, None]:
        """Each course, and after it the parts of its steps, window by window."""
        due: deque[Course | Window] = deque()
        coming = _Spans(iter(()))
        with closing(self._decoded(self._windows(due))) as decoded:
            for number, blocks in enumerate(decoded, 1):
                while isinstance(item := due.popleft(), Course):
                    course, coming = item, _Spans((n, *span) for n, own in enumerate(item.spans()) for span in own)
                    yield item
                parts = self._parts(course.epoch, item, blocks, coming)
                blocks.clear()
                self._room.leave(item.stop - item.start - sum(rows for rows, _ in parts))
                if number % _RELEASE_EVERY == 0:
                    pa.default_memory_pool().release_unused()
                if parts:
                    yield parts
                del parts
        yield from (item for item in due if isinstance(item, Course))

    def _windows(self, due: deque[Course | Window]) -> Iterator[Window]:
        """The windows of all courses. They and their courses are put into ``due`` too."""
        for course in self._courses:
            windows = self._epochs.windows(course.epoch)
            self._room.most = max(self._room.most, max(w.stop - w.start for w in windows) * 5 // 4)
            due.append(course)
            own = holding(windows, course.plan.touched(course.rank, course.begin))
            for window in own:
                due.append(window)
                yield window
            if not own:
                return

    def _decoded(self, windows: Iterator[Window]) -> Generator[list[Block], None, None]:
        """The rows of each window, unit by unit. What is yielded is the taker's: it may empty the list."""
        if self._workers:
            with closing(Workers(self._rows, self._workers)) as workers:
                yield from workers.windows(windows, self._room.enter)
            return
        with closing(Reader()) as reader:
            for window in windows:
                blocks: list[Block] = []
                for unit in window.units:
                    if not self._room.enter(unit.rows):
                        return
                    blocks.append(self._rows.unit(unit, reader))
                yield blocks

    def _parts(self, epoch: int, window: Window, blocks: list[Block], coming: _Spans) -> Parts:
        """The part of each coming step in the window. All is cut at once, each column going as it is copied."""
        requests = [block.fixed["request"] for block in blocks if "request" in block.fixed]
        order = self._epochs.order(epoch, window, np.concatenate(requests) if requests else None)
        rows: list[Rows] = []
        counts = []
        for _, spans in groupby(coming.until(window.stop), key=lambda span: span[0]):
            places = [(start - window.start, end - window.start) for _, start, end in spans]
            counts.append(sum(high - low for low, high in places))
            if order is None and len(places) == 1:
                rows.append(slice(*places[0]))
            else:
                picked = np.concatenate([np.arange(low, high) for low, high in places])
                rows.append(picked if order is None else order[picked])
        return list(zip(counts, Block.deal(blocks, rows, drop=self._batching.steps == 1))) if rows else []

    # --- parts of steps to batches ------------------------------------------------------------------------------------------------

    def _make(self, cuts: Iterator[Course | Parts]) -> Generator[tuple[Plan, Batch], None, None]:
        for course in cuts:
            assert isinstance(course, Course)
            steps = self._steps(course, cuts) if course.together == 1 else self._arranged_steps(course, cuts)
            for block in steps:
                yield course.plan, block.to_batch(self._rows.decoder.features)
                del block

    def _steps(self, course: Course, cuts: Iterator[Course | Parts]) -> Iterator[Block]:
        """The rows of each group of steps."""
        ready: deque[tuple[int, Block]] = deque()
        for own in course.spans():
            parts, wanted = [], sum(stop - start for start, stop in own)
            while wanted:
                if not ready:
                    found = next(cuts)
                    assert isinstance(found, list)
                    ready.extend(found)
                    del found
                rows, part = ready.popleft()
                self._room.leave(rows)
                wanted -= rows
                parts.append(part)
            yield Block.join(parts or [self._empty()])

    def _arranged_steps(self, course: Course, cuts: Iterator[Course | Parts]) -> Iterator[Block]:
        """The rows of each step from ``course.first`` on, groups of steps arranged by length."""
        for (start, stop), block in zip(course.groups, self._steps(course, cuts)):
            counts = course.sizes(start, stop)
            order, at = self._batching.arrange(block.events, counts), 0
            for step, size in zip(range(start, stop), counts):
                if step >= course.first:
                    yield block.take(order[at : at + size])
                at += size

    def _empty(self) -> Block:
        file = self._epochs.units[0].file
        return self._rows.decoder.decode(Chunk(file, 0, file.schema.empty_table(), 0)).take(slice(0, 0))


class _Spans:
    """Ascending spans of numbered groups of steps, cut where windows end."""

    def __init__(self, spans: Iterator[tuple[int, int, int]]) -> None:
        self._spans = spans
        self._rest = next(spans, None)

    def until(self, end: int) -> Iterator[tuple[int, int, int]]:
        while self._rest is not None and self._rest[1] < end:
            number, start, stop = self._rest
            self._rest = next(self._spans, None) if stop <= end else (number, end, stop)
            yield number, start, min(stop, end)
