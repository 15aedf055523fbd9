"""Ranks whose sources are not alike: nothing hangs, and every sample counts once."""

from __future__ import annotations

import time

import pytest
import torch

from gem_core.errors import DataError, GemError
from gem_core.testing.models import random_batch, sample_features
from gem_core.testing.strategies import run_processes
from gem_core.train.feed import Feed
from gem_core.train.runtime import Runtime


class Some:
    """``count`` batches of three samples, then a failure if ``fails``."""

    def __init__(self, count, fails=False):
        self.count, self.fails, self.at = count, fails, 0

    def __iter__(self):
        while self.at < self.count:
            self.at += 1
            yield random_batch(sample_features(), 3, seed=self.at)
        if self.fails:
            raise DataError("row 7 is broken")
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def read(rank, world, task):
    sizes, dtypes = [], set()
    runtime = Runtime(torch.device("cpu"), rank, world)
    try:
        for fed in Feed(Some(task["counts"][rank], task.get("fails") == rank), torch.device("cpu"), task["epochs"], runtime=runtime):
            sizes.append(fed.host.size)
            dtypes.add((str(fed.host.dense.dtype), str(fed.host.sparse.values.dtype), str(fed.host.labels.dtype)))
            fed.host.validate()
    except GemError as error:
        return {"sizes": sizes, "error": f"{type(error).__name__}: {error.what}", "dtypes": sorted(dtypes)}
    return {"sizes": sizes, "error": "", "dtypes": sorted(dtypes)}


def read_on(rank, world, task):
    """What is read from the ``task["after"]``-th batch on, by feeds that begin there."""
    runtime = Runtime(torch.device("cpu"), rank, world)

    def feed():
        return Feed(Some(task["counts"][rank]), torch.device("cpu"), 1, runtime=runtime)

    whole = list(feed())
    resumed = feed()
    resumed.load_position(whole[task["after"] - 1].position)
    rest = list(resumed)
    assert [str(f.host.validate().dense.dtype) for f in rest] == ["torch.float32"] * len(rest)
    return [f.host.size for f in rest], [f.host.size for f in whole[task["after"] :]]


def test_going_on_where_only_other_ranks_have_more(tmp_path):
    for rest, whole in run_processes(3, read_on, {"counts": (4, 2, 2), "after": 3}, tmp_path):
        assert rest == whole


def test_a_rank_with_fewer_batches_gives_empty_ones_until_the_last_has_ended(tmp_path):
    found = run_processes(3, read, {"counts": (4, 2, 3), "epochs": 2}, tmp_path)
    assert [r["sizes"] for r in found] == [[3] * 8, [3] * 4 + [0] * 4, [3] * 6 + [0] * 2]
    assert len({str(r["dtypes"]) for r in found}) == 1
    assert len(found[1]["dtypes"]) == 1, "an empty batch must not change a dtype"


@pytest.mark.parametrize(
    ("task", "own", "others"),
    [
        ({"counts": (4, 2), "fails": 1, "epochs": 1}, "DataError: row 7 is broken", "the data source of 1 of 2 ranks failed"),
        ({"counts": (4, 0), "epochs": 1}, "yields no batch for this split", "the data source of 1 of 2 ranks failed"),
    ],
)
def test_a_source_that_fails_ends_all_ranks_at_once(task, own, others, tmp_path):
    started = time.monotonic()
    first, second = run_processes(2, read, task, tmp_path)
    assert own in second["error"]
    assert others in first["error"]
    assert len(first["sizes"]) == task["counts"][1]
    assert time.monotonic() - started < 60
