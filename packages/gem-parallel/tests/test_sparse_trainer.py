"""The whole trainer with sharded tables: exact resumption, and another plan and number of processes on the way."""

from __future__ import annotations

import json

import pytest

from gem_core.testing.strategies import run_processes, run_training

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
