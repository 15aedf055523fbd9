"""Which regions of the layers recompute their activations: a multiple-choice knapsack of memory saved against time lost.

Every layer offers choices, sets of its regions (the PFFN, the attention, a pooling, ...) that are made again in backward; each costs the
forward time of these regions and keeps the rest, and their inputs. One choice a layer, least time within a budget of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from gem_core.errors import ConfigError
from gem_parallel.plan.cluster import Cluster
from gem_parallel.plan.program import UnitTimes, part_seconds
from gem_parallel.plan.workload import Lengths, Unit, Workload

Option = tuple[float, float]
"""(bytes kept, seconds added)."""
CELLS = 4096
"""Steps in which bytes are counted; they are rounded up, so that a budget is never exceeded."""


def choose(groups: Sequence[Sequence[Option]], budget: float) -> list[int] | None:
    """One option of each group with the least seconds in all whose bytes stay within ``budget``; None where nothing does.

    Bytes are rounded up to ``budget / CELLS``; the answer is never worse than the best one that takes the same option in every group.
    """
    if not groups:
        return []
    cell = budget / CELLS if budget > 0 else 1.0
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for group in groups:
        options = _frontier(group)
        grown: dict[int, tuple[float, tuple[int, ...]]] = {}
        for used, (seconds, picks) in best.items():
            for i in options:
                size, more = group[i]
                total = used + -int(-size // cell)
                if total <= CELLS and (total not in grown or seconds + more < grown[total][0]):
                    grown[total] = seconds + more, (*picks, i)
        best = _pruned(grown)
    found = min(best.values(), default=None, key=lambda item: item[0])
    uniform = best_uniform(groups, budget)
    if uniform is not None and (found is None or _seconds(groups, uniform) < found[0]):
        return uniform
    return None if found is None else list(found[1])


def best_uniform(groups: Sequence[Sequence[Option]], budget: float) -> list[int] | None:
    """The fastest answer that takes the option of one number in every group (the last one of a group that has fewer)."""
    found: list[int] | None = None
    for i in range(max(len(group) for group in groups)):
        picks = [min(i, len(group) - 1) for group in groups]
        fits = sum(group[k][0] for group, k in zip(groups, picks)) <= budget
        if fits and (found is None or _seconds(groups, picks) < _seconds(groups, found)):
            found = picks
    return found


def _seconds(groups: Sequence[Sequence[Option]], picks: Sequence[int]) -> float:
    return sum(group[i][1] for group, i in zip(groups, picks))


def _frontier(group: Sequence[Option]) -> list[int]:
    """Options that no other one beats in both respects."""
    order = sorted(range(len(group)), key=lambda i: (group[i][1], group[i][0]))
    kept: list[int] = []
    for i in order:
        if not kept or group[i][0] < group[kept[-1]][0]:
            kept.append(i)
    return kept


def _pruned(states: dict[int, tuple[float, tuple[int, ...]]]) -> dict[int, tuple[float, tuple[int, ...]]]:
    kept: dict[int, tuple[float, tuple[int, ...]]] = {}
    least = float("inf")
    for used in sorted(states):
        if states[used][0] < least:
            least = states[used][0]
            kept[used] = states[used]
    return kept


@dataclass(frozen=True)
class Level:
    """A choice for every unit. ``modules``: what recomputes; ``workload`` and ``times`` are those of a step that does so."""

    modules: tuple[str, ...]
    workload: Workload
    times: tuple[UnitTimes, ...]


def levels(
    workload: Workload,
    cluster: Cluster,
    times: tuple[UnitTimes, ...],
    rank: Lengths,
    events: float,
    fixed: Sequence[str] = (),
    count: int = 8,
) -> list[Level]:
    """Level 0 recomputes nothing; each further one fits into a smaller budget, down to the least that there is.

    :param rank: history lengths ``[1, B]`` of the rank whose ``times`` are given.
    :param events: history events of the fullest rank.
    :param fixed: patterns of modules that recompute, whatever the budget: there is one level then.
    :raises ConfigError: ``fixed`` matches other modules than regions of layers.
    """
    groups = [_options(unit, workload, cluster, rank, events) for unit in workload.units]
    if fixed:
        picks = matching(workload.units, fixed)
        if picks is None:
            raise ConfigError(
                "the planner knows what it costs to recompute PFFN, attention, FFN and pooling of layers, and other modules are set",
                where="train.callbacks.recompute.modules",
                fix="plan them anew with --free train.callbacks.recompute, or name modules as in layers.*.blocks.*.attention",
            )
        return [_level(workload, times, groups, picks)]
    found = [Level((), workload, times)]
    # The backward pass begins with the last one: what it would make again is there when most is.
    for last in [i for i, unit in enumerate(workload.units) if unit.choices][-1:]:
        groups[last] = groups[last][:1]
    most = sum(group[0][0] for group in groups)
    least = sum(min(size for size, _ in group) for group in groups)
    for i in range(1, count + 1):
        chosen = choose(groups, most - (most - least) * i / count * (1 - 2 * len(groups) / CELLS))
        if chosen is None or not any(chosen):
            continue
        level = _level(workload, times, groups, chosen)
        if level.modules != found[-1].modules:
            found.append(level)
    return found


def _level(workload: Workload, times: tuple[UnitTimes, ...], groups: Sequence[Sequence[Option]], picks: Sequence[int]) -> Level:
    modules, units, slower = [], [], []
    for unit, time, group, pick in zip(workload.units, times, groups, picks):
        choice = unit.choices[pick - 1] if pick else None
        kept = choice.saved if choice else unit.saved
        more: dict[str, Any] = {"again": choice.parts, "launches": unit.launches + choice.launches} if choice else {}
        units.append(replace(unit, saved=kept, restored=unit.saved - kept, **more))
        slower.append(replace(time, backward=time.backward + group[pick][1]))
        modules += [f"{_home(unit)}.{region}" for region in choice.regions] if choice else []
    return Level(tuple(modules), replace(workload, units=tuple(units)), tuple(slower))


def _home(unit: Unit) -> str:
    """Name of a layer's module."""
    return f"layers.{unit.name.removeprefix('layer ')}"


def matching(units: Sequence[Unit], patterns: Sequence[str]) -> list[int] | None:
    """The choice of every unit that recomputes what ``patterns`` match; None where they match other modules than the regions."""
    picks: list[int] = []
    used: set[str] = set()
    for unit in units:
        again = set()
        for region in {region for choice in unit.choices for region in choice.regions}:
            path = f"{_home(unit)}.{region}".split(".")
            around = [".".join(path[:n]) for n in range(1, len(path))]
            if any(fnmatchcase(name, pattern) for name in around for pattern in patterns):
                return None
            here = {pattern for pattern in patterns if fnmatchcase(".".join(path), pattern)}
            used |= here
            again.update([region] if here else [])
        pick = next((i for i, choice in enumerate(unit.choices, 1) if set(choice.regions) == again), 0)
        if again and not pick:
            return None
        picks.append(pick)
    return picks if used == set(patterns) else None


def _options(unit: Unit, workload: Workload, cluster: Cluster, rank: Lengths, events: float) -> list[Option]:
    found = [(unit.saved.bytes(workload.batch, events), 0.0)]
    for choice in unit.choices:
        works = [(part, unit.work[part]) for part in choice.parts if part in unit.work]
        found.append((choice.saved.bytes(workload.batch, events), float(part_seconds(works, rank, workload, cluster).item())))
    return found
