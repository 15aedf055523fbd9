"""Costs of collectives and the step simulator against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from plan_cases import cluster

from gem_parallel.plan.engine import Op, run
from gem_parallel.plan.network import Cost, Group, cost, place

TIERS = cluster((8, 400, 1, 1), (4, 50, 5, 1), (8, 50, 20, 4))
DOMAINS = TIERS.domains


def price(seconds: float, tier: int = 0) -> Cost:
    return Cost(0.0, tuple(seconds if k == tier else 0.0 for k in range(3)))


def collective(name: str, seconds: float, *, stream: str = "a", after: tuple[int, ...] = (), tier: int = 0) -> Op:
    return Op(name, "x", stream, after, cost=price(seconds, tier))


def compute(name: str, seconds: object, after: tuple[int, ...] = ()) -> Op:
    return Op(name, "computation", "compute", after, seconds)


@pytest.mark.parametrize(
    ("axes", "within"),
    [
        (((8, 1),), (1, 8, 8, 8)),
        (((2, 1),), (1, 2, 2, 2)),
        (((32, 8),), (1, 1, 4, 32)),
        (((8, 32),), (1, 1, 1, 8)),
        (((16, 2),), (1, 4, 16, 16)),
        (((2, 1), (8, 32)), (1, 2, 2, 16)),
        # 6 consecutive ranks straddle two hosts of 8 in some groups: 3 in each at worst
        (((6, 1),), (1, 3, 3, 3)),
    ],
)
def test_members_of_a_group_in_each_tier(axes: tuple[tuple[int, int], ...], within: tuple[float, ...]) -> None:
    world = 252 if axes[0][0] == 6 else 256
    group = place(axes, world, DOMAINS)
    assert group.size == np.prod([degree for degree, _ in axes])
    if axes[0][0] == 6:
        assert group.within[1] == 3
    else:
        assert group.within == within


def test_all_gather_and_reduce_scatter_in_one_host() -> None:
    group = place(((8, 1),), 256, DOMAINS)
    for kind in ("all-gather", "reduce-scatter"):
        got = cost(kind, 8e9, group, TIERS.network)
        assert got.seconds == pytest.approx(20e-6 + 7 * 1e-6 + 8e9 * 7 / 8 / 400e9)
    twice = cost("all-reduce", 8e9, group, TIERS.network)
    assert twice.seconds == pytest.approx(20e-6 + 14 * 1e-6 + 2 * 8e9 * 7 / 8 / 400e9)


@pytest.mark.parametrize(("hosts", "mates"), [(1, 8), (2, 4), (4, 8), (3, 1)])
def test_the_hierarchical_gather_moves_what_the_planner_counts(hosts: int, mates: int) -> None:
    """`HierarchicalGather`: between hosts every rank gets the parts of its place, inside a host it copies the parts of the other places."""
    part, world = 1e6, 8 * hosts
    group = place(((mates, 1), (hosts, 8)), world, DOMAINS)
    whole = part * hosts * mates
    moved = [(mates - 1) * hosts * part, (hosts - 1) * part, 0.0]
    got = cost("all-gather", whole, group, TIERS.network)
    assert got.loads == pytest.approx([amount / rate for amount, rate in zip(moved, TIERS.network.rates)])


def test_all_gather_over_hosts_brings_each_byte_into_a_host_once() -> None:
    group = place(((32, 1),), 256, DOMAINS)
    got = cost("all-gather", 32e9, group, TIERS.network)
    into_a_gpu = 32e9 * (1 - 8 / 32) / 8
    assert got.loads[1] == pytest.approx(into_a_gpu / 50e9)
    assert got.loads[0] == pytest.approx((32e9 * 31 / 32 - into_a_gpu) / 400e9)
    assert got.loads[2] == 0
    # 28 hops inside hosts, 3 between them
    assert got.latency == pytest.approx(20e-6 + 28e-6 + 3 * 5e-6)


def test_all_to_all_crosses_for_every_member() -> None:
    group = place(((32, 8),), 256, DOMAINS)
    got = cost("all-to-all", 32e6, group, TIERS.network)
    assert got.loads == pytest.approx((0.0, 32e6 * 31 / 32 / 50e9, 32e6 * 28 / 32 / (50e9 / 4)))
    assert got.latency == pytest.approx(20e-6 + 20e-6 + 31 * 0.5e-6)


def test_group_of_one_is_free() -> None:
    assert cost("all-reduce", 1e12, Group(1, (1.0,) * 4), TIERS.network).seconds == 0


@pytest.mark.parametrize(("layers", "c", "g"), [(5, 2.0, 1.0), (5, 1.0, 3.0), (1, 1.0, 1.0), (7, 1.0, 1.0)])
def test_prefetched_gathers_hide_behind_computation(layers: int, c: float, g: float) -> None:
    """Gather of the next layer while this one computes: g + n c if computation is longer, n g + c if the network is."""
    ops: list[Op] = [collective("g0", g)]
    following, computed = 0, None
    for i in range(layers):
        gathered = following
        if i + 1 < layers:
            ops.append(collective(f"g{i + 1}", g, after=() if computed is None else (computed,)))
            following = len(ops) - 1
        ops.append(compute(f"c{i}", c, (gathered,)))
        computed = len(ops) - 1
    assert run(ops).step == pytest.approx(g + layers * c if g <= c else layers * g + c)


@pytest.mark.parametrize(
    ("first", "second", "late", "ends"),
    [
        (1.0, 1.0, 0.0, (2.0, 2.0)),
        (1.0, 3.0, 0.0, (2.0, 4.0)),
        (2.0, 1.0, 1.0, (3.0, 3.0)),
        (1.0, 1.0, 5.0, (1.0, 6.0)),
    ],
)
def test_collectives_share_a_link(first: float, second: float, late: float, ends: tuple[float, float]) -> None:
    ops = [compute("wait", late), collective("a", first, stream="a"), collective("b", second, stream="b", after=(0,))]
    trace = run(ops)
    assert (trace.end[1], trace.end[2]) == pytest.approx(ends)


def test_three_equal_collectives_take_three_times_as_long() -> None:
    trace = run([collective(s, 2.0, stream=s) for s in "abc"])
    assert trace.end == pytest.approx([6.0] * 3)


def test_collectives_on_different_tiers_do_not_meet() -> None:
    trace = run([collective("a", 2.0, stream="a", tier=0), collective("b", 3.0, stream="b", tier=1)])
    assert trace.end == pytest.approx([2.0, 3.0])


@pytest.mark.parametrize(("comm", "expected"), [(10.0, 1.25), (0.5, 1 + 0.5 * 0.2), (0.0, 1.0)])
def test_computation_beside_a_collective_slows_down(comm: float, expected: float) -> None:
    """Slow-down 1.25: all of it under a long collective, a fifth of the overlap under a short one."""
    for ops in ([collective("a", comm), compute("c", 1.0)], [compute("c", 1.0), collective("a", comm)]):
        trace = run(ops, slowdown=1.25)
        at = next(i for i, op in enumerate(ops) if op.cost is None)
        assert trace.end[at] == pytest.approx(expected)


@pytest.mark.parametrize("late", [False, True])
def test_computation_beside_copies_keeps_its_speed(late: bool) -> None:
    copies = Op("copies", "x", "a", cost=price(10.0), axes=((4, 1),), quiet=True)
    ops = [compute("c", 1.0), copies] if late else [copies, compute("c", 1.0)]
    trace = run(ops, slowdown=1.25)
    assert trace.end[0 if late else 1] == pytest.approx(1.0)


def test_every_rank_waits_for_the_slowest_of_its_group() -> None:
    world = 24
    work = np.random.default_rng(0).uniform(1, 2, world)
    for axes in (((4, 1),), ((3, 8),), ((2, 1), (3, 8)), ((24, 1),)):
        ops = [compute("c", work), Op("all", "x", "a", (0,), cost=price(0.5), axes=axes), compute("d", work, (1,))]
        trace = run(ops, world=world)
        rank = np.arange(world)
        name = rank.copy()
        for degree, stride in axes:
            name -= rank // stride % degree * stride
        slowest = np.array([work[name == n].max() for n in name])
        np.testing.assert_allclose(trace.end[2], slowest + 0.5 + work)


def test_arrays_of_equal_ranks_give_what_one_rank_gives() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        ops: list[Op] = []
        for i in range(30):
            after = tuple(int(j) for j in rng.choice(i, min(i, 2), replace=False)) if i else ()
            seconds = float(rng.uniform(0.1, 1))
            tier = int(rng.integers(3))
            ops.append(
                compute(f"{i}", seconds, after)
                if rng.random() < 0.5
                else Op(f"{i}", "x", str(rng.choice(["a", "b"])), after, cost=price(seconds, tier), axes=((4, 1),))
            )
        one = run(ops, slowdown=1.2)
        many = run(
            [Op(o.name, o.what, o.stream, o.after, np.full(4, o.seconds) if o.cost is None else 0.0, o.cost, o.axes) for o in ops],
            slowdown=1.2, world=4,
        )  # fmt: skip
        for a, b in zip(one.end, many.end):
            np.testing.assert_allclose(b, a, rtol=1e-12)
