"""fsdp, hsdp and expert parallelism: every mesh trains as one process does."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from gem_core.errors import ConfigError
from gem_core.testing.strategies import StrategyConformance, run_processes, train_rank

MODEL = {
    "name": "gem", "layers": 2, "dim": 8, "embedding_dim": 8, "interaction": {"experts": ["wukong", "dcnv2", "wukong", "dot"]},
}  # fmt: skip


def meshes(world: int) -> list[dict[str, int]]:
    """Every (replicate, shard, expert) of ``world`` with expert 1 or 2."""
    found = []
    for expert in (1, 2) if world % 2 == 0 else (1,):
        rest = world // expert
        found += [{"replicate": r, "shard": rest // r, "expert": expert} for r in range(1, rest + 1) if rest % r == 0]
    return found


def configuration(parallel):
    return {**StrategyConformance.config(parallel), "model": MODEL}


def train_all(rank, world, task):
    """All meshes in one set of processes."""
    return [train_rank(rank, world, {"config": configuration(p), "scenarios": task["scenarios"]}) for p in task["parallels"]]


@pytest.mark.parametrize("world", [4, 6, 8])
def test_every_mesh_equals_one_process(world, tmp_path):
    sizes = [[(3,) * world], [(5, *range(world - 1))], [(3,) * world], [(0, *(2,) * (world - 1))], [(3,) * world]]
    parallels = [{"dense": "hsdp", **mesh} for mesh in meshes(world)]
    ranks = run_processes(world, train_all, {"parallels": parallels, "scenarios": {"s": sizes}}, tmp_path, timeout=300)
    joined = {"s": [[(sum(parts),) for parts in micro] for micro in sizes]}
    alone = train_rank(0, 1, {"config": configuration({}), "scenarios": joined})["s"]
    for i, parallel in enumerate(parallels):
        for rank, results in enumerate(ranks):
            got = results[i]["s"]
            assert got["differs"] == "", (parallel, rank)
            assert got["names"] == alone["names"], (parallel, rank)
            for step, (a, b) in enumerate(zip(got["losses"], alone["losses"], strict=True)):
                assert a == pytest.approx(b, rel=1e-5), (parallel, rank, step)
        for name, tensor in alone["state"].items():
            found = ranks[0][i]["s"]["state"][name]
            off = float((found - tensor).abs().max())
            assert torch.allclose(found, tensor, rtol=1e-5, atol=1e-5), f"{parallel}: {name} is off by {off:.3g}"


class TestFsdp(StrategyConformance):
    parallel: ClassVar = {"dense": "fsdp", "fsdp": {"reshard_after_forward": False, "prefetch": 2}}
    worlds = (2,)
    model = MODEL


class TestExperts(StrategyConformance):
    parallel: ClassVar = {"dense": "fsdp", "expert": 2, "fsdp": {"keep_last": 0, "accumulate": "whole"}}
    worlds = (2,)
    model = MODEL


def refused(rank, world, task):
    """The message of what building this configuration raises."""
    try:
        train_rank(rank, world, {"config": task, "scenarios": {"s": [[(2,) * world]]}})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("parallel", "model", "message"),
    [
        ({"dense": "fsdp", "replicate": 2}, {}, "replicate = 2 asks for copies"),
        ({"dense": "ddp", "expert": 2}, {}, 'choose dense = "fsdp" or "hsdp"'),
        ({"dense": "hsdp", "expert": 2}, {"interaction": {"experts": ["wukong"]}}, "1 / 2 processes is no whole number"),
        ({"dense": "hsdp", "expert": 2}, {"name": "din"}, "Din has no summed experts"),
        ({"dense": "fsdp", "fsdp": {"param_dtype": "bf16"}}, {}, 'recipe = "bf16"'),
        ({"dense": "hsdp", "shard": 3, "replicate": -1}, {}, "3 does not divide the world of 2 processes"),
    ],
)
def test_what_does_not_fit_is_refused(parallel, model, message, tmp_path):
    config = {**configuration(parallel), "model": {**MODEL, **model} if "name" not in model else model}
    for said in run_processes(2, refused, config, tmp_path):
        assert message in said


def test_a_dtype_an_axis_stays_near_fp32(tmp_path):
    pytest.importorskip("gem_precision")
    sizes = [[(3, 3)], [(5, 2)], [(0, 4)]]
    found = []
    for kind in ("fp32", "bf16"):
        config = configuration({"dense": "fsdp", "expert": 2, "fsdp": dict.fromkeys(("param_dtype", "reduce_dtype", "expert_dtype"), kind)})
        folder = tmp_path / kind
        folder.mkdir()
        task = {"config": {**config, "precision": {"recipe": "bf16"}}, "scenarios": {"s": sizes}}
        found.append(run_processes(2, train_rank, task, folder)[0]["s"])
    exact, rough = found
    assert exact["losses"] != rough["losses"]
    for a, b in zip(exact["losses"], rough["losses"], strict=True):
        assert b[0] == pytest.approx(a[0], rel=0.03)
    assert all(t.dtype == torch.float32 for name, t in rough["state"].items() if name.startswith("model.")), "masters stay fp32"


@pytest.mark.slow
def test_compiled_layers_under_sharding_and_experts(tmp_path):
    """The model is compiled layer by layer, so that gathers stay between the layers."""
    config = configuration({"dense": "fsdp", "expert": 2})
    sizes = [[(3, 3)], [(5, 2)]]
    compiled = {**config, "train": {**config["train"], "compile": True}}
    (found, _) = run_processes(2, train_rank, {"config": compiled, "scenarios": {"s": sizes}}, tmp_path, timeout=400)
    joined = {"s": [[(sum(parts),) for parts in micro] for micro in sizes]}
    alone = train_rank(0, 1, {"config": {**config, "parallel": {}}, "scenarios": joined})["s"]
    for a, b in zip(found["s"]["losses"], alone["losses"], strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    for name, tensor in alone["state"].items():
        assert torch.allclose(found["s"]["state"][name], tensor, rtol=1e-5, atol=1e-5), name
