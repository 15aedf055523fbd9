"""Which samples go into which batch, so that no rank waits for another one's long histories.

All functions work on the *cost* of samples, a number each (`Cost` makes it from history lengths), keep every sample, and give the same
result everywhere. ``imbalance`` is the measure: the heaviest rank over the mean of the ranks, in one step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gem_core.config.base import FrozenConfig
from gem_core.sources.order import Plan, Span, joined
from gem_core.sources.shuffle import permutation

Ints = NDArray[np.int64]
Costs = NDArray[np.float64]


class Cost(FrozenConfig):
    """Work of a sample with a history of L events: ``linear * L + quadratic * L * min(L, window)``."""

    linear: float = Field(1.0, ge=0)
    quadratic: float = Field(0.0, ge=0, description="full self-attention costs 2 / d_model of the linear layers' work per key")
    window: int | None = Field(None, gt=0, description="keys that an event attends to at most; None: the whole history")

    def of(self, lengths: Ints) -> Costs:
        """``[n]`` costs of ``lengths [n]``."""
        keys = lengths if self.window is None else np.minimum(lengths, self.window)
        return self.linear * lengths + self.quadratic * lengths.astype(np.float64) * keys


class Fixed(FrozenConfig):
    """Batches of ``batch_size`` samples in the order of the epoch."""

    kind: Literal["fixed"] = "fixed"

    @property
    def steps(self) -> int:
        """Steps whose samples are arranged together."""
        return 1

    def arrange(self, lengths: Ints, sizes: Sequence[int]) -> Ints:
        """Order of the samples of some coming steps, with ``sizes`` samples a step: the first sizes[0] are the next batch, and so on."""
        return np.arange(lengths.size)


class Balanced(FrozenConfig):
    """Base batches of ``base`` samples, sorted by cost and dealt to the next ``window`` batches so that each gets about the same work.

    No communication: every rank balances its own batches. A sample moves by fewer than ``window`` batches.
    """

    kind: Literal["bbs"] = "bbs"
    base: int = Field(128, gt=0, description="samples that stay together; batch_size must be a multiple")
    window: int = Field(8, gt=1, description="batches balanced together")
    cost: Cost = Cost()

    @property
    def steps(self) -> int:
        return self.window

    def arrange(self, lengths: Ints, sizes: Sequence[int]) -> Ints:
        costs = self.cost.of(lengths)
        # Base batches never straddle two bins, so a bin's rest that is no whole base batch is a smaller one.
        parts = [min(self.base, size - at) for size in sizes for at in range(0, size, self.base)]
        ends = np.cumsum([0, *parts])
        totals = np.add.reduceat(costs, ends[:-1]) if lengths.size else costs
        order = np.argsort(-totals, kind="stable")
        whole = [sum(1 for at in range(0, size, self.base) if min(self.base, size - at) == self.base) for size in sizes]
        rests = [size % self.base for size in sizes]
        bins: list[list[int]] = [[] for _ in sizes]
        loads = [0.0] * len(sizes)
        for part in order.tolist():
            room = (
                [i for i, free in enumerate(whole) if free]
                if parts[part] == self.base
                else [i for i, r in enumerate(rests) if r == parts[part]]
            )
            best = min(room, key=lambda i: (loads[i] / sizes[i], i))
            bins[best].append(part)
            loads[best] += float(totals[part])
            if parts[part] == self.base:
                whole[best] -= 1
            else:
                rests[best] = 0
        taken = [np.arange(ends[p], ends[p + 1]) for b in bins for p in sorted(b)]
        return np.concatenate(taken) if taken else np.zeros(0, dtype=np.int64)


class Bucketed(FrozenConfig):
    """Samples of the next ``window`` batches sorted by length, so that a batch holds lengths alike; the batches come in shuffled order."""

    kind: Literal["bucket"] = "bucket"
    window: int = Field(16, gt=1, description="batches sorted together")

    @property
    def steps(self) -> int:
        return self.window

    def arrange(self, lengths: Ints, sizes: Sequence[int]) -> Ints:
        order = np.argsort(lengths, kind="stable")
        if len(set(sizes)) != 1:
            return order
        batches = order.reshape(len(sizes), -1)
        turn = permutation(len(sizes), int(lengths.sum()))
        return batches[turn].reshape(-1)


class Tokens(FrozenConfig):
    """Consecutive samples until their cost reaches ``budget`` (with the plain cost: events); ``batch_size`` is not used. A sample without
    events costs what one event does, or any number of them would be a batch.

    The lengths of all rows are read before the first batch, and every rank gets a share of the same cost and the same number of batches.
    """

    kind: Literal["tokens"] = "tokens"
    budget: float = Field(gt=0, description="cost a batch and rank")
    max_samples: int | None = Field(None, gt=0)
    cost: Cost = Cost()

    @property
    def steps(self) -> int:
        return 1

    def arrange(self, lengths: Ints, sizes: Sequence[int]) -> Ints:
        return np.arange(lengths.size)


class Global(FrozenConfig):
    """The samples of all ranks' next step dealt to them so that each gets the same number and nearly the same cost (Karmarkar-Karp).

    The baseline that `Balanced` is held against. Every rank reads the lengths of all rows beforehand, and decodes all files to take its
    samples out of them: the exchange is paid for by reading, ``world`` times in all.
    """

    kind: Literal["global"] = "global"
    cost: Cost = Cost()

    @property
    def steps(self) -> int:
        return 1

    def arrange(self, lengths: Ints, sizes: Sequence[int]) -> Ints:
        return np.arange(lengths.size)


Batching = Annotated[Fixed | Balanced | Bucketed | Tokens | Global, Field(discriminator="kind")]


class GlobalPlan(Plan):
    """Steps of neighbouring samples, each step's dealt to the ranks by `karmarkar_karp`. ``costs``: of the samples along ``spans``."""

    _costs: Costs
    _dealt: dict[int, list[Ints]]

    def __init__(self, spans: tuple[Span, ...], world: int, batch_size: int, drop_last: bool, costs: Costs) -> None:
        super().__init__(spans, world, batch_size, drop_last)
        object.__setattr__(self, "_costs", costs)  # Plan is frozen
        object.__setattr__(self, "_dealt", {})

    def _edge(self, step: int) -> int:
        """Samples of all ranks in the steps before ``step``: full steps, or without ``drop_last`` as even as they can be."""
        return step * self.world * self.batch_size if self.drop_last else self.total * step // max(1, self.steps)

    @property
    def steps(self) -> int:
        each = self.world * self.batch_size
        return self.total // each if self.drop_last else -(-self.total // each)

    def read(self, rank: int, first: int, stop: int | None = None) -> list[Span]:
        stop = first + 1 if stop is None else stop
        found = [place for step in range(first, stop) for place in self._deal(step)[rank].tolist()]
        return [(self._position(i), self._position(i) + 1) for i in found]

    def touched(self, rank: int, first: int) -> list[Span]:
        return self._between(self._edge(first), self._edge(self.steps))

    def rest(self, step: int) -> tuple[Span, ...]:
        return joined(self._between(self._edge(step), self.total))

    def _position(self, i: int) -> int:
        return self._between(i, i + 1)[0][0]

    def _deal(self, step: int) -> list[Ints]:
        """Places along ``spans`` of each rank's samples, ascending."""
        found = self._dealt.get(step)  # two threads read a plan
        if found is None:
            start, stop = self._edge(step), self._edge(step + 1)
            costs = self._costs[start:stop]
            # What does not divide evenly goes to the ranks with the least: cheapest samples last.
            order = np.argsort(-costs, kind="stable")
            whole = costs.size - costs.size % self.world
            groups = [order[g] for g in karmarkar_karp(costs[order[:whole]], self.world)]
            turn = np.argsort([costs[g].sum() for g in groups], kind="stable")
            for rank, sample in zip(turn.tolist(), order[whole:].tolist()):
                groups[rank] = np.append(groups[rank], sample)
            if len(self._dealt) > 1024:
                self._dealt.clear()
            found = self._dealt[step] = [start + np.sort(g) for g in groups]
        return found


class TokenPlan(Plan):
    """Shares of equal cost, cut into batches by a token budget; all ranks take the same number of steps.

    ``costs``: of the samples along ``spans``. A rank that would need fewer batches than another has its largest ones halved.
    """

    _shares: list[int]
    _cuts: list[list[int]]

    def __init__(self, spans: tuple[Span, ...], world: int, batch_size: int, drop_last: bool, costs: Costs, tokens: Tokens) -> None:
        super().__init__(spans, world, batch_size, drop_last)
        total = np.concatenate([[0.0], np.cumsum(costs)])
        borders = np.searchsorted(total, total[-1] * np.arange(1, world) / world).tolist()
        shares = [0, *borders, costs.size]
        cuts = [token_batches(costs[a:b], tokens.budget, tokens.max_samples).tolist() for a, b in zip(shares, shares[1:])]
        steps = max(len(c) for c in cuts) - 1
        object.__setattr__(self, "_shares", shares)  # Plan is frozen; these follow from its fields and the files
        object.__setattr__(self, "_cuts", [_halved(c, steps) for c in cuts])

    @property
    def steps(self) -> int:
        return len(self._cuts[0]) - 1

    def share(self, rank: int) -> Span:
        return self._shares[rank], self._shares[rank + 1]

    def taken(self, rank: int, step: int) -> int:
        return int(self._cuts[rank][step])


def _halved(borders: list[int], batches: int) -> list[int]:
    """``borders`` with the largest batches halved until there are ``batches``; empty ones at the end if samples run out."""
    while len(borders) - 1 < batches:
        sizes = [b - a for a, b in zip(borders, borders[1:])]
        widest = max(range(len(sizes)), key=lambda i: sizes[i], default=0)
        if not sizes or sizes[widest] < 2:
            return [*borders, *[borders[-1]] * (batches - len(borders) + 1)]
        borders = [*borders[: widest + 1], borders[widest] + sizes[widest] // 2, *borders[widest + 1 :]]
    return borders


def imbalance(work: NDArray[Any]) -> Costs:
    """Heaviest rank over the mean rank, ``[steps]``, of ``work [ranks, steps]``; 1.0 where nothing is to be done."""
    mean = work.mean(0)
    return np.where(mean > 0, work.max(0) / np.where(mean > 0, mean, 1.0), 1.0)


def token_batches(costs: Costs, budget: float, max_samples: int | None = None) -> Ints:
    """Borders ``[batches + 1]`` of consecutive batches whose costs sum to at most ``budget``; a sample above it is a batch alone."""
    borders, start, load = [0], 0, 0.0
    for i, cost in enumerate(costs.tolist()):
        if i > start and (load + cost > budget or (max_samples is not None and i - start >= max_samples)):
            borders.append(i)
            start, load = i, 0.0
        load += cost
    return np.array([*borders, costs.size] if costs.size else [0], dtype=np.int64)


def karmarkar_karp(costs: Costs, parts: int) -> list[Ints]:
    """``parts`` groups of equal sample count and nearly equal cost by the largest differencing method (Karmarkar and Karp, 1982).

    The baseline that needs all ranks' costs and an exchange of samples. ``costs.size`` must be a multiple of ``parts``.

    Samples are first taken ``parts`` at a time in the order of their costs; each such set is a partial solution with one sample a group.
    The two solutions with the largest spreads are joined, heavy groups with light ones, until one is left.
    """
    if costs.size % parts:
        raise ValueError(f"{costs.size} samples cannot be dealt evenly to {parts} parts")
    order = np.argsort(-costs, kind="stable").reshape(-1, parts)
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, row in enumerate(order.tolist()):
        groups = [(float(costs[i]), [i]) for i in row]
        heap.append((groups[-1][0] - groups[0][0], number, groups))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        joined = sorted(((x + y, [*i, *j]) for (x, i), (y, j) in zip(a, reversed(b))), key=lambda g: -g[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
    return [np.array(sorted(members), dtype=np.int64) for _, members in heap[0][2]] if heap else [np.zeros(0, np.int64)] * parts
