"""Reader processes: the same batches, bounded lead, what happens when one is killed; torch's own loaders on top of the source."""

from __future__ import annotations

import multiprocessing
import os
import signal
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gem_core.config.features import Features
from gem_core.errors import ConfigError, DataError
from gem_core.testing.sources import assert_same_batch, ids_of
from gem_data import ParquetSource

FEATURES = Features.model_validate(
    {
        "sample_id": "name",
        "sparse": {"item": {"rows": 50}, "tags": {"rows": 64, "hash": True}},
        "dense": {"price": {"policy": "quarantine"}},
        "sequences": {"h": {"fields": {"seen": {"rows": 50}, "kinds": {"rows": 9}}, "timestamps": "at"}},
        "labels": {"click": {}},
    }
)
N, GROUP = 300, 25


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    rng = np.random.default_rng(1)
    n = rng.integers(0, 7, N)
    path = tmp_path_factory.mktemp("log") / "a.parquet"
    table = {
        "name": [f"row {i:03}" for i in range(N)],
        "item": rng.integers(0, 50, N),
        "tags": [[f"t{t}" for t in rng.integers(0, 99, k)] for k in rng.integers(0, 4, N)],
        "price": [None if i in (7, 130) else float(i) for i in range(N)],
        "seen": [rng.integers(0, 50, k).tolist() for k in n],
        "kinds": [[rng.integers(0, 9, 2).tolist() for _ in range(k)] for k in n],
        "at": [np.sort(rng.integers(0, 99, k)).tolist() for k in n],
        "click": rng.integers(0, 2, N),
    }
    pq.write_table(pa.table(table), path, row_group_size=GROUP)
    return path


def source(path, folder, **options):
    options = {"batch_size": 16, "shuffle": True, "window": GROUP, "seed": 3, "quarantine": str(folder / "bad")} | options
    return ParquetSource(path, FEATURES, **options)


def readers():
    return [p for p in multiprocessing.active_children() if p.name.startswith("gem-data reader")]


def test_batches_and_positions_do_not_depend_on_the_processes(path, tmp_path):
    plain = source(path, tmp_path)
    want = list(plain)
    with_two = source(path, tmp_path, workers=2)
    got = list(islice(with_two, 5))
    resumed = source(path, tmp_path, workers=3, prefetch=0)
    resumed.load_state_dict(with_two.state_dict())
    got += list(resumed)
    assert len(got) == len(want) == 19
    for a, b in zip(got, want):
        assert_same_batch(a, b)
    assert plain.quarantined == 2 == pq.read_table(tmp_path / "bad").num_rows
    assert source(path, tmp_path).state_dict() == source(path, tmp_path, workers=2).state_dict()
    assert not readers()


def test_a_killed_process_is_an_error_and_the_rest_can_be_read(path, tmp_path):
    want = ids_of(source(path, tmp_path))
    reading = source(path, tmp_path, workers=2, prefetch=1)
    batches = iter(reading)
    got = ids_of([next(batches)])
    victim = readers()[1]
    os.kill(victim.pid, signal.SIGKILL)

    def rest():
        for batch in batches:
            got.extend(ids_of([batch]))

    with pytest.raises(DataError, match=rf"(?s)pid {victim.pid}\) was killed by SIGKILL.*a\.parquet.*workers.*resume"):
        rest()
    assert 0 < len(got) < len(want)
    resumed = source(path, tmp_path, workers=1)
    resumed.load_state_dict(reading.state_dict())
    assert got + ids_of(resumed) == want
    assert not readers()


def test_errors_of_a_process_are_those_of_the_file(path):
    strict = FEATURES.model_copy(update={"dense": {"price": FEATURES.dense["price"].model_copy(update={"policy": "error"})}})
    with pytest.raises(DataError, match=r"(?s)null or NaN.*row group 0, row 7.*price"):
        list(ParquetSource(path, strict, batch_size=16, workers=1))
    assert not readers()


@pytest.mark.parametrize("change", ["vanished", "replaced"])
def test_a_file_that_goes_meanwhile_can_be_put_back(path, tmp_path, change):
    """A reader without open files (a fresh one) meets the change; with the old file back the position still holds."""
    own = tmp_path / "own.parquet"
    own.write_bytes(path.read_bytes())
    want = ids_of(source(own, tmp_path))
    reading, other = source(own, tmp_path, prefetch=0), source(own, tmp_path, prefetch=0)
    batches = iter(reading)
    got = ids_of(islice(batches, 3))
    other.load_state_dict(reading.state_dict())
    batches.close()
    own.rename(tmp_path / "kept")
    if change == "replaced":
        pq.write_table(pa.table({"name": ["x"]}), own)
    with pytest.raises(DataError, match=rf"{change}.* while it was in use"):
        next(iter(other))
    own.unlink(missing_ok=True)
    (tmp_path / "kept").rename(own)
    resumed = source(own, tmp_path)
    resumed.load_state_dict(reading.state_dict())
    assert got + ids_of(resumed) == want


def test_a_process_is_at_most_one_window_ahead(path, tmp_path, monkeypatch):
    from gem_data.workers import Workers

    asked, taken = [], []
    real = Workers._send
    monkeypatch.setattr(Workers, "_send", lambda self, i, window: asked.append(window.number) or real(self, i, window))
    reading = source(path, tmp_path, workers=2, prefetch=0)
    for batch in reading:
        taken.append(len(batch))
        assert len(asked) * GROUP <= sum(taken) + reading.quarantined + 4 * GROUP
    assert len(asked) == N // GROUP


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_loaders_read_every_sample_once(path, tmp_path, workers):
    loader = torch.utils.data.DataLoader(
        source(path, tmp_path, prefetch=0), batch_size=None, num_workers=workers, multiprocessing_context="spawn" if workers else None
    )
    assert sorted(ids_of(loader)) == sorted(ids_of(source(path, tmp_path)))


# a loader that is thrown away tells, from __del__, of a worker that aborted in PyTorch's queue while it was asked to end
@pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loaders_resume_exactly_twice(path, tmp_path, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        how = {"multiprocessing_context": "spawn"} if workers else {}
        return stateful.StatefulDataLoader(source(path, tmp_path, prefetch=0), batch_size=None, num_workers=workers, **how)

    want = sorted(ids_of(source(path, tmp_path)))
    reading = loader()
    got = ids_of(islice(reading, 3))
    for steps in (6, None):
        state = reading.state_dict()
        reading = loader()
        reading.load_state_dict(state)
        got += ids_of(islice(reading, steps) if steps else reading)
    assert sorted(got) == want


def test_more_processes_than_a_machine_can_bear_are_refused(path, tmp_path, monkeypatch):
    """Before any is started."""
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    with pytest.raises(ConfigError, match=r"(?s)21 processes that decode are too many for 5 cores.*data\.parquet\.workers.*at most 20"):
        ParquetSource(path, FEATURES, batch_size=4, workers=21, quarantine=str(tmp_path))
    ParquetSource(path, FEATURES, batch_size=4, workers=20, quarantine=str(tmp_path))  # none is started before it is read
