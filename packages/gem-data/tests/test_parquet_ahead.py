"""Reading on over the end of an epoch: what is decoded when, how much is held, what is left behind."""

from __future__ import annotations

import multiprocessing
import threading
import time
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import gem_core
from gem_core.config import config_from_dict
from gem_core.config.features import EventField, Features, Label, Sequence, Sparse
from gem_core.errors import DataError
from gem_core.testing.sources import assert_same_batch, ids_of
from gem_data import ParquetSource
from gem_data.balance import Balanced, Global, Tokens
from gem_data.prefetch import Room
from gem_data.rows import RowReader

FEATURES = Features(
    sample_id="id",
    sparse={"item": Sparse(rows=50)},
    sequences={"h": Sequence(fields={"seen": EventField(rows=50), "gap": EventField(kind="float")})},
    labels={"click": Label()},
)
N, GROUP = 220, 20
WAIT_S = 30.0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Eleven row groups: with windows of 80 rows the last window of an epoch is a short one."""
    return write(tmp_path_factory.mktemp("log") / "a.parquet", N)


def write(path, n):
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, 6, n)
    table = {
        "id": np.arange(n),
        "item": rng.integers(0, 50, n),
        "seen": [rng.integers(0, 50, k).tolist() for k in lengths],
        "gap": pa.array([rng.random(k).astype(np.float32).tolist() for k in lengths], pa.list_(pa.float32())),
        "click": rng.integers(0, 2, n),
    }
    pq.write_table(pa.table(table), path, row_group_size=GROUP)
    return path


def source(path, **options):
    return ParquetSource(path, FEATURES, **{"batch_size": 8, "shuffle": True, "window": 80, "seed": 3, **options})


def until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it has not come to pass"
        time.sleep(0.01)


@pytest.fixture
def decoded(monkeypatch):
    """Row groups in the order in which they were decoded in this process."""
    seen = []
    real = RowReader.unit
    monkeypatch.setattr(RowReader, "unit", lambda self, unit, reader: seen.append(unit.row_group) or real(self, unit, reader))
    return seen


@pytest.fixture
def alone():
    """No thread or reader process outlives the test."""
    before = threading.active_count()
    yield
    until(lambda: threading.active_count() == before)
    assert not [p for p in multiprocessing.active_children() if p.name.startswith("gem-data reader")]


def test_the_next_epoch_is_decoded_before_this_one_ends(path, decoded, alone):
    reading = source(path)
    reading.following = 1
    batches = iter(reading)
    last = list(islice(batches, len(reading)))[-1]  # asks for nothing after the last batch
    assert len(last)
    until(lambda: len(decoded) > N // GROUP + 3)
    assert set(decoded[: N // GROUP]) == set(range(N // GROUP))
    coming = [unit.row_group for window in reading._epochs.windows(1) for unit in window.units]
    assert decoded[N // GROUP :] == coming[: len(decoded) - N // GROUP]
    assert next(batches, None) is None
    reading.following = 0
    want = source(path)
    want.load_state_dict(reading.state_dict())
    for a, b in zip(reading, want, strict=True):
        assert_same_batch(a, b)


def test_nothing_is_read_for_an_iteration_that_does_not_come(path, decoded, alone):
    reading = source(path)
    assert len(ids_of(reading)) == N
    reading.following = 1
    assert sorted(ids_of(reading)) == list(range(N))
    reading.following = 0
    assert len(ids_of(reading)) == N
    assert len(decoded) == 3 * N // GROUP


@pytest.mark.parametrize("shard", [(0, 1), (1, 3), (4, 7)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_what_is_held_is_bounded(path, monkeypatch, alone, shard, shuffle):
    held = []
    real = Room.enter
    monkeypatch.setattr(Room, "enter", lambda self, rows: real(self, rows) and held.append((self._held, self.most)) is None)
    reading = source(path, rank=shard[0], world_size=shard[1], shuffle=shuffle)
    reading.following = 3
    for _ in range(3):
        for _ in reading:
            time.sleep(0.001)
    reading.close()
    largest = max(w.stop - w.start for w in reading._epochs.windows(0))
    assert held
    assert {most for _, most in held} == {largest * 5 // 4}
    assert max(rows for rows, _ in held) <= largest * 5 // 4


@pytest.mark.parametrize(
    "options",
    [
        {"batching": Balanced(base=4, window=3)},
        {"batching": Tokens(budget=40)},
        {"batching": Global(), "rank": 1, "world_size": 2},
        {"window": 1000},
        {"batch_size": 500},
    ],
    ids=str,
)
def test_epochs_read_on_are_epochs_read_one_by_one(path, alone, options):
    plain, reading = source(path, **options), source(path, **options)
    want = [batch for _ in range(3) for batch in plain]
    got = []
    for left in (2, 1, 0):
        reading.following = left
        got += list(reading)
    for a, b in zip(got, want, strict=True):
        assert_same_batch(a, b)


def test_reader_processes_live_on(path, alone):
    """They are not started anew for each epoch, and go through the epochs in the same order."""
    plain, reading = source(path), source(path, workers=2)
    processes, got = [], []
    for left in (1, 0):
        reading.following = left
        batches = iter(reading)
        got.append(next(batches))
        processes.append({p.pid for p in multiprocessing.active_children() if p.name.startswith("gem-data reader")})
        got += batches
    assert processes[0] == processes[1]
    assert len(processes[0]) == 2
    for a, b in zip(got, [*plain, *plain], strict=True):
        assert_same_batch(a, b)


def test_more_ranks_than_samples(tmp_path, alone):
    """A rank that reads nothing still takes every step, and does not read on for ever."""
    few = write(tmp_path / "few.parquet", 3)
    counts = []
    for rank in range(5):
        reading = source(few, rank=rank, world_size=5)
        reading.following = None
        counts.append([[len(batch) for batch in reading] for _ in range(3)])
        reading.close()
    assert counts == [[[1]] * 3] * 3 + [[[0]] * 3] * 2


def test_a_position_ends_what_was_read_on(path, alone):
    reading, other = source(path), source(path)
    reading.following = None
    want = list(reading)
    next(iter(other))
    reading.load_state_dict(other.state_dict())
    for a, b in zip(reading, want[1:], strict=True):
        assert_same_batch(a, b)
    reading.close()


def test_an_error_of_the_next_epoch_comes_in_the_next_epoch(path, monkeypatch, alone):
    reading = source(path)
    reading.following = 1
    real, calls = RowReader.unit, []

    def unit(self, unit, reader):
        calls.append(unit)
        if len(calls) == N // GROUP + 2:
            raise DataError("the disk is gone", fix="mount it")
        return real(self, unit, reader)

    monkeypatch.setattr(RowReader, "unit", unit)
    assert len(ids_of(reading)) == N
    with pytest.raises(DataError, match="the disk is gone"):
        next(iter(reading))
    state = reading.state_dict()
    assert state["epoch"] == 1
    reading.following = 0
    want = source(path)
    ids_of(want)
    assert ids_of(reading) == ids_of(want)


@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 70}])
def test_the_trainer_reads_on_and_leaves_nothing(path, tmp_path, monkeypatch, decoded, alone, length):
    told = []
    real = ParquetSource._start
    monkeypatch.setattr(ParquetSource, "_start", lambda self, *a: told.append(self.following) or real(self, *a))
    config = config_from_dict(
        {
            "run": {"device": "cpu"},
            "data": {
                "source": "parquet",
                "batch_size": 8,
                "parquet": {"root": str(path.parent), "train": path.name, "eval": path.name, "window": 80},
            },
            "features": FEATURES.model_dump(exclude_defaults=True),
            "model": {"name": "dlrm"},
            "train": {"tensorboard": False, **length},
            "eval": {"every": 28},
        }
    )
    result = gem_core.train(config, run_dir=tmp_path / "run", quiet=True)
    assert result.status == "finished"
    assert [left for left in told if left != 0] == [2 if "epochs" in length else None]
