"""Why the neighbours of a plan lost, and what the plan is worth against what one would do without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gem_parallel.plan.candidates import COPY_ENGINE, DENSE_ORDER, SPARSE_ORDER, Dense, Sharding, Sparse, table_classes
from gem_parallel.plan.grid import size_text
from gem_parallel.plan.program import compute_times
from gem_parallel.plan.search import TIE, Estimate, Space, simplicity


@dataclass(frozen=True)
class Rejected:
    """A neighbour: what is ``changed``, its ``seconds`` (None: not in the space) and ``why`` it lost."""

    changed: str
    estimate: Estimate
    why: str


def neighbours(space: Space, best: Estimate) -> list[Rejected]:
    """Every candidate one step away from ``best``, fastest first."""
    found = []
    for changed, dense, sparse in _steps(space, best.dense, best.sparse):
        other = space.estimate(dense, sparse, space.level_of(dense, sparse))
        found.append(Rejected(changed, other, _why(space, best, other)))
    return sorted(found, key=lambda r: (r.estimate.memory.bytes > space.room, r.estimate.seconds))


def _steps(space: Space, dense: Dense, sparse: Sparse) -> Iterator[tuple[str, Dense, Sparse]]:
    known_dense, known_sparse = set(space.dense), set(space.sparse)
    for source in DENSE_ORDER:
        for target in DENSE_ORDER:
            if source == target or getattr(dense, source) % 2:
                continue
            other = replace(dense, **{source: getattr(dense, source) // 2, target: getattr(dense, target) * 2})
            ways = [(reshard, by) for by in (dense.collective, COPY_ENGINE) for reshard in (dense.reshard, True)]
            variants = (replace(other, reshard=reshard, collective=by) for reshard, by in ways)
            known = next((one for one in variants if one in known_dense), None)
            if known is not None:
                other = known
                yield f"{target} {getattr(other, target)}, {source} {getattr(other, source)}", other, sparse
    if (other := replace(dense, reshard=not dense.reshard)) in known_dense:
        yield f"layers {'freed after forward' if other.reshard else 'kept gathered'}", other, sparse
    for one in space.dense:
        if one.degrees() == dense.degrees() and one.reshard == dense.reshard and one.order != dense.order:
            yield f"dense axes from inside: {', '.join(a for a in one.order if getattr(one, a) > 1)}", one, sparse
    for source, target in (("model", "replica"), ("replica", "model")):
        if getattr(sparse, source) % 2 == 0:
            moved = replace(sparse, **{source: getattr(sparse, source) // 2, target: getattr(sparse, target) * 2})
            if moved in known_sparse:
                yield f"{target} {getattr(moved, target)}, {source} {getattr(moved, source)}", dense, moved
    for other_sparse in space.sparse:
        same = (other_sparse.model, other_sparse.replica) == (sparse.model, sparse.replica)
        way = (other_sparse.strategy, other_sparse.exchange, other_sparse.schedule)
        if same and way == (sparse.strategy, sparse.exchange, sparse.schedule):
            if other_sparse.order != sparse.order and other_sparse.cuts == sparse.cuts:
                yield f"table axes from inside: {', '.join(other_sparse.order)}", dense, other_sparse
            elif other_sparse.order == sparse.order and sum(a != b for a, b in zip(other_sparse.cuts, sparse.cuts)) == 1:
                yield f"tables cut {cuts_text(space, other_sparse)}", dense, other_sparse
        elif same and other_sparse.order == sparse.order and other_sparse.cuts == sparse.cuts:
            yield f"tables by {sparse_text(other_sparse)}", dense, other_sparse


def _why(space: Space, best: Estimate, other: Estimate) -> str:
    over = other.memory.bytes - space.room
    if over > 0:
        ours, theirs = best.memory.at_peak, other.memory.at_peak
        top = max(theirs, key=lambda what: theirs[what] - ours.get(what, 0.0))
        return f"does not fit: {size_text(over)} too much; {top} {size_text(theirs[top])} instead of {size_text(ours.get(top, 0.0))}"
    slower = other.seconds - best.seconds
    note = "" if other.dense.runnable and other.sparse.runnable else "; the mesh cannot lay ranks out so"
    if slower < -1e-4 * best.seconds:
        tie = "" if slower < -TIE * best.seconds else f", less than {TIE:.0%}"
        simple = ", and less simple" if tie and not note and _plain(other) > _plain(best) else ""
        return f"{-slower * 1e3:,.2f} ms faster{tie}{simple}{note}"
    if slower <= 1e-4 * best.seconds:
        return ("as fast" if note or _plain(other) < _plain(best) else "as fast, and no simpler") + note
    names = dict.fromkeys((*best.breakdown, *other.breakdown))
    changes = {name: other.breakdown.get(name, 0.0) - best.breakdown.get(name, 0.0) for name in names}
    worse = sorted(((d, name) for name, d in changes.items() if d > 0.05 * slower), reverse=True)[:2]
    parts = ", ".join(f"{name} +{d * 1e3:,.2f} ms" for d, name in worse)
    return f"{slower * 1e3:,.2f} ms slower: {parts}{note}"


def _plain(one: Estimate) -> tuple[int, int, bool]:
    return simplicity(one.dense, one.sparse, one.level)


def baselines(space: Space, best: Estimate) -> dict[str, Estimate]:
    """What the plan is compared with, whether or not it fits: tables over all ranks (1D), plain FSDP over all ranks, both. Captured steps
    have no FSDP."""
    if space.world == 1:
        return {}
    flat = Dense(1, space.world, 1)
    one_d = [s for s in space.sparse if s.strategy == "torchrec"] or [
        Sparse("torchrec", space.world, 1, cuts=cuts) for cuts in _uniform(space)
    ]
    alone = min(one_d, key=lambda s: space.bound(None, s)[0])
    pairs = {"1D tables": (best.dense, alone)}
    if not space.workload.captured:
        pairs |= {"plain FSDP": (flat, best.sparse), "1D tables, plain FSDP": (flat, alone)}
    return {name: space.estimate(d, s, space.level_of(d, s)) for name, (d, s) in pairs.items()}


def _uniform(space: Space) -> Iterator[tuple[Sharding, ...]]:
    kinds: tuple[Sharding, ...] = ("row", "table", "column")
    return ((kind,) * len(table_classes(space.workload.tables)) for kind in kinds)


def local_seconds(space: Space) -> float:
    """Computation of a mean batch with nothing beside it: what local MFU is measured on."""
    pool = {name: values[None] for name, values in space.workload.lengths.items()}
    times = compute_times(space.workload, space.cluster, pool)
    total = sum(float((t.forward + t.backward + t.experts_forward + t.experts_backward).item()) for t in times)
    return total * space.cluster.gpu.in_step * space.workload.batch / next(iter(pool.values())).size


@dataclass(frozen=True)
class Efficiency:
    """Local MFU (parts alone on one GPU), MFU of the step, and their ratio."""

    local: float
    step: float

    @property
    def scaling(self) -> float:
        return self.step / self.local


def efficiency(space: Space, seconds: float) -> Efficiency:
    """Against the bf16 peak (fp32 under the recipe "fp32"), whatever the recipe gains on it."""
    peak = space.cluster.flops("fp32" if space.workload.recipe == "fp32" else "bf16")
    flops = space.workload.flops()
    return Efficiency(flops / (local_seconds(space) * peak), flops / (seconds * peak))


def sparse_text(sparse: Sparse) -> str:
    if sparse.strategy == "torchrec-2d":
        return "torchrec-2d, " + ("fully sharded" if sparse.exchange == "whole" else "averaged every step")
    if sparse.strategy == "gem-2d":
        return f"gem-2d, {sparse.exchange}" + (f", {sparse.schedule}'s schedule" if sparse.exchange == "whole" else "")
    return sparse.strategy


def cuts_text(space: Space, sparse: Sparse) -> str:
    """Which classes of tables are cut how, biggest traffic first."""
    if not sparse.cuts or sparse.model == 1:
        return "whole"
    if len(set(sparse.cuts)) == 1:
        return f"by {sparse.cuts[0]}"
    groups = table_classes(space.workload.tables)
    return ", ".join(f"{len(group.names)} by {cut}" for group, cut in zip(groups, sparse.cuts))


def tiers_text(space: Space, estimate: Estimate, axis: str) -> str:
    """How many members of a group are in one domain of each tier, as in "8 in NVLink, 16 in zone"."""
    owner: Dense | Sparse = estimate.dense if axis in DENSE_ORDER else estimate.sparse
    assert axis in DENSE_ORDER or axis in SPARSE_ORDER
    group = owner.group(space.cluster, axis)
    if group.size == 1:
        return "-"
    parts, before = [], 1.0
    for tier, members in zip(space.cluster.tiers, group.within[1:]):
        if members > before:
            parts.append(f"{members:.3g} in {tier.name}" if members < group.size else f"{group.size} in {tier.name}")
        before = members
    return ", ".join(parts)
