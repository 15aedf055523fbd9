"""Captured steps on GPUs with tables of this package: replayed steps are the steps, on one GPU and on two that record and replay apart."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from gem_core.testing import strategies
from gem_core.testing.strategies import StrategyConformance, run_processes, train_rank
from gem_core.train import captured

STEPS = 20
FBGEMM = pytest.mark.skipif(find_spec("fbgemm_gpu") is None, reason="FBGEMM is not installed")
ONE = {"gem-2d": {"sparse": "gem-2d", "gem-2d": {"kernel": "torch"}}, "fbgemm": {"sparse": "fbgemm"}}
TWO = {
    "core": {"dense": "ddp"},
    "rows over two": {"dense": "ddp", "sparse": "gem-2d", "gem-2d": {"kernel": "torch", "sharding": "row"}},
    "whole copies": {"dense": "ddp", "sparse": "gem-2d", "model": 1, "replica": 2},
    "touched rows": {"dense": "ddp", "sparse": "gem-2d", "model": 1, "replica": 2, "gem-2d": {"exchange": "touched"}},
    "torchrec": {"dense": "ddp", "sparse": "torchrec"},
}


def three_ways(rank, world, task):
    """Losses, gradient norms and state of steps as usual, of steps cut at the look-ups and computed in the same rooms, and of those that
    are replayed; and how many graphs were recorded."""
    if task.get("one_gpu"):
        strategies.choose_device = lambda *_: torch.device("cuda", 0)
    counted = []
    real_graph, real_record = captured.recorded, captured.Captured._record
    captured.recorded = lambda *given, **how: (counted.append(1), real_graph(*given, **how))[1]
    found = {}
    try:
        for name in ("usual", "cut", "replayed"):
            captured.Captured._record = real_record if name == "replayed" else lambda self, room: None
            config = {**StrategyConformance.config(task["parallel"]), "run": {"device": "cuda", "seed": 5}}
            config["train"] = {**config["train"], "capture": name != "usual"}
            found[name] = train_rank(rank, world, {"config": config, "scenarios": {"s": task["sizes"]}})["s"]
            assert bool(counted) == (name == "replayed")
    finally:
        captured.recorded, captured.Captured._record = real_graph, real_record
    return {**found, "graphs": len(counted)}


def check(ranks):
    for rank, found in enumerate(ranks):
        assert found["graphs"] >= 4, "a graph of the dense part and one of the update, for two rooms"
        assert found["replayed"]["differs"] == ""
        for step, (got, want) in enumerate(zip(found["replayed"]["losses"], found["cut"]["losses"], strict=True)):
            assert got == pytest.approx(want, rel=1e-4), (rank, step)
        for key, value in found["cut"]["state"].items():
            torch.testing.assert_close(found["replayed"]["state"][key], value, rtol=1e-3, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}")
        # Slack changes the order of sums, and AdamW makes more of that with every step.
        for step, (got, want) in enumerate(zip(found["cut"]["losses"][:4], found["usual"]["losses"])):
            assert got == pytest.approx(want, rel=1e-5 if step == 0 else 1e-3), (rank, step)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["gem-2d", pytest.param("fbgemm", marks=FBGEMM)])
def test_replayed_steps_are_the_steps(name):
    sizes = [[(48 if i % 3 else 20,)] for i in range(STEPS)]
    check([three_ways(0, 1, {"parallel": ONE[name], "sizes": sizes})])


def uneven():
    """Batches of different sizes on the ranks, so that one records while the other replays; one without samples."""
    return [[((48, 20), (20, 48), (32, 32), (0, 24))[i % 4]] for i in range(STEPS)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["core", "rows over two"])
def test_two_processes_replay_what_they_compute(name, tmp_path):
    """On one GPU, over gloo: the averages wait for what a recorded backward pass has filled, and for nothing else."""
    check(run_processes(2, three_ways, {"parallel": TWO[name], "sizes": uneven(), "one_gpu": True}, tmp_path))


@pytest.mark.multigpu
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", [pytest.param(n, marks=FBGEMM if n in ("whole copies", "touched rows", "torchrec") else ()) for n in TWO])
def test_two_gpus_replay_what_they_compute(name, tmp_path):
    task = {"parallel": TWO[name], "sizes": uneven()}
    check(run_processes(2, three_ways, task, tmp_path, timeout=60, backend="cpu:gloo,cuda:nccl"))
