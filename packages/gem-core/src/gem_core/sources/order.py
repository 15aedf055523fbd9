"""Who reads which samples of an epoch, and how a position survives another world size or batch size.

An epoch is a fixed order of ``total`` samples. What is left of it (all of it, at the start) is cut into one contiguous share a rank, equal
but for one sample, so a rank reads neighbouring rows, every sample is read once and all ranks take the same number of steps. Ranks move in
step: the number of steps taken says what *every* rank has read, so the state is the same on all ranks and a new plan, for any world size
and batch size, can be made for exactly what is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gem_core.errors import ConfigError, DataError

Span = tuple[int, int]
"""Samples ``start <= i < stop`` of the epoch's order."""


def indices(spans: Sequence[Span]) -> NDArray[np.int64]:
    """The samples of ``spans``, one after another."""
    return np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(a, b) for a, b in spans)])


@dataclass(frozen=True)
class Plan:
    """``spans`` dealt to ``world`` ranks in steps of ``batch_size`` samples a rank.

    The last step of a rank may be smaller; it can be empty only when ``batch_size`` is 1 or there are fewer samples than ranks. With
    ``drop_last`` a step that not every rank can fill is not made.
    """

    spans: tuple[Span, ...]
    world: int
    batch_size: int
    drop_last: bool = False

    @property
    def total(self) -> int:
        return self._ends[-1]

    @cached_property
    def steps(self) -> int:
        if self.drop_last:
            return self.total // self.world // self.batch_size
        return -(-self.total // (self.world * self.batch_size))

    def share(self, rank: int) -> Span:
        """The rank's samples, counted along ``spans``."""
        each, more = divmod(self.total, self.world)
        return rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more)

    def taken(self, rank: int, step: int) -> int:
        """How many of its samples the rank has read after ``step`` steps."""
        start, stop = self.share(rank)
        full = step * self.batch_size
        # A rank with one sample fewer than the longest leaves one for each coming step, so that no batch is empty while others go on.
        return full if self.drop_last else min(full, max(0, stop - start - (self.steps - step)))

    def read(self, rank: int, first: int, stop: int | None = None) -> list[Span]:
        """Samples of the epoch's order that the rank reads in the steps ``first <= step < stop`` (None: in step ``first`` only)."""
        start, _ = self.share(rank)
        return self._between(start + self.taken(rank, first), start + self.taken(rank, first + 1 if stop is None else stop))

    def touched(self, rank: int, first: int) -> list[Span]:
        """Samples among which are all that the rank reads from step ``first`` on."""
        return self.read(rank, first, self.steps)

    def rest(self, step: int) -> tuple[Span, ...]:
        """What no rank has read after ``step`` steps."""
        left: list[Span] = []
        for rank in range(self.world):
            start, stop = self.share(rank)
            left += self._between(start + self.taken(rank, step), stop)
        return joined(left)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate((b - a for a, b in self.spans), initial=0))

    def _between(self, start: int, stop: int) -> list[Span]:
        """The samples ``start <= i < stop``, counted along ``spans``."""
        found = []
        i = bisect_right(self._ends, start) - 1
        while start < stop:
            a, at = self.spans[i][0], self._ends[i]
            upto = min(stop, self._ends[i + 1])
            found.append((a + start - at, a + upto - at))
            start, i = upto, i + 1
        return found


def joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Sorted spans, neighbours made one."""
    found: list[Span] = []
    for a, b in sorted(spans):
        if found and found[-1][1] == a:
            found[-1] = (found[-1][0], b)
        elif a < b:
            found.append((a, b))
    return tuple(found)


class Arranged(Protocol):
    """The samples of rank ``rank`` in the steps ``first <= step < stop`` of a plan, as positions of the epoch's order, in the order in
    which they are handed out. For sources that rearrange the samples of ``group`` steps before they cut them into batches."""

    def __call__(self, epoch: int, plan: Plan, rank: int, first: int, stop: int) -> Any: ...


class MakePlan(Protocol):
    """Another `Plan` than the one with a fixed batch size."""

    def __call__(self, epoch: int, spans: tuple[Span, ...], world: int, batch_size: int, drop_last: bool) -> Plan: ...


def _fixed(epoch: int, spans: tuple[Span, ...], world: int, batch_size: int, drop_last: bool) -> Plan:
    return Plan(spans, world, batch_size, drop_last)


@dataclass
class Cursor:
    """The position of one rank's source in its epochs: ``begin`` an iteration, ``advance`` at every batch handed out, ``finish`` it.

    ``begin`` after ``load_state_dict`` goes on from the stored position, once; otherwise it starts an epoch from its first sample, the
    next epoch if the last iterator was abandoned on the way.
    """

    total: int
    batch_size: int
    rank: int = 0
    world: int = 1
    drop_last: bool = False
    epoch: int = 0
    group: int = 1
    arranged: Arranged | None = None
    make_plan: MakePlan = _fixed
    _past: list[tuple[int, int, bool, int]] = field(default_factory=list)
    _plan: Plan | None = None
    _step: int = 0
    _loaded: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.world < 1 or not 0 <= self.rank < self.world:
            raise ConfigError(
                f"batch_size {self.batch_size}, rank {self.rank} of {self.world} cannot be used",
                fix="batch_size and the number of ranks must be at least 1, and 0 <= rank < ranks",
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches that each rank gets in the whole present epoch."""
        return self.whole(self.epoch).steps

    @property
    def left(self) -> int:
        """Batches that the next iteration gives each rank."""
        if self._loaded and self._plan is not None:
            return self._plan.steps - self._step
        return self.whole(self.epoch + (self._plan is not None)).steps

    def whole(self, epoch: int) -> Plan:
        """The plan of an epoch that is read from its first sample on."""
        return self.make_plan(epoch, self._whole, self.world, self.batch_size, self.drop_last)

    def begin(self, plan: Plan | None = None) -> tuple[int, Plan, int]:
        """(epoch, plan, step to go on from). ``plan``: `whole` of the epoch that begins, where it was made before."""
        if self._loaded and self._plan is not None:
            self._loaded = False
            return self.epoch, self._plan, self._step
        if self._plan is not None:
            self.epoch += 1
        self._past, self._step, self._loaded = [], 0, False
        self._plan = self.whole(self.epoch) if plan is None else plan
        return self.epoch, self._plan, 0

    def advance(self) -> None:
        self._step += 1

    def finish(self) -> None:
        self.epoch += 1
        self._past, self._plan, self._step = [], None, 0

    def state_dict(self) -> dict[str, Any]:
        """Plain integers and lists; the same on every rank."""
        parts = [*self._past]
        if self._plan is not None:
            parts.append((self._plan.world, self._plan.batch_size, self._plan.drop_last, self._step))
        return {"epoch": self.epoch, "total": self.total, "steps": [list(p) for p in parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["total"] != self.total:
            raise DataError(
                f"the position was stored over {state['total']} samples, the source now has {self.total}",
                fix="resume on the same files with the same filter, or start a new run",
            )
        self.epoch, self._step, self._loaded = int(state["epoch"]), 0, True
        mine = (self.world, self.batch_size, self.drop_last)
        plan: Plan | None = None
        self._past = [(int(w), int(b), bool(d), int(s)) for w, b, d, s in state["steps"]]
        for world, batch_size, drop_last, steps in self._past:
            plan = self.make_plan(self.epoch, self._whole if plan is None else self._rest(plan), world, batch_size, drop_last)
            self._step = steps
        if plan is not None and mine == (plan.world, plan.batch_size, plan.drop_last):
            self._past.pop()
        elif plan is not None:
            done = self._step >= plan.steps
            plan, self._step = self.make_plan(self.epoch, () if done else self._rest(plan), *mine), 0
        self._plan = plan

    def steps(self) -> Iterator[tuple[int, list[Span]]]:
        """(epoch, samples) of every step to come of one iteration, counting it as handed out when it is."""
        epoch, plan, first = self.begin()
        for step in range(first, plan.steps):
            spans = plan.read(self.rank, step)
            self.advance()
            yield epoch, spans
        self.finish()

    @property
    def _whole(self) -> tuple[Span, ...]:
        return ((0, self.total),) if self.total else ()

    def _rest(self, plan: Plan) -> tuple[Span, ...]:
        """What no rank has read after ``_step`` steps of ``plan``, also from the middle of an arranged group."""
        first = self._step // self.group * self.group
        if self.arranged is None or first == self._step:
            return plan.rest(self._step)
        stop = min(first + self.group, plan.steps)
        left = list(plan.rest(stop))
        for rank in range(plan.world):
            order = self.arranged(self.epoch, plan, rank, first, stop)
            left += [(i, i + 1) for i in map(int, order[plan.taken(rank, self._step) - plan.taken(rank, first) :])]
        return joined(left)
