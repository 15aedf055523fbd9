"""fsdp, hsdp and expert parallelism over NCCL: the same meshes, on the GPUs of this machine."""

from __future__ import annotations

import pytest
import torch

from gem_core.ops import use_policy
from gem_core.testing.strategies import StrategyConformance, run_processes, train_rank

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

MODEL = {
    "name": "gem", "layers": 2, "dim": 16, "embedding_dim": 16, "interaction": {"experts": ["wukong", "dcnv2", "wukong", "dot"]},
}  # fmt: skip


def configuration(parallel):
    # FBGEMM is not wanted here: tables stay replicas, so that only the dense part differs
    config = {**StrategyConformance.config(parallel), "model": MODEL}
    return {**config, "run": {"device": "cuda", "seed": 5}}


def train_all(rank, world, task):
    torch.backends.cuda.matmul.allow_tf32 = False
    with use_policy("reference"):  # kernels have their own tests, and compiling them takes longer than this one
        return [train_rank(rank, world, {"config": configuration(p), "scenarios": task["scenarios"]}) for p in task["parallels"]]


def test_every_mesh_equals_one_gpu(tmp_path):
    world = 4 if torch.cuda.device_count() >= 4 else 2
    sizes = [[(3,) * world], [(5, *range(world - 1))], [(0, *(2,) * (world - 1))], [(3,) * world]]
    parallels = [{"dense": "hsdp", "replicate": r, "expert": e} for e in (1, 2) for r in (1, 2, 4) if world % (r * e) == 0] + [
        {"dense": "ddp"}
    ]
    task = {"parallels": parallels, "scenarios": {"s": sizes}}
    ranks = run_processes(world, train_all, task, tmp_path, timeout=300, backend="cpu:gloo,cuda:nccl")
    joined = {"s": [[(sum(parts),) for parts in micro] for micro in sizes]}
    with use_policy("reference"):
        alone = train_rank(0, 1, {"config": configuration({}), "scenarios": joined})["s"]
    for i, parallel in enumerate(parallels):
        for rank, results in enumerate(ranks):
            got = results[i]["s"]
            assert got["differs"] == "", (parallel, rank)
            for step, (a, b) in enumerate(zip(got["losses"], alone["losses"], strict=True)):
                assert a == pytest.approx(b, rel=1e-4), (parallel, rank, step)
        for name, tensor in alone["state"].items():
            found = ranks[0][i]["s"]["state"][name]
            off = float((found - tensor).abs().max())
            assert torch.allclose(found, tensor, rtol=1e-4, atol=1e-4), f"{parallel}: {name} is off by {off:.3g}"
