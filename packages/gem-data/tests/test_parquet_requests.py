"""``features.request``: histories stored once a request, requests kept together, exact resume, wrong declarations."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_core.config.features import Features
from gem_core.errors import ConfigError, DataError
from gem_core.requests import expanded
from gem_core.testing.sources import assert_same_batch, ids_of
from gem_data import ParquetSource
from gem_data.balance import Balanced

RNG = np.random.default_rng(2)


def declared(**more):
    history = {"fields": {"seen": {"rows": 50}, "kinds": {"rows": 9}}, "timestamps": "at"}
    return Features.model_validate(
        {"sample_id": "id", "sparse": {"item": {"rows": 50}}, "sequences": {"h": history}, "labels": {"click": {}}, **more}
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """40 requests of 1 to 6 impressions."""
    rows = []
    for request in range(40):
        n = int(RNG.integers(0, 9))
        history = {
            "seen": RNG.integers(0, 50, n).tolist(),
            "kinds": [RNG.integers(0, 9, 2).tolist() for _ in range(n)],
            "at": np.sort(RNG.integers(0, 99, n)).tolist(),
        }
        rows += [{"request": f"r{request}", "item": int(RNG.integers(0, 50)), "click": 0, **history} for _ in range(RNG.integers(1, 7))]
    path = tmp_path_factory.mktemp("log") / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": i, **row} for i, row in enumerate(rows)]), path, row_group_size=30)
    return path


def test_each_history_is_stored_once(path):
    plain, shared = ParquetSource(path, declared(), batch_size=16), ParquetSource(path, declared(request="request"), batch_size=16)
    requests = pq.read_table(path)["request"].to_pylist()
    for a, b in zip(plain, shared, strict=True):
        b.validate()
        own = [requests[i] for i in b.sample_ids.tolist()]
        assert b.requests.sequences["h"].batch_size == len(set(own))
        assert [own.index(r) for r in own] == [b.requests.kv_index.tolist().index(k) for k in b.requests.kv_index.tolist()]
        assert not b.sequences
        assert_same_batch(expanded(b), a)


def test_shuffling_keeps_requests_together_and_resumes(path):
    features = declared(request="request")
    requests = pq.read_table(path)["request"].to_pylist()

    def source(**how):
        return ParquetSource(path, features, shuffle=True, window=60, seed=4, **{"batch_size": 8, **how})

    whole = source()
    order = ids_of(whole)
    assert sorted(order) == list(range(len(requests)))
    assert order != sorted(order)
    parts = [a for a, b in zip(order, order[1:]) if requests[a] == requests[b] and b != a + 1]
    assert not parts, "impressions of a request changed their order"
    runs = 1 + sum(requests[a] != requests[b] for a, b in zip(order, order[1:]))
    # A request over the border of two windows comes in two parts.
    assert runs <= len(set(requests)) + len(requests) // 30 + 1
    reading = source()
    got = ids_of(islice(reading, 5))
    resumed = source(batch_size=5)
    resumed.load_state_dict(reading.state_dict())
    assert got + ids_of(resumed) == order


def test_histories_that_differ_within_a_request(tmp_path):
    rows = [
        {"id": i, "request": 1, "item": 1, "click": 0, "seen": [1] * (i + 1), "kinds": [[1]] * (i + 1), "at": [1] * (i + 1)} for i in (0, 1)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"(?s)samples 0 and 1 have one request and histories of 1 and 2 events.*'request'.*sequences\.h"):
        list(ParquetSource(tmp_path / "b.parquet", declared(request="request"), batch_size=4))


@pytest.mark.parametrize(
    "change",
    [{"seen": [1, 3]}, {"seen": [2, 1]}, {"seen": [0, 3]}, {"at": [1, 3]}]
    + [{"kinds": kinds} for kinds in ([[1], [2, 2]], [[], [1, 2]], [[1], [2, 0]], [[2], [1]])],
    ids=str,
)
def test_histories_of_one_length_that_differ_within_a_request(tmp_path, change):
    """As those that are cut to the newest events are: which impression's history would the others get?"""
    row = {"request": 1, "item": 1, "click": 0, "seen": [1, 2], "kinds": [[1], [2]], "at": [1, 2]}
    pq.write_table(pa.Table.from_pylist([{"id": 0, **row}, {"id": 1, **row}, {"id": 2, **row, **change}]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"(?s)samples 0 and 2 have one request and other events.*sequences\.h"):
        list(ParquetSource(tmp_path / "b.parquet", declared(request="request"), batch_size=4))


def test_balancing_would_part_them(path):
    with pytest.raises(ConfigError, match="would part"):
        ParquetSource(path, declared(request="request"), batch_size=8, batching=Balanced(base=4))
