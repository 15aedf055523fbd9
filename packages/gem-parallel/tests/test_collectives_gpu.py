"""All-gathers by the copy engines of real GPUs against NCCL's, bit for bit; training with them against training without."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from gem_core.config.schema import TableOptimizer
from gem_core.ops import use_policy
from gem_core.testing.strategies import StrategyConformance, run_processes, train_rank
from gem_core.train.collective import GatherOptions, Topology
from gem_parallel.collectives import gatherer, topology
from gem_parallel.collectives.copy_engine import CopyEngineGather, HierarchicalGather
from gem_parallel.collectives.process_group import all_gather

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
WORLD = 4 if torch.cuda.device_count() >= 4 else 2
BACKEND = "cpu:gloo,cuda:nccl"


def gather_often(rank, world, task):
    """Random sizes and types; results are read on another stream, and products run beside, so that streams get out of step."""
    device = torch.device("cuda", rank)
    hosts = tuple(i // task["mates"] for i in range(world))
    options = GatherOptions(device, Topology("cuda", hosts), slots=task["slots"])
    kind = CopyEngineGather if task["mates"] == world else HierarchicalGather
    made = kind(dist.group.WORLD, options)
    sizes, mine = random.Random(5), random.Random(rank)
    reader, wrong = torch.cuda.Stream(), torch.zeros(1, device=device)
    square = torch.randn(2048, 2048, device=device)
    for i in range(task["iterations"]):
        size = sizes.choice([0, 1, sizes.randrange(1000), sizes.randrange(task["most"])])
        dtype = sizes.choice([torch.float32, torch.bfloat16, torch.uint8])
        part = torch.full((size,), (i * 7 + rank * 13) % 251, dtype=dtype, device=device)
        part[: size // 2] += rank
        expected = torch.empty(size * world, dtype=dtype, device=device)
        if size:
            all_gather(expected, part)
        out = made.allocate(size * world, dtype)
        out.view(world, size)[rank] = part
        if mine.random() < 0.2:
            square = square @ square.clamp(-1, 1) * 1e-3
        made.gather(out)
        reader.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(reader):
            wrong += (out != expected).any()
        torch.cuda.current_stream().wait_stream(reader)
        del out
    return {"wrong": float(wrong), "told": made.describe()}


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("mates", sorted({WORLD, WORLD // 2}))
def test_equals_nccl_over_a_thousand_iterations(mates, slots, tmp_path):
    task = {"iterations": 1000, "most": 3_000_000, "mates": mates, "slots": slots}
    for found in run_processes(WORLD, gather_often, task, tmp_path, timeout=90, backend=BACKEND):
        assert found["wrong"] == 0, found["told"]


def chosen(rank, world, task):
    device = torch.device("cuda", rank)
    options = GatherOptions(device, topology(dist.group.WORLD, device))
    return {name: gatherer(name, dist.group.WORLD, options)[1] for name in ("default", "low-cta", "copy-engine")}


def test_the_copy_engine_is_used(tmp_path):
    for found in run_processes(WORLD, chosen, {}, tmp_path, timeout=60, backend=BACKEND):
        assert found["copy-engine"].startswith(f"copy-engine: copy engine, {WORLD} members of one host"), found
        assert found["low-cta"].endswith("at most 8 SMs")


def zero_cta(rank, world, task):
    """NCCL's own copy-engine collectives where the host registers symmetric windows; else their refusal is told."""
    device = torch.device("cuda", rank)
    made, told = gatherer("zero-cta", dist.group.WORLD, GatherOptions(device, topology(dist.group.WORLD, device)))
    out = made.allocate(world * 1000, torch.float32)
    out.view(world, 1000)[rank] = float(rank)
    made.gather(out)
    return {"told": told, "result": out.cpu()}


def test_zero_ctas_or_the_reason(tmp_path):
    for found in run_processes(WORLD, zero_cta, {}, tmp_path, timeout=60, backend=BACKEND):
        assert torch.equal(found["result"], torch.arange(float(WORLD)).repeat_interleave(1000))
        assert found["told"].startswith("zero-cta: ") or "; not zero-cta, because " in found["told"]
        print(found["told"])


MODEL = {"name": "gem", "layers": 3, "dim": 16, "embedding_dim": 16, "interaction": {"experts": ["wukong", "dcnv2", "wukong", "dot"]}}


def train_pair(rank, world, task):
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = {"s": [[(3,) * world], [(5, *range(world - 1))], [(3,) * world], [(1,) * world, (2,) * world]]}
    config = {**StrategyConformance.config({"dense": "fsdp"}), "model": MODEL, "run": {"device": "cuda", "seed": 5}}
    with use_policy("reference"):  # nothing to compile
        return [
            train_rank(rank, world, {"config": {**config, "parallel": {**config["parallel"], "fsdp": options}}, "scenarios": sizes})["s"]
            for options in ({"prefetch": 2}, {"prefetch": 2, "collective": "copy-engine"}, {"prefetch": 2})
        ]


def test_fsdp_trains_the_same(tmp_path):
    for first, copied, again in run_processes(WORLD, train_pair, {}, tmp_path, timeout=120, backend=BACKEND):
        repeats = first["losses"] == again["losses"]  # whether the kernels of the model repeat themselves
        for a, b in zip(first["losses"], copied["losses"], strict=True):
            assert a == (b if repeats else pytest.approx(b, rel=1e-6))


def means(rank, world, task):
    """Sizes of one chunk, of many, and of a part of one; the next mean begins while others still read of the last."""
    device, off = torch.device("cuda", rank), torch.zeros((), device=torch.device("cuda", rank))
    made = CopyEngineGather(dist.group.WORLD, GatherOptions(device, topology(dist.group.WORLD, device)))
    g = random.Random(3)
    for _ in range(task["iterations"]):
        n = g.choice([1, g.randrange(5000), 16 * g.randrange(100_000), 60_000_000])
        whole = torch.randn(world * n, device=device)
        expected, out = torch.empty(n, device=device), torch.full((n,), float("nan"), device=device)
        dist.reduce_scatter_tensor(expected, whole, op=dist.ReduceOp.AVG)
        made.mean(out, whole)
        off = torch.maximum(off, (out - expected).abs().max())
    return {"off": float(off)}


def test_means_equal_nccl(tmp_path):
    for found in run_processes(WORLD, means, {"iterations": 40}, tmp_path, timeout=90, backend=BACKEND):
        assert found["off"] < 1e-5  # nan is not


def tables_rank(rank, world, task):
    from gem_parallel.sparse.simulate import run_rank

    return run_rank(rank, world, task, f"cuda:{rank}")


@pytest.mark.parametrize("schedule", ["article", "torchrec"])
def test_tables_equal_their_simulator(schedule, tmp_path):
    pytest.importorskip("fbgemm_gpu", reason="FBGEMM is not installed")
    from gem_parallel.sparse.simulate import Simulator, groups_of, joined, toy_tables

    task = {
        "strategy": "gem-2d", "model": 1, "steps": 10, "samples": [[4, 3, 0, 5][:WORLD], [1, 0, 6, 2][:WORLD]], "weighted": True,
        "prefetch": True, "optimizer": {"lr": 0.1, "eps": 1e-3},
        "config": {"schedule": schedule, "sharding": "row", "unit_mb": 1, "collective": "copy-engine"},
    }  # fmt: skip
    ranks = run_processes(WORLD, tables_rank, task, tmp_path, timeout=90, backend=BACKEND)
    tables, first, last = toy_tables(), joined([r["first"] for r in ranks]), joined([r["last"] for r in ranks])
    weights = {t.name: first[f"{t.name}.weight"] for t in tables.tables}
    simulator = Simulator(
        tables, weights, model=1, replicas=WORLD, schedule=schedule, scale=float(WORLD), optimizer=TableOptimizer(lr=0.1, eps=1e-3)
    )
    for step in range(10):
        for rank, want in enumerate(simulator.step(groups_of(task, tables, step), [7 * step + r for r in range(WORLD)])):
            for got, rows in zip(ranks[rank]["steps"][step], want.values(), strict=True):
                torch.testing.assert_close(got, rows, rtol=2e-5, atol=2e-5)
    simulator.average()
    for name, weight in simulator.weights[0].items():
        torch.testing.assert_close(last[f"{name}.weight"], weight, rtol=2e-5, atol=2e-5)
