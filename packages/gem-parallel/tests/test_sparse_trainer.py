"""The whole trainer with sharded tables: exact resumption, and another plan and number of processes on the way."""

from __future__ import annotations

import json

import pytest
import torch

from gem_core.batch import Batch, SequenceGroup, SparseGroup
from gem_core.config import config_from_dict, resolve
from gem_core.testing.strategies import run_processes, run_training
from gem_core.train.build import build_parts
from gem_core.train.continuous import Recency
from gem_core.train.runtime import Runtime
from gem_core.train.shards import gather

CONFIG = {
    "run": {"device": "cpu", "seed": 1},
    "data": {
        "batch_size": 16,
        "synthetic": {
            "rows": 700, "eval_rows": 101, "test_rows": 100, "users": 60, "length": {"law": "lognormal", "mean": 4.0, "max": 20},
        },
    },
    "model": {"name": "din"},
    "train": {"steps": 16, "log_every": 1, "tensorboard": False, "checkpoint_every": 8},
    "eval": {"every": 8},
}  # fmt: skip
TOUCHED = {"dense": "ddp", "sparse": "gem-2d", "replica": 2, "gem-2d": {"exchange": "touched", "sharding": "row"}}
WHOLE = {"dense": "ddp", "sparse": "gem-2d", "replica": 2, "gem-2d": {"schedule": "torchrec"}}
LOCAL = {"dense": "ddp"}
TORCHREC = {"dense": "ddp", "sparse": "torchrec", "torchrec": {"sharding": "row", "tables": {"item": {"sharding": "column"}}}}


def records(folder):
    return [(r["step"], r["loss"]) for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def run(world, name, parallel, **task):
        steps = {"train": {**CONFIG["train"], "steps": task.pop("steps", 16)}}
        config = {**CONFIG, "parallel": parallel, **steps}
        run_processes(world, run_training, {"config": config, "run_dir": str(folder / name), **task}, tmp_path_factory.mktemp("results"))
        return records(folder / name)

    return run


def test_touched_rows_give_the_losses_of_replicated_tables(train):
    for (step, loss), (_, want) in zip(train(2, "touched", TOUCHED), train(2, "replicas", LOCAL), strict=True):
        assert loss == pytest.approx(want, rel=1e-4), step


@pytest.mark.parametrize("parallel", [TOUCHED, WHOLE], ids=["touched", "whole"])
def test_resumption_is_exact(train, parallel, request):
    name = request.node.callspec.id
    straight = train(2, f"{name} straight", parallel)
    train(2, f"{name} broken", parallel, stop_at=8)
    assert train(2, f"{name} broken", parallel, resume=True) == straight


def test_another_plan_goes_on_from_the_checkpoint(train):
    """Four processes with two replicas, then two processes with one, then one process with the core's own tables."""
    four = train(4, "moving", {**TOUCHED, "replica": 2}, steps=8)
    two = train(2, "moving", {"dense": "ddp", "sparse": "gem-2d", "gem-2d": {"sharding": "table"}}, steps=12, resume=True)
    one = train(1, "moving", {}, steps=16, resume=True)
    assert two[:8] == four
    assert one[:12] == two
    assert [s for s, _ in one] == list(range(1, 17))
    assert sum(loss for _, loss in one[-4:]) < sum(loss for _, loss in one[:4])


def given_back(rank, world, parallel):
    """The tables after rows that no rank has read for more than one partition were given back, and what a checkpoint knows of the reads."""
    features = {
        "tables": {"item": {"rows": 9, "dim": 8}},
        "sparse": {"item": {"table": "item"}, "tag": {"rows": 5, "dim": 8}},
        "sequences": {"history": {"fields": {"item": {"table": "item"}}, "target": {"item": "item"}}},
        "labels": {"ctr": {}},
    }
    tables = {"initial_accumulator": 0.5, "evict_after": 1}
    resolved = resolve(config_from_dict({**CONFIG, "features": features, "parallel": parallel, "train": {"steps": 1, "tables": tables}}))
    runtime = Runtime(torch.device("cpu"), rank, world)
    parts = build_parts(resolved, runtime)
    recency = Recency(parts, resolved.config, runtime, 1)

    def note(item, tag):
        sparse = SparseGroup(("item", "tag"), torch.tensor([item, tag]), torch.ones(2, dtype=torch.int64))
        history = SequenceGroup(torch.tensor([0, 1]), {"item": torch.tensor([item])})
        recency.note(Batch(1, sparse=sparse, sequences={"history": history}, labels=torch.zeros(1, 1), label_names=("ctr",)))

    note(2 + 5 * rank, 3 * rank)
    freed = [recency.turn()]
    note(4 + 4 * rank, 3)
    kept = recency.state_dict()["last"]
    freed.append(recency.turn())
    state = gather(parts.table_state(), runtime)
    return freed, {n: t.tolist() for n, t in kept.items()}, {n: t.tolist() for n, t in state.items()}


@pytest.fixture(scope="module")
def whole_tables(tmp_path_factory):
    return run_processes(2, given_back, LOCAL, tmp_path_factory.mktemp("whole"))[0]


@pytest.mark.parametrize("parallel", [TOUCHED, WHOLE, TORCHREC], ids=["touched", "whole", "torchrec"])
def test_rows_of_spread_tables_are_given_back_as_of_whole_ones(parallel, tmp_path, whole_tables):
    if parallel is TORCHREC:
        pytest.importorskip("torchrec")
    found = run_processes(2, given_back, parallel, tmp_path)
    freed, kept, state = found[0]
    assert freed == [{}, {"item": 2, "sparse.tag": 1}]
    assert kept == {"item": [-1, -1, 0, -1, 1, -1, -1, 0, 1], "sparse.tag": [0, -1, -1, 1, -1]}
    assert state["item.accumulator"] == [0, 0, 0.5, 0, 0, 0, 0, 0.5, 0]
    assert state["sparse.tag.accumulator"] == [0.5, 0, 0, 0, 0]
    assert found[1] == found[0] == whole_tables
