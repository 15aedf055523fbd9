"""Discrete-event simulation of one step: streams of operations in order, links shared by the collectives that are on them.

Every rank runs the same program. Each stream takes its operations in program order; an operation begins when its stream is free and what
it waits for has ended, a collective when that holds for every member of its group. Events are handled in the order of their start.

- Collectives that are under way together share the links of a tier evenly (processor sharing): the smaller adds its whole load to the
  other's time, the larger adds as much as the smaller had to do.
- A collective takes SMs from computation beside it, if it is not quiet: overlapped computation goes ``slowdown`` times slower.

Times are arrays over the ranks, or plain floats for one rank that stands for all (every group is then in step).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gem_parallel.plan.network import Axes, Cost

HOST = "launches"
"""The stream of the host, which starts every operation of a step that is not captured as a graph."""
Times = Any
"""``[ranks]`` float64 in s, or one float."""


@dataclass(frozen=True)
class Op:
    """One operation of the program.

    ``what`` says what it is in a report; ``after`` are indices of earlier operations. ``seconds`` for computation and for the host;
    ``cost`` and the ranks that take part, as the ``axes`` of their group, for a collective; a ``quiet`` one takes no SM.
    """

    name: str
    what: str
    stream: str
    after: tuple[int, ...] = ()
    seconds: Times = 0.0
    cost: Cost | None = None
    axes: Axes = ()
    quiet: bool = False

    @property
    def computes(self) -> bool:
        return self.cost is None and self.stream != HOST


@dataclass
class Trace:
    """Start and end of every operation in s (as `Times`), and how much longer computation took for collectives beside it."""

    start: list[Times]
    end: list[Times]
    stretch: list[Times]

    @property
    def step(self) -> Times:
        return _over(self.end)

    def device(self, ops: Sequence[Op]) -> Times:
        """The step if the host were never waited for."""
        return _over([end for op, end in zip(ops, self.end) if op.stream != HOST])


@dataclass
class _Flying:
    """An operation under way. ``loads``: s that each tier's links need for it, shares of others included."""

    at: int
    start: Times
    own: tuple[float, ...]
    latency: float
    loads: list[Times] = field(default_factory=list)


def run(ops: Sequence[Op], *, slowdown: float = 1.0, world: int | None = None) -> Trace:
    """Simulate ``ops``.

    :param slowdown: factor by which computation beside a collective slows down.
    :param world: number of ranks of array times; None: one rank for all.
    """
    many = world is not None
    largest: Callable[..., Any] = np.maximum if many else max
    smallest: Callable[..., Any] = np.minimum if many else min
    zero: Times = 0.0 if world is None else np.zeros(world)
    queues: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        queues.setdefault(op.stream, []).append(i)
    heads = dict.fromkeys(queues, 0)
    start: list[Times] = [None] * len(ops)
    end: list[Times] = [None] * len(ops)
    stretch: list[Times] = [zero] * len(ops)
    flying: list[_Flying] = []
    computing: int | None = None
    lost = 1 - 1 / slowdown

    def ready(i: int) -> Times | None:
        time = zero if heads[ops[i].stream] == 0 else end[queues[ops[i].stream][heads[ops[i].stream] - 1]]
        for j in ops[i].after:
            if end[j] is None:
                return None
            time = largest(time, end[j])
        return time

    while True:
        chosen, begin, earliest = -1, None, float("inf")
        for stream, queue in queues.items():
            if heads[stream] == len(queue):
                continue
            time = ready(queue[heads[stream]])
            if time is None:
                continue
            first = float(time.mean()) if many else time
            if first < earliest:
                chosen, begin, earliest = queue[heads[stream]], time, first
        if chosen < 0:
            break
        op = ops[chosen]
        heads[op.stream] += 1
        flying = [f for f in flying if _latest(end[f.at], many) > earliest]
        if op.stream == HOST:
            start[chosen], end[chosen] = begin, begin + op.seconds
            continue
        if op.cost is None:
            extra = zero
            if lost:
                for other in (f for f in flying if not ops[f.at].quiet):
                    left = largest(zero, end[other.at] - largest(begin, other.start))
                    extra = extra + smallest(left * lost, op.seconds * (slowdown - 1))
                extra = smallest(extra, op.seconds * (slowdown - 1))
            start[chosen], stretch[chosen] = begin, extra
            end[chosen] = begin + op.seconds + extra
            computing = chosen
            continue
        begin = _agree(begin, op.axes, many)
        mine = _Flying(chosen, begin, op.cost.loads, op.cost.latency, list(op.cost.loads))
        for other in flying:
            shared = [k for k, load in enumerate(mine.own) if load and other.own[k]]
            if not shared:
                continue
            length = end[other.at] - other.start
            left = largest(zero, smallest(1.0, (end[other.at] - begin) / _positive(length, many)))
            for k in shared:
                both = smallest(mine.own[k], other.own[k] * left)
                mine.loads[k] = mine.loads[k] + both
                other.loads[k] = other.loads[k] + both
            others = ops[other.at]
            end[other.at] = largest(end[other.at], _agree(other.start + other.latency + _top(other.loads, largest), others.axes, many))
        start[chosen] = begin
        end[chosen] = _agree(begin + mine.latency + _top(mine.loads, largest), op.axes, many)
        flying.append(mine)
        if lost and computing is not None and not op.quiet:
            ahead = largest(zero, end[computing] - begin)
            room = ops[computing].seconds * (slowdown - 1) - stretch[computing]
            more = smallest(smallest((end[chosen] - begin) * lost, ahead * (slowdown - 1)), room)
            stretch[computing] = stretch[computing] + more
            end[computing] = end[computing] + more
    if any(e is None for e in end):
        stuck = next(op.name for op, e in zip(ops, end) if e is None)
        raise AssertionError(f"operation {stuck!r} waits for one behind it")
    return Trace(start, end, stretch)


def _agree(times: Times, axes: Axes, many: bool) -> Times:
    """The latest time of each group's members, for all of them."""
    if not many or not axes:
        return times
    result = times
    for degree, stride in axes:
        shape = (-1, degree, stride)
        folded = result.reshape(shape)
        result = np.broadcast_to(folded.max(axis=1, keepdims=True), folded.shape).reshape(-1)
    return result


def _top(loads: Sequence[Times], largest: Callable[..., Any]) -> Times:
    top = loads[0]
    for load in loads[1:]:
        top = largest(top, load)
    return top


def _over(times: Sequence[Times]) -> Times:
    result = times[0]
    for time in times[1:]:
        result = np.maximum(result, time)
    return result


def _latest(time: Times, many: bool) -> float:
    return float(time.max()) if many else time


def _positive(time: Times, many: bool) -> Times:
    return np.maximum(time, 1e-15) if many else max(time, 1e-15)
