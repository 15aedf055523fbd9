"""What sources share: the stated hash, length laws, shuffles, and the order and position of an epoch."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.errors import ConfigError, DataError
from gem_core.sources.hashing import hash_bytes, hash_integers, key_of, mix64, salt_of, to_rows
from gem_core.sources.laws import LognormalLaw, ParetoLaw, UniformLaw, ZipfLaw, histogram
from gem_core.sources.order import Cursor, Plan
from gem_core.sources.shuffle import Shuffle

M64 = (1 << 64) - 1


def slow_mix(x):
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def slow_hash(data: bytes, salt: int) -> int:
    """The docstring of the module, word by word."""
    h = slow_mix(slow_mix((salt + 0x9E3779B97F4A7C15) & M64) ^ ((~len(data)) & M64))
    padded = data + b"\0" * (-len(data) % 8)
    for i in range(0, len(padded), 8):
        h = slow_mix(h ^ int.from_bytes(padded[i : i + 8], "little"))
    return h


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, M64))
def test_byte_hash_is_the_stated_one(rows, salt):
    offsets = np.cumsum([0, *(len(r) for r in rows)])
    got = hash_bytes(np.frombuffer(b"".join(rows), dtype=np.uint8), offsets, salt)
    assert got.tolist() == [slow_hash(r, salt) for r in rows]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.integers(0, M64))
def test_integer_hash_is_the_stated_one(values, salt):
    key = slow_mix((salt + 0x9E3779B97F4A7C15) & M64)
    want = [slow_mix(key ^ (v & M64)) for v in values]
    assert hash_integers(np.array(values, dtype=np.int64), salt).tolist() == want


def test_hash_of_known_values():
    """Pinned: a change here would move every hashed feature of every stored model."""
    assert mix64(1) == slow_mix(1) == 0x5692161D100B05E5
    assert salt_of("user_id") == slow_hash(b"user_id", 0)
    assert key_of(0) == slow_mix(0x9E3779B97F4A7C15)
    text = np.frombuffer("ünïcode".encode(), dtype=np.uint8)
    assert int(hash_bytes(text, np.array([0, text.size]), 5)[0]) == slow_hash("ünïcode".encode(), 5)


def test_integer_width_does_not_matter():
    for dtype in (np.int8, np.int16, np.int32, np.int64):
        assert np.array_equal(hash_integers(np.array([-1, 0, 5], dtype=dtype), 9), hash_integers(np.array([-1, 0, 5]), 9))
    assert np.array_equal(hash_integers(np.array([2**64 - 1], dtype=np.uint64), 9), hash_integers(np.array([-1]), 9))


def test_hash_spreads_evenly():
    """Sequential ids over 97 rows: chi-square within five deviations; two salts agree on about one row in 97."""
    n = 97_000
    a, b = (to_rows(hash_integers(np.arange(n), salt), 97) for salt in (1, 2))
    chi = ((np.bincount(a, minlength=97) - 1000) ** 2 / 1000).sum()
    assert abs(chi - 96) < 5 * (2 * 96) ** 0.5
    assert abs((a == b).mean() - 1 / 97) < 5 * (1 / 97 / n) ** 0.5


# --- laws ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparsity", [0.1, 0.5, 0.7, 1.0])
def test_uniform_by_sparsity(sparsity):
    lengths = UniformLaw(max=1000, sparsity=sparsity).draw(100_000, 3)
    low, high = (max(1, round((2 * sparsity - 1) * 1000)), 1000) if sparsity >= 0.5 else (1, round(2 * sparsity * 1000))
    assert lengths.min() == low
    assert lengths.max() == high
    assert abs(lengths.mean() - (low + high) / 2) < 5 * (high - low + 1) / 12**0.5 / 100_000**0.5
    assert abs(lengths.mean() / 1000 - sparsity) < 0.01


def test_zipf():
    lengths = ZipfLaw(max=4096, alpha=1.2).draw(200_000, 3)
    assert lengths.min() == 1
    assert 2000 < lengths.max() <= 4096
    counts = np.bincount(lengths)
    for k in (2, 5, 10):
        assert abs(counts[k] / counts[1] * k**1.2 - 1) < 0.1


def test_lognormal_with_zeros():
    law = LognormalLaw(max=1_000_000, mean=500, sigma=1.0, zero=0.2)
    lengths = law.draw(400_000, 3)
    assert abs((lengths == 0).mean() - 0.2) < 0.004
    positive = lengths[lengths > 0]
    assert abs(positive.mean() / 500 - 1) < 0.02
    assert abs(np.log(positive).std() - 1.0) < 0.02
    assert LognormalLaw(max=100, mean=500).draw(1000, 3).max() == 100


def test_pareto_tail():
    lengths = ParetoLaw(max=10**9, minimum=10, alpha=1.5).draw(400_000, 3)
    assert lengths.min() == 10
    for x in (20, 100):
        assert abs((lengths >= x).mean() * (x / 10) ** 1.5 - 1) < 0.1


def test_laws_are_seeded():
    law = ZipfLaw()
    assert np.array_equal(law.draw(100, 1), law.draw(100, 1))
    assert not np.array_equal(law.draw(100, 1), law.draw(100, 2))


def test_histogram_counts_everything():
    lengths = np.array([0, 0, 1, 2, 3, 4, 9, 4096])
    found = histogram(lengths)
    assert found["counts"] == {"0..0": 2, "1..1": 1, "2..3": 2, "4..7": 1, "8..15": 1, "4096..8191": 1}
    assert found["max"] == 4096
    assert found["n"] == 8
    assert histogram(lengths[:0]) == {"n": 0}


# --- shuffle and order --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 10, 97, 1000, 4096, 12_345])
def test_shuffle_is_a_permutation(n):
    for epoch in range(3):
        assert np.array_equal(np.sort(Shuffle(n, 5, epoch)(np.arange(n))), np.arange(n))


def test_shuffle_mixes():
    """No correlation between position and element, and epochs differ."""
    n = 10_000
    a, b = (Shuffle(n, 5, epoch)(np.arange(n)) for epoch in (0, 1))
    for x, y in ((np.arange(n), a), (a, b), (a[:-1], a[1:])):
        assert abs(np.corrcoef(x, y)[0, 1]) < 5 / n**0.5


@given(
    total=st.integers(0, 300),
    stages=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_plans_lose_and_repeat_nothing(total, stages):
    """Any chain of world and batch sizes, stopped anywhere, then finished: every sample once, equal steps, no empty batch."""
    seen, state = Counter(), None
    for number, (world, size, stop) in enumerate(stages):
        cursors = [Cursor(total, size, rank, world) for rank in range(world)]
        counts = []
        for cursor in cursors:
            if state is not None:
                cursor.load_state_dict(json.loads(json.dumps(state)))
            left = cursor.steps()
            _, plan, first = Cursor.begin(_copy(cursor))
            steps = plan.steps - first
            last = number == len(stages) - 1
            taken = steps if last else int(stop * steps)
            for _ in range(taken):
                _, spans = next(left)
                rows = [i for a, b in spans for i in range(a, b)]
                assert len(rows) <= size
                assert rows or plan.total < world or size == 1
                seen.update(rows)
            counts.append(taken)
        assert len(set(counts)) == 1
        states = [c.state_dict() for c in cursors]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert all(c == 1 for c in seen.values())
    assert sorted(seen) == list(range(total))


def _copy(cursor):
    twin = Cursor(cursor.total, cursor.batch_size, cursor.rank, cursor.world, cursor.drop_last)
    twin.load_state_dict(cursor.state_dict())
    return twin


@given(st.integers(0, 400), st.integers(1, 9), st.integers(1, 30))
@settings(max_examples=200, deadline=None)
def test_drop_last_plans(total, world, size):
    plan = Plan(((0, total),), world, size, drop_last=True)
    rows = [i for rank in range(world) for step in range(plan.steps) for a, b in plan.read(rank, step) for i in range(a, b)]
    assert len(rows) == len(set(rows)) == total // world // size * size * world
    assert all(sum(b - a for a, b in plan.read(rank, step)) == size for rank in range(world) for step in range(plan.steps))


def test_state_over_another_number_of_samples():
    cursor = Cursor(10, 2)
    next(cursor.steps())
    with pytest.raises(DataError, match="10 samples, the source now has 11"):
        Cursor(11, 2).load_state_dict(cursor.state_dict())


@pytest.mark.parametrize(("batch_size", "rank", "world"), [(0, 0, 1), (4, 2, 2), (4, -1, 2), (4, 0, 0)])
def test_impossible_shards(batch_size, rank, world):
    with pytest.raises(ConfigError, match="cannot be used"):
        Cursor(10, batch_size, rank, world)
