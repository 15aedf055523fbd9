"""Where the members of a communication group sit in the network, and what a collective costs there.

A group of g ranks has, on average over the worst group, ``m_k`` members in one domain of tier k (m_0 = 1, m_1 in one host, ...). For an
all-gather that leaves V bytes on every member, each domain of tier k - 1 takes in ``V (1 - m_{k-1} / g)`` bytes once, through the links of
its m_{k-1} members (a pipelined ring, or its hierarchical form); in an all-to-all every member's own share crosses for itself. Times of
the tiers overlap, so a collective takes its latency plus the largest of them. Formulas: alpha-beta model, ring collectives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "barrier"]
Axes = tuple[tuple[int, int], ...]
"""(degree, stride) of each axis that a group spans: the ranks that differ in these coordinates only."""


@dataclass(frozen=True, eq=False)
class Network:
    """Links of each tier, innermost first, as one GPU sees them: ``rates`` in bytes/s and ``latencies`` of a hop in s; ``launch`` and
    ``message`` (for each further peer of an all-to-all) in s."""

    rates: tuple[float, ...]
    latencies: tuple[float, ...]
    launch: float
    message: float

    @property
    def nothing(self) -> Cost:
        return Cost(0.0, (0.0,) * len(self.rates))


@dataclass(frozen=True)
class Group:
    """All groups of one kind: ``size`` members each, ``within[k]`` of them in one domain of tier k (within[0] = 1)."""

    size: int
    within: tuple[float, ...]

    def uses(self, tier: int) -> bool:
        """Whether links of this tier (0 is the innermost) carry something; what goes to another zone also uses the links inside its own."""
        return self.within[1] > 1 if tier == 0 else self.size > self.within[tier]

    @property
    def top(self) -> int:
        """The outermost tier whose links are used; -1 for a group of one."""
        return max((k for k in range(len(self.within) - 1) if self.uses(k)), default=-1)


@dataclass(frozen=True)
class Cost:
    """``latency`` in s, and seconds that the links of each tier are busy."""

    latency: float
    loads: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Alone on the network."""
        return self.latency + max(self.loads, default=0.0)

    def share(self, factor: float) -> Cost:
        """One of ``1 / factor`` equal pieces."""
        return Cost(self.latency, tuple(load * factor for load in self.loads))

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.latency + other.latency, tuple(a + b for a, b in zip(self.loads, other.loads)))


@lru_cache(maxsize=4096)
def place(axes: Axes, world: int, domains: tuple[int, ...]) -> Group:
    """The group of ``axes`` in a world whose ranks fill the domains in order.

    Where groups differ (a degree that does not divide a domain), each tier counts for the group that is spread over most domains.
    """
    size = math.prod(degree for degree, _ in axes)
    if size == 1:
        return Group(1, (1.0,) * (len(domains) + 1))
    ranks = np.arange(world)
    name = ranks.copy()
    for degree, stride in axes:
        name -= ranks // stride % degree * stride
    within = [1.0]
    for domain in domains:
        count = -(-world // domain)
        met = np.unique(name * count + ranks // domain) // count
        within.append(size / int(np.unique(met, return_counts=True)[1].max()))
    return Group(size, tuple(within))


@lru_cache(maxsize=1 << 16)
def cost(kind: Kind, size: float, group: Group, network: Network) -> Cost:
    """Cost of one collective on every rank.

    :param size: bytes. all-gather: what a member has afterwards; reduce-scatter: what it had before; all-reduce: the tensor; all-to-all:
        what the busiest member sends or receives, its share for itself included; barrier: not read.
    """
    within, g = group.within, group.size
    if g == 1:
        return network.nothing
    steps = [(within[k + 1] / within[k], latency) for k, latency in enumerate(network.latencies)]
    if kind == "barrier":
        return Cost(network.launch + 2 * sum(math.ceil(math.log2(n)) * latency for n, latency in steps), network.nothing.loads)
    if kind == "all-to-all":
        latency = network.launch + network.latencies[group.top] + (g - 1) * network.message
        return Cost(latency, _crossing(size, group, network))
    rounds = 2 if kind == "all-reduce" else 1
    # Once around the ring: g - 1 hops, as few as possible of them on the outer tiers.
    hops = [g / within[k] - g / within[k + 1] if group.uses(k) else 0.0 for k in range(len(network.latencies))]
    latency = network.launch + rounds * sum(n * latency for n, latency in zip(hops, network.latencies))
    return Cost(latency, tuple(rounds * load for load in _ring(size, group, network)))


def _ring(size: float, group: Group, network: Network) -> tuple[float, ...]:
    """What a member receives over each tier, as time: all but its own share in total, each tier its domain's part of it."""
    within, g = group.within, group.size
    taken = [size * (1 - within[k] / g) / within[k] if group.uses(k) else 0.0 for k in range(len(network.rates))]
    # A host's members pass on to one another what came in from outside, so the innermost links carry everything that the next did not.
    if group.uses(0):
        taken[0] = size * (1 - 1 / g) - sum(taken[1:2])
    return tuple(amount / rate for amount, rate in zip(taken, network.rates))


def _crossing(size: float, group: Group, network: Network) -> tuple[float, ...]:
    within, g = group.within, group.size
    inside = size * (within[1] - 1) / g
    amounts = [inside, *(size * (1 - within[k] / g) for k in range(1, len(network.rates)))]
    return tuple(amount / rate for amount, rate in zip(amounts, network.rates))


def strides(order: Sequence[str], degrees: dict[str, int]) -> dict[str, int]:
    """Stride of each axis when ``order`` names them from the innermost: consecutive ranks differ in the first."""
    found, stride = {}, 1
    for axis in order:
        found[axis] = stride
        stride *= degrees[axis]
    return found
