"""Balanced batches: the published effect in a simulation, nothing lost, bounded reordering, exact resume."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.config.features import EventField, Features, Label, Sequence, Sparse
from gem_core.errors import ConfigError
from gem_core.sources.laws import LognormalLaw
from gem_core.testing.sources import ids_of, source_checks
from gem_data import ParquetSource
from gem_data.balance import Balanced, Bucketed, Cost, Fixed, TokenPlan, Tokens, imbalance, karmarkar_karp, token_batches
from gem_data.spec import SPEC, ParquetConfig

RANKS, BATCH, WINDOW = 64, 1024, 8


@pytest.mark.parametrize(
    ("cost", "plain", "balanced"),
    [(Cost(), (1.07, 1.11), 1.04), (Cost(linear=0, quadratic=1), (1.19, 1.28), 1.10)],
    ids=["linear", "quadratic"],
)
def test_simulation_of_64_ranks(cost, plain, balanced):
    """Log-normal lengths (sigma 1, mean 500, cut at 4096), 8 base batches of 128 a batch, 8 batches balanced together."""
    law = LognormalLaw(mean=500, sigma=1.0, zero=0.0, max=4096)
    before, after = [], []
    for seed in range(6):
        lengths = law.draw(RANKS * BATCH * WINDOW, seed).reshape(RANKS, -1)
        costs = cost.of(lengths)
        order = np.stack([Balanced(cost=cost).arrange(row, [BATCH] * WINDOW) for row in lengths])
        arranged = np.take_along_axis(costs, order, 1)
        assert (np.sort(order, 1) == np.arange(BATCH * WINDOW)).all()
        before.append(imbalance(costs.reshape(RANKS, WINDOW, BATCH).sum(2)))
        after.append(imbalance(arranged.reshape(RANKS, WINDOW, BATCH).sum(2)))
    assert plain[0] <= np.mean(before) <= plain[1]
    assert np.mean(after) <= balanced


def test_global_rebalancing_is_nearly_perfect():
    """The baseline with communication: Karmarkar-Karp over the joint batch of 64 ranks, quadratic work."""
    costs = Cost(linear=0, quadratic=1).of(LognormalLaw(mean=500, sigma=1.0, zero=0.0, max=4096).draw(RANKS * 128, 0))
    groups = karmarkar_karp(costs, RANKS)
    assert sorted(i for g in groups for i in g.tolist()) == list(range(costs.size))
    assert {g.size for g in groups} == {128}
    assert imbalance(np.array([[costs[g].sum()] for g in groups]))[0] < 1.0001


@given(st.lists(st.integers(0, 50), min_size=4, max_size=8).filter(lambda c: len(c) % 2 == 0))
@settings(deadline=None, max_examples=100)
def test_karmarkar_karp_against_brute_force(costs):
    """Two parts of equal size: never worse than twice the best possible spread plus the largest gap it may leave."""
    array = np.array(costs, dtype=float)
    groups = karmarkar_karp(array, 2)
    spread = abs(array[groups[0]].sum() - array[groups[1]].sum())
    n, total = len(costs), sum(costs)
    best = min(abs(total - 2 * sum(costs[i] for i in half)) for half in itertools.combinations(range(n), n // 2))
    assert best <= spread <= best + max(costs)


def test_karmarkar_karp_needs_equal_parts():
    with pytest.raises(ValueError, match="7 samples"):
        karmarkar_karp(np.ones(7), 2)


@given(st.lists(st.integers(0, 500), max_size=70), st.integers(1, 5), st.sampled_from([1, 2, 4]), st.data())
@settings(deadline=None, max_examples=150)
def test_arranging_keeps_every_sample_and_every_size(lengths, steps, base, data):
    sizes = [base * data.draw(st.integers(1, 4)) for _ in range(steps)]
    while sum(sizes) > len(lengths) and sizes:
        sizes[-1] -= 1
        if not sizes[-1]:
            sizes.pop()
    array = np.array(lengths[: sum(sizes)], dtype=np.int64)
    for batching in (Balanced(base=base), Bucketed(), Fixed()):
        order = batching.arrange(array, sizes)
        assert sorted(order.tolist()) == list(range(array.size))


def test_cost():
    lengths = np.array([0, 2, 10])
    assert Cost().of(lengths).tolist() == [0, 2, 10]
    assert Cost(linear=3, quadratic=0.5).of(lengths).tolist() == [0, 8, 80]
    assert Cost(linear=0, quadratic=1, window=4).of(lengths).tolist() == [0, 4, 40]


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 60), st.none() | st.integers(1, 5))
def test_token_batches(costs, budget, most):
    borders = token_batches(np.array(costs, dtype=float), budget, most)
    assert borders[0] == 0
    assert borders[-1] == len(costs)
    for a, b in itertools.pairwise(borders.tolist()):
        assert b > a
        assert sum(costs[a:b]) <= budget or b - a == 1
        assert most is None or b - a <= most
        if b < len(costs):
            assert sum(costs[a : b + 1]) > budget or (most is not None and b - a == most), "a batch was cut too early"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 7), st.integers(5, 60))
@settings(deadline=None, max_examples=150)
def test_token_plans(costs, world, budget):
    """Every sample once, equal steps, budget held, no batch empty while the rank still has two samples to deal."""
    plan = TokenPlan(((0, len(costs)),), world, 1, False, np.array(costs, dtype=float), Tokens(budget=budget))
    seen = []
    for rank in range(world):
        for step in range(plan.steps):
            rows = [i for a, b in plan.read(rank, step) for i in range(a, b)]
            assert sum(costs[i] for i in rows) <= budget or len(rows) == 1
            seen += rows
    assert sorted(seen) == list(range(len(costs)))


# --- in the source --------------------------------------------------------------------------------------------------------------------

FEATURES = Features(
    sample_id="id",
    sparse={"x": Sparse(rows=100, policy="quarantine")},
    sequences={"s": Sequence(fields={"h": EventField(rows=100)}, max_length=40, drop_first=1)},
    labels={"y": Label()},
)
KINDS = {
    "bbs": {"kind": "bbs", "base": 1, "window": 3, "cost": {"quadratic": 0.5}},
    "bucket": {"kind": "bucket", "window": 4},
    "tokens": {"kind": "tokens", "budget": 120.0},
    "global": {"kind": "global"},
}
UNFIT = {
    "bbs": {"batch_size_does_not_change_the_stream"},
    "bucket": {"batch_size_does_not_change_the_stream"},
    "tokens": {"batch_size_does_not_change_the_stream", "drop_last_gives_full_batches_only", "batches_are_valid"},
    "global": {"batch_size_does_not_change_the_stream"},
}
"""Checks that say nothing here: the point of these kinds is that the batch decides the order, or the budget the batch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("log")
    rng = np.random.default_rng(0)
    for split, start, n in (("train", 0, 130), ("eval", 1000, 40), ("test", 2000, 30)):
        lengths = np.minimum(rng.lognormal(2.5, 1.0, n).astype(int), 60)
        table = {
            "id": np.arange(start, start + n),
            "x": rng.integers(0, 100, n),
            "h": [rng.integers(0, 100, k).tolist() for k in lengths],
            "y": rng.integers(0, 2, n),
        }
        pq.write_table(pa.table(table), base / f"{split}.parquet", row_group_size=23)
    return base


def build(folder, kind, **how):
    config = ParquetConfig(
        root=str(folder), train="train.parquet", eval="eval.parquet", test="test.parquet", window=40, prefetch=0, batching=KINDS[kind],
        quarantine=str(folder / "bad"),
    )  # fmt: skip
    return SPEC.build(config, FEATURES, **{"split": "train", "batch_size": 8, **how})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", source_checks(FEATURES), ids=lambda c: c.__name__)
def test_conformance(check, kind, folder):
    if check.__name__ in UNFIT[kind]:
        return
    check(lambda **how: build(folder, kind, **how))


def test_balanced_batches_are_full_and_even(folder):
    lengths = []
    for kind in (None, "bbs"):
        source = build(folder, "bbs") if kind else ParquetSource(folder / "train.parquet", FEATURES, batch_size=8, shuffle=True, window=40,
                                                                 quarantine=str(folder / "bad"))  # fmt: skip
        sizes, tokens = zip(*((len(b), b.tokens) for b in source))
        assert sizes[:-1] == (8,) * 16
        lengths.append(np.array(tokens[:15]).reshape(5, 3))
    assert lengths[1].std(1).mean() < 0.5 * lengths[0].std(1).mean()


def test_bounded_reordering(folder):
    """Without shuffle, a sample comes at most window batches from its place."""
    source = ParquetSource(
        folder / "train.parquet", FEATURES, batch_size=8, batching=Balanced(base=2, window=3), quarantine=str(folder / "b")
    )
    for at, sample in enumerate(ids_of(source)):
        assert at // 24 == sample // 24


def test_bucketed_batches_hold_lengths_alike(folder):
    spread = []
    for batching in (Fixed(), Bucketed(window=16)):
        source = ParquetSource(folder / "train.parquet", FEATURES, batch_size=8, batching=batching, quarantine=str(folder / "b"))
        spread.append(np.mean([b.sequences["s"].lengths.float().std().item() for b in source if len(b) == 8]))
    assert spread[1] < 0.4 * spread[0]


def test_token_budget_holds(folder):
    batches = list(build(folder, "tokens"))
    assert all(b.tokens <= 120 or len(b) == 1 for b in batches)
    assert np.mean([b.tokens for b in batches]) > 80
    parts = [[b.tokens for b in build(folder, "tokens", shard=(r, 2))] for r in range(2)]
    assert len(parts[0]) == len(parts[1])


def test_samples_without_events_fill_a_token_budget(tmp_path):
    """As new users: they are work too, for every rank."""
    table = pa.table({"id": range(60), "x": [1] * 60, "e": pa.array([[]] * 60, pa.list_(pa.int64())), "y": [0] * 60})
    pq.write_table(table, tmp_path / "new.parquet")
    features = Features(
        sample_id="id",
        sparse={"x": Sparse(rows=4)},
        sequences={"s": Sequence(fields={"e": EventField(rows=4)})},
        labels={"y": Label()},
    )
    how = {"batch_size": 1, "batching": Tokens(budget=10)}
    parts = [[len(b) for b in ParquetSource(tmp_path / "new.parquet", features, rank=r, world_size=2, **how)] for r in range(2)]
    assert parts == [[10, 10, 10]] * 2


def test_global_rebalancing_deals_each_step_evenly(folder):
    """Four ranks of eight samples: the same samples a step as without, far more even."""
    spread = []
    for kind in ("global", None):
        how = {"batching": {"kind": kind}} if kind else {}
        config = ParquetConfig(root=str(folder), train="train.parquet", prefetch=0, shuffle=False, quarantine=str(folder / "b"), **how)
        ranks = [list(SPEC.build(config, FEATURES, split="train", batch_size=8, shard=(r, 4))) for r in range(4)]
        work = np.array([[b.tokens for b in batches] for batches in ranks])
        spread.append(imbalance(work)[:-1].mean())
        if kind:
            for step in range(len(ranks[0]) - 1):
                ids = sorted(i for batches in ranks for i in batches[step].sample_ids.tolist())
                assert ids == list(range(ids[0], ids[0] + len(ids)))
    assert spread[0] < 1.03 < 1.15 < spread[1]


def test_quarantined_rows_in_a_balanced_group(folder, tmp_path):
    table = pq.read_table(folder / "train.parquet")
    x = table["x"].to_numpy().copy()
    x[[3, 50, 51]] = 1000
    pq.write_table(table.set_column(1, "x", pa.array(x)), tmp_path / "a.parquet", row_group_size=23)
    source = ParquetSource(
        tmp_path / "a.parquet", FEATURES, batch_size=8, batching=Balanced(base=1, window=3), quarantine=str(tmp_path / "bad")
    )
    assert sorted(ids_of(source)) == [i for i in range(130) if i not in (3, 50, 51)]
    assert source.quarantined == 3


def test_declarations_that_cannot_work(folder):
    with pytest.raises(ConfigError, match="no multiple"):
        ParquetSource(folder / "train.parquet", FEATURES, batch_size=12, batching=Balanced(base=8), quarantine="q")
    with pytest.raises(ConfigError, match="needs a history"):
        ParquetSource(folder / "train.parquet", Features(sparse={"x": Sparse(rows=100)}), batch_size=8, batching=Bucketed())
