"""A plan as tables for the terminal, as JSON, and as one line a rank."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.text import Text

from gem_parallel.plan.answer import Answer
from gem_parallel.plan.candidates import DENSE_ORDER, SPARSE_ORDER
from gem_parallel.plan.explain import Rejected, cuts_text, efficiency, local_seconds, sparse_text, tiers_text
from gem_parallel.plan.fixed import RECOMPUTE, decided, setting
from gem_parallel.plan.grid import Table, size_text
from gem_parallel.plan.search import TIE, Estimate, Space
from gem_parallel.plan.settings import not_counted, to_parallel
from gem_parallel.plan.simulate import Simulation

COLLECTIVES = {
    "expert": ("expert exchange",),
    "shard": ("parameter gather", "gradient reduce-scatter"),
    "replicate": ("gradient all-reduce",),
    "model": ("ids all-to-all", "embedding all-to-all"),
    "replica": ("table replicas",),
}
"""Which collectives run over which axis."""


def render(answer: Answer, simulation: Simulation, baselines: dict[str, Estimate]) -> RenderableType:
    """Tables: the axes on their tiers, the step's time, memory at its peak, efficiency against the baselines; then hints."""
    space, chosen, fastest = answer.space, answer.chosen, answer.fastest
    parts: list[RenderableType] = [_headline(space, chosen, simulation), _axes(space, chosen), _time(space, chosen), _memory(space, chosen)]
    parts.append(_efficiency(space, {"this plan": chosen, **baselines}))
    parts += [Text(hint) for hint in _hints(space, chosen, answer.captured)]
    gain = chosen.seconds / fastest.seconds - 1
    if gain > TIE:
        axes = ", ".join(f"{a} {d}" for a, d in (*fastest.dense.degrees().items(), *fastest.sparse.degrees().items()) if d > 1)
        order = f"{', '.join(fastest.dense.order)}; {', '.join(fastest.sparse.order)}"
        parts.append(
            Text(f"Another order of ranks would be {gain:.1%} faster ({axes}; from inside: {order}), which the mesh cannot lay out.")
        )
    return Group(*parts)


def _hints(space: Space, chosen: Estimate, captured: Estimate | None) -> list[str]:
    """What would take the largest avoidable loss away."""
    found = []
    late = chosen.breakdown["computation"] - local_seconds(space) / space.cluster.gpu.in_step
    if space.workload.dealt == 1 and late > 0.05 * chosen.seconds:
        how = space.workload.balancing or "if the data source can deal them"
        found.append(f"Imbalance costs {late * 1e3:,.1f} ms of the step: batches of equal work save most of it; {how}.")
    if captured is not None and captured.seconds < 0.95 * chosen.seconds:
        saved = (chosen.seconds - captured.seconds) * 1e3
        found.append(
            f"Launches cost {saved:,.1f} ms of the step: train.capture = true replays it with one launch, and it would take "
            f"{captured.seconds * 1e3:,.1f} ms ({captured.dense.strategy}, {sparse_text(captured.sparse)})."
        )
    return found


def _headline(space: Space, chosen: Estimate, simulation: Simulation) -> RenderableType:
    w, dense, sparse = space.workload, chosen.dense, chosen.sparse
    samples = w.batch * space.world / chosen.seconds
    lines = [
        f"{w.name} under {w.recipe} on {space.world:,} of {space.cluster.gpus:,} {space.cluster.gpu.name} ({space.cluster.name}), "
        f"{w.batch:,} samples a GPU",
        f"dense {w.parameters:,} parameters by {dense.strategy}"
        + ("" if dense.spread == 1 else ", layers freed after forward" if dense.reshard else ", layers kept gathered"),
        f"tables {size_text(sum(t.bytes for t in sparse.tables(w)))} by {sparse_text(sparse)}; cut {cuts_text(space, sparse)}",
        f"step {chosen.seconds * 1e3:,.1f} ms ({simulation.seconds * 1e3:,.1f} ms simulated over all ranks, whose slowest computes "
        f"{simulation.imbalance:.2f} x the mean), {samples:,.0f} samples/s",
        f"recomputed in backward: {_modules(space, chosen)}",
        f"memory {size_text(chosen.memory.bytes)} of {space.room / 1e9:.1f} GB at {chosen.memory.points[chosen.memory.peak][0]!r}",
    ]
    return Text("\n".join(lines) + "\n")


def _modules(space: Space, chosen: Estimate) -> str:
    """The recomputed regions with the number of layers, as in "attention in 5 layers"."""
    parts: dict[str, int] = {}
    for unit in space.levels[chosen.level].workload.units:
        for part in unit.again:
            parts[part] = parts.get(part, 0) + 1
    return ", ".join(f"{part} in {count} layers" for part, count in parts.items()) or "nothing"


def _axes(space: Space, chosen: Estimate) -> Table:
    table = Table("axis", "degree", "stride", "members", "collectives", "network ms", "exposed ms", title="Axes on tiers")
    for axis in (*DENSE_ORDER, *SPARSE_ORDER):
        owner: Any = chosen.dense if axis in DENSE_ORDER else chosen.sparse
        degree = getattr(owner, axis)
        stride = owner._strides[axis]
        rows: list[tuple[str, float, float]] = (
            [(what, *chosen.collectives[what]) for what in COLLECTIVES[axis] if what in chosen.collectives] if degree > 1 else []
        )
        near = f"{stride:,} rank{'s' * (stride > 1)}" if degree > 1 else "-"
        cells = [axis, f"{degree:,}", near, tiers_text(space, chosen, axis)]
        for what, network, exposed in rows:
            table.add_row(*cells, what, f"{network * 1e3:.2f}", f"{exposed * 1e3:.2f}")
            cells = [""] * len(cells)
        if not rows:
            table.add_row(*cells, "", "", "")
    return table


def _time(space: Space, chosen: Estimate) -> Table:
    table = Table("part", "ms", "share", title="Time of a step (slowest rank)")
    parts = {what + (" exposed" if what in chosen.collectives else ""): seconds for what, seconds in chosen.breakdown.items()}
    mean = local_seconds(space) / space.cluster.gpu.in_step
    parts["imbalance"] = max(0.0, parts["computation"] - mean)
    parts["computation"] -= parts["imbalance"]
    for what, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        table.add_row(what, f"{seconds * 1e3:.2f}", f"{seconds / chosen.seconds:.1%}")
    table.caption = "computation: of a mean batch; imbalance: what the slowest rank's batch adds"
    return table


def _memory(space: Space, chosen: Estimate) -> Table:
    peak = chosen.memory.at_peak
    table = Table("memory", "at the peak", "share of the GPU", title="Memory of the fullest rank")
    for what, size in sorted(((w, s) for w, s in peak.items() if s), key=lambda item: -item[1]):
        table.add_row(what, size_text(size), f"{size / space.room:.1%}")
    return table


def _efficiency(space: Space, plans: dict[str, Estimate]) -> Table:
    table = Table("", "step ms", "samples/s", "MFU", "scaling ratio", "memory", "what is exposed most", title="Efficiency")
    for name, estimate in plans.items():
        eff = efficiency(space, estimate.seconds)
        exposed = sorted(((b, what) for what, (_, b) in estimate.collectives.items() if b > 1e-3 * estimate.seconds), reverse=True)
        table.add_row(
            name, f"{estimate.seconds * 1e3:,.1f}", f"{space.workload.batch * space.world / estimate.seconds:,.0f}", f"{eff.step:.1%}",
            f"{eff.scaling:.1%}", size_text(estimate.memory.bytes) + (" (does not fit)" if estimate.memory.bytes > space.room else ""),
            ", ".join(f"{what} {b * 1e3:.1f} ms" for b, what in exposed[:2]),
        )  # fmt: skip
    table.caption = f"local MFU {efficiency(space, local_seconds(space)).local:.1%}; scaling ratio: MFU of the step over it"
    return table


def explain_table(rejected: Sequence[Rejected]) -> Table:
    table = Table("neighbour", "step ms", "memory", "why it lost", title="Neighbours of the plan")
    for one in rejected:
        table.add_row(one.changed, f"{one.estimate.seconds * 1e3:,.2f}", size_text(one.estimate.memory.bytes), one.why)
    return table


def kept(space: Space, chosen: Estimate, free: Estimate, name: str) -> str:
    """What the configuration sets and the plan keeps, and what the step would be if all of it were planned (``free``)."""
    section = to_parallel(chosen.dense, chosen.sparse, space.workload, space.fixed.section, fixed=space.fixed)
    used = space.fixed.used(section["dense"], section["sparse"])
    lines = []
    if used:
        gain = 1 - free.seconds / chosen.seconds
        worth = (
            f"Planned anew (--free KEY), a step would take {free.seconds * 1e3:,.1f} ms, {gain:.1%} less: {free.dense.strategy}, "
            f"{sparse_text(free.sparse)}."
            if gain > TIE
            else f"No other choice would be more than {TIE:.0%} faster."
        )
        lines.append(f"Set by {name} and kept: {used.text()}. {worth}")
    idle = [setting(key, value) for key, value in space.fixed.values.items() if key not in used.values]
    if idle:
        lines.append(f"Set by {name} for strategies that this plan does not use: {', '.join(idle)}.")
    return "\n".join(lines)


def freed_table(space: Space, chosen: Estimate, free: Mapping[str, Estimate]) -> Table:
    """What each setting costs: the step if that one alone were planned."""
    table = Table("set", "step ms if planned", "gain", "then", title="What settings cost")
    for key, one in free.items():
        then = f"{one.dense.strategy}, {sparse_text(one.sparse)}, " + ", ".join(
            f"{axis} {degree}" for axis, degree in (*one.dense.degrees().items(), *one.sparse.degrees().items()) if degree > 1
        )
        gain = 1 - one.seconds / chosen.seconds
        table.add_row(
            setting(key, space.fixed.values[key]),
            f"{one.seconds * 1e3:,.2f}",
            f"{gain:.1%}" if gain > TIE else f"less than {TIE:.0%}",
            then,
        )
    return table


def prediction(space: Space, chosen: Estimate, simulation: Simulation, baselines: dict[str, Estimate]) -> dict[str, Any]:
    """The ``[plan]`` section: numbers only, in s, bytes and shares."""
    eff = efficiency(space, chosen.seconds)
    return {
        "cluster": space.cluster.name,
        "gpu": space.cluster.gpu.name,
        "world": space.world,
        "step_s": chosen.seconds,
        "simulated_step_s": simulation.seconds,
        "samples_per_s": space.workload.batch * space.world / chosen.seconds,
        "flops": space.workload.flops(),
        "local_mfu": eff.local,
        "mfu": eff.step,
        "scaling_ratio": eff.scaling,
        "breakdown_s": chosen.breakdown,
        "collectives": {what: {"network_s": a, "exposed_s": b} for what, (a, b) in chosen.collectives.items()},
        "memory_bytes": {**chosen.memory.at_peak, "total": chosen.memory.bytes, "at": chosen.memory.points[chosen.memory.peak][0]},
        "ranks": {
            "compute_s": _spread(simulation.compute),
            "waiting_s": _spread(simulation.waiting),
            "table_bytes": _spread(simulation.table_bytes),
            "memory_bytes": _spread(simulation.memory),
        },
        "recomputed": list(chosen.recomputed),
        "placement": {axis: tiers_text(space, chosen, axis) for axis in (*DENSE_ORDER, *SPARSE_ORDER)},
        "baselines": {
            name: {
                "step_s": e.seconds,
                "scaling_ratio": efficiency(space, e.seconds).scaling,
                "memory_bytes": e.memory.bytes,
                "fits": e.memory.bytes <= space.room,
                "breakdown_s": e.breakdown,
            }
            for name, e in baselines.items()
        },
    }


def _spread(values: Any) -> dict[str, float]:
    return {
        "min": float(np.min(values)),
        "mean": float(np.mean(values)),
        "p99": float(np.quantile(values, 0.99)),
        "max": float(np.max(values)),
    }


def configuration(
    plain: dict[str, Any], space: Space, chosen: Estimate, predicted: dict[str, Any], *, searched: bool = True
) -> dict[str, Any]:
    """The user's configuration with the planned ``[parallel]`` section and the prediction beside it: what ``gemrec train`` takes.

    What a search decides stands beside what the file sets, recomputation included; ``plan.decided`` names it, so that a later search may
    decide it anew. Without a search (``searched``) the file's own stays.
    """
    section = _section(plain, space, chosen, searched)
    train = plain.get("train", {})
    callbacks = dict(train.get("callbacks", {}))
    if searched and chosen.recomputed and not space.fixed.recomputed:
        callbacks["recompute"] = {"modules": list(chosen.recomputed)}
    elif searched and not space.fixed.recomputed:
        callbacks.pop("recompute", None)
    if searched:
        ours = decided(section) | ({RECOMPUTE: list(chosen.recomputed)} if chosen.recomputed else {})
        predicted = {**predicted, "decided": {key: value for key, value in ours.items() if key not in space.fixed.values}}
    return {**plain, "train": {**train, "callbacks": callbacks}, "parallel": section, "plan": predicted}


def _section(plain: dict[str, Any], space: Space, chosen: Estimate, searched: bool) -> dict[str, Any]:
    asked = plain.get("parallel", {})
    return to_parallel(chosen.dense, chosen.sparse, space.workload, asked, fixed=space.fixed if searched else None)


def left_out(plain: dict[str, Any], space: Space, chosen: Estimate, *, searched: bool = True) -> str:
    """What the run obeys and the prediction does not count, in a sentence; empty where there is nothing."""
    keys = not_counted(_section(plain, space, chosen, searched))
    if not searched and not chosen.recomputed and "recompute" in plain.get("train", {}).get("callbacks", {}):
        keys.append("train.callbacks.recompute")
    name = plain["data"]["source"]
    if plain["data"].get(name, {}).get("batching", {}).get("kind", "fixed") != "fixed":
        keys.append(f"data.{name}.batching")
    return f"Kept as configured, not counted in time or memory: {', '.join(keys)}." if keys else ""


def write_ranks(path: Path, space: Space, chosen: Estimate, simulation: Simulation) -> None:
    """One line a rank: where it is, its coordinates, what it computes, how long it waits, what it holds."""
    tiers = [f"{tier.name} domain" for tier in space.cluster.tiers]
    axes = (*DENSE_ORDER, *SPARSE_ORDER)
    with path.open("w", newline="", encoding="utf-8") as file:
        write = csv.writer(file)
        write.writerow(["rank", *tiers, *axes, "events", "compute_s", "waiting_s", "table_bytes", "memory_bytes"])
        for rank in range(space.world):
            domains = [rank // size for size in space.cluster.domains]
            places = []
            for axis in axes:
                owner: Any = chosen.dense if axis in DENSE_ORDER else chosen.sparse
                places.append(rank // owner._strides[axis] % getattr(owner, axis))
            numbers = (simulation.compute, simulation.waiting, simulation.table_bytes, simulation.memory)
            write.writerow([rank, *domains, *places, int(simulation.events[rank]), *(f"{float(values[rank]):.6g}" for values in numbers)])


def show(*parts: RenderableType) -> None:
    # a pipe or a file has no width, and 80 columns cut the names of collectives
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
    console = Console(soft_wrap=False, width=width, markup=False, emoji=False)  # names and paths are told as they are
    for part in parts:
        console.print(part)
