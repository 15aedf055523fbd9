"""Batches on their way to the device: counted on the host, copied ahead on a side stream, each with the source's position after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gem_core.batch import Batch
from gem_core.errors import DataError, GemError, RunError
from gem_core.model.loss import batch_total
from gem_core.requests import expanded, sizes
from gem_core.sources.contract import Source
from gem_core.train.runtime import Runtime


@dataclass(frozen=True)
class Fed:
    """A batch and what the host knows of it: the device copy, the weight that it adds to the loss's total, events, model FLOPs (None: not
    known), the feed's position after it, and over several ranks the work of the busiest one over their mean (``imbalance``, at least 1)."""

    host: Batch
    batch: Batch
    weight: float
    tokens: int
    flops: float | None
    position: dict[str, Any]
    imbalance: float | None = None


class Feed:
    """Iterates ``epochs`` epochs of a source (None: without end).

    On a CUDA device the next batch is pinned and copied while the current one is computed with; positions are of the batch handed out,
    not of the one fetched ahead, so that resuming is exact. Where a source waits for data, what was fetched is handed out before.

    Over several ranks all feeds give equally many batches, since every step needs all ranks: one whose source has ended gives batches
    without samples until the last has. A source that fails ends the feeds of all ranks.

    :param flops: model FLOPs of one training step on a host batch, or None.
    :param runtime: the ranks that go through their sources together; None: this one alone.
    :param stops: whether the run is to stop; asked where a source waits for data, with ``at_once`` also before each batch. ``stopped``: the
        feeds of all ranks ended for that. ``at_once``: nor is data waited for that is not there yet.
    """

    def __init__(
        self,
        source: Source,
        device: torch.device,
        epochs: int | None = 1,
        flops: Callable[[Batch], float] | None = None,
        runtime: Runtime | None = None,
        stops: Callable[[], bool] = lambda: False,
        at_once: bool = False,
    ) -> None:
        self.source, self.device, self.epochs, self.flops = source, device, epochs, flops
        self.runtime = runtime if runtime is not None and runtime.world > 1 else None
        self._progress: Callable[[], None] = (lambda: None) if runtime is None else runtime.progress
        self._stops, self._at_once, self.stopped = stops, at_once, False
        self.epoch = 0
        self._resumed = False
        self._pairs = self._fetched = self._pauses = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def load_position(self, position: dict[str, Any]) -> None:
        self.epoch = int(position["epoch"])
        self.source.load_state_dict(position["source"])
        self._resumed = True

    def __iter__(self) -> Iterator[Fed]:
        return (fed for fed in self._flow() if fed is not None)

    def pairs(self) -> Iterator[tuple[Fed, Fed | None]]:
        """Each batch with the one after it, where that need not be waited for."""
        self._pairs, before = True, None
        for fed in self._flow():
            if before is not None:
                yield before, fed
            before = fed
        if before is not None:
            yield before, None

    def _flow(self) -> Iterator[Fed | None]:
        """Batches, and None where there is none for now; all before it are handed out by then."""
        if self._stream is None:
            for got in self._together():
                yield None if got is None else self._take(got[0], None, got[1])
            return
        ahead: tuple[Fed, torch.cuda.Event] | None = None
        for got in self._together():
            ready, ahead = ahead, None if got is None else self._copy(*got)
            if ready is not None:
                yield self._received(*ready)
            if got is None:
                yield None
        if ahead is not None:
            yield self._received(*ahead)

    def _together(self) -> Iterator[tuple[Batch, float | None] | None]:
        if self.runtime is None:
            for batch in self._host():
                self._progress()
                self.stopped = self._at_once and self._stops()
                if self.stopped:
                    return
                yield None if batch is None else (batch, None)
            return
        batches, last = self._host(), None
        while True:
            host, failure, ended = None, None, False
            try:
                host = next(batches)
            except StopIteration:
                ended = True
            except GemError as error:
                failure = error
            self._progress()
            last = last if host is None else host
            stops = self._at_once and self._stops()
            more = not ended and failure is None
            having, failed, lacking, stopping = self.runtime.count([more, failure is not None, last is None, stops])
            if failure is not None:
                raise failure
            if failed:
                raise RunError(
                    f"the data source of {failed} of {self.runtime.world} ranks failed; what it met is said by that rank",
                    where=f"rank {self.runtime.rank}",
                    fix="look at the message of the rank that failed first",
                )
            self.stopped |= stopping > 0
            if self.stopped or not having:
                return
            if more and host is None:  # all ranks wait alike
                yield None
                continue
            if lacking:  # a run that goes on where only others had more
                shapes = self.runtime.gather_objects(None if last is None else last.select_range(0, 0).map(torch.clone))
                last = next(shape for shape in shapes if shape is not None) if last is None else last
            if host is None:
                assert last is not None
                host = last.select_range(0, 0)
            work = self.runtime.numbers(self._work(host))
            yield host, max(work) * len(work) / sum(work) if sum(work) else 1.0

    def _work(self, host: Batch) -> float:
        """Model FLOPs where they are known, else events, else samples."""
        return self.flops(host) if self.flops is not None else float(host.tokens or host.size)

    def _host(self) -> Iterator[Batch | None]:
        try:
            yield from self._epochs()
        finally:
            if hasattr(self.source, "following"):
                self.source.close()  # type: ignore[attr-defined]

    def _epochs(self) -> Iterator[Batch | None]:
        if hasattr(self.source, "progress"):
            self.source.progress = self._waits  # type: ignore[attr-defined]
            self.source.on_main = (lambda action: action()) if self.runtime is None else self.runtime.on_main  # type: ignore[attr-defined]
        while self.epochs is None or self.epoch < self.epochs:
            batches = 0
            if hasattr(self.source, "following"):
                self.source.following = None if self.epochs is None else self.epochs - self.epoch - 1
            while True:
                for host in self.source:
                    batches, self._fetched, self._pauses = batches + 1, True, False
                    yield host
                if not self._pauses:
                    break
                self._pauses = False
                yield None
            if self.stopped:  # the epoch has not ended, and the source would be asked again without end
                return
            self.epoch += 1
            # A source resumed at the very end of an epoch yields nothing, once.
            if not batches and not self._resumed:
                raise DataError(
                    "the data source yields no batch for this split",
                    where="data",
                    fix="check its paths, filters and split; with drop_last a split smaller than one batch is dropped whole",
                )
            self._resumed = False

    def _waits(self) -> bool:
        self._progress()
        if self._at_once:
            return True
        stops = self._stops()
        self.stopped = stops if self.runtime is None else self.runtime.count([stops])[0] > 0
        keeps = self._pairs or self._stream is not None
        self._pauses, self._fetched = keeps and self._fetched and not self.stopped, False
        return self.stopped or self._pauses

    def _take(self, host: Batch, device_batch: Batch | None, imbalance: float | None) -> Fed:
        position = {"epoch": self.epoch, "source": self.source.state_dict()}
        flops = None if self.flops is None else self.flops(host)
        there = expanded(host) if device_batch is None else device_batch
        return Fed(host, there, float(batch_total(host)), host.tokens, flops, position, imbalance)

    def _copy(self, host: Batch, imbalance: float | None) -> tuple[Fed, torch.cuda.Event]:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            copied = expanded(host.pin_memory().to(self.device, non_blocking=True), sizes(host))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return self._take(host, copied, imbalance), done

    def _received(self, fed: Fed, copied: torch.cuda.Event) -> Fed:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(copied)
        fed.batch.record_stream(current)
        return fed


def grouped(feed: Feed, size: int, look_ahead: bool = False) -> Iterator[tuple[list[Fed], Fed | None]]:
    """Micro-batches of one step each, ``size`` of them (the last group may be smaller), and with ``look_ahead`` the batch after them, where
    that need not be waited for."""
    group: list[Fed] = []
    for fed, following in feed.pairs() if look_ahead else ((fed, None) for fed in feed):
        group.append(fed)
        if len(group) == size:
            yield group, following
            group = []
    if group:
        yield group, None
