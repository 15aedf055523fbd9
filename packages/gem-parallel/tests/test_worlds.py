"""Unusual worlds: numbers of processes that are no power of two, tables with fewer rows, batches with fewer samples, 16-bit tables."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from gem_core.config.schema import TableOptimizer
from gem_core.testing.strategies import run_processes
from gem_core.train.mesh import Mesh
from gem_parallel.sparse import specs
from gem_parallel.sparse.config import Gem2dConfig
from gem_parallel.sparse.simulate import Simulator, groups_of, joined, random_group, run_ranks, toy_loss, toy_tables

TABLES = toy_tables()  # table "b" has five rows
ADAGRAD = {"lr": 0.1, "eps": 1e-3}
FEW = {3: [[4, 0, 2], [0, 0, 1], [1, 1, 0]], 6: [[1, 0, 2, 0, 0, 3], [0, 0, 0, 0, 1, 0], [2, 1, 1, 1, 1, 1]]}


def scenario(world, model, strategy="gem-2d", **config):
    return {
        "strategy": strategy, "config": config, "model": model, "steps": 6, "samples": FEW[world], "optimizer": ADAGRAD, "prefetch": True,
        "evaluate": True,
    }  # fmt: skip


def worlds(world):
    found = {
        f"{exchange} {model} x {world // model}": scenario(world, model, exchange=exchange, sharding="row", chunks=chunks)
        for model in (1, 2, 3, 6)
        if world % model == 0
        for exchange, chunks in (("whole", 2), ("touched", 1))
    }
    found["whole, torchrec order"] = scenario(world, world // 3, exchange="whole", schedule="torchrec", sharding="table")
    found["copies of peers' memory"] = scenario(world, 1, exchange="whole", collective="copy-engine")
    found["copies of peers' memory, hosts of two and one"] = scenario(world, 1, exchange="whole", collective="copy-engine", per_host=2)
    if find_spec("torchrec") is not None:
        found["torchrec rows"] = scenario(world, world, "torchrec", sharding="row")
        found["torchrec tables"] = scenario(world, world, "torchrec", sharding="table")
    return found


def rule(task, world):
    """Schedule and momentum scale of the simulator."""
    replicas = world // task["model"]
    if task["config"].get("exchange", "touched") == "touched" or replicas == 1:
        return "mean", 1.0
    return task["config"].get("schedule", "article"), float(replicas)


@pytest.mark.parametrize("world", [3, 6])
def test_equals_its_simulator(world, tmp_path):
    tasks = worlds(world)
    ranks = run_processes(world, run_ranks, tasks, tmp_path, timeout=240)
    for name, task in tasks.items():
        first, last = (joined([r[name][k] for r in ranks]) for k in ("first", "last"))
        schedule, scale = rule(task, world)
        weights = {t.name: first[f"{t.name}.weight"] for t in TABLES.tables}
        assert not any(w.isnan().any() for w in weights.values()), f"{name}: some rows are held by no rank"
        simulator = Simulator(
            TABLES, weights, model=task["model"], replicas=world // task["model"], schedule=schedule, scale=scale,
            optimizer=TableOptimizer(**ADAGRAD),
        )  # fmt: skip
        for step in range(task["steps"]):
            expected = simulator.step(groups_of(task, TABLES, step), [7 * step + r for r in range(world)])
            for rank, want in enumerate(expected):
                for got, rows in zip(ranks[rank][name]["steps"][step], want.values()):
                    assert torch.allclose(got, rows, rtol=2e-5, atol=2e-5), f"{name}: step {step}, rank {rank}"
        simulator.average()
        for table, weight in simulator.weights[0].items():
            assert torch.allclose(last[f"{table}.weight"], weight, rtol=2e-5, atol=2e-5), f"{name}: {table}"
            assert torch.allclose(last[f"{table}.accumulator"], simulator.states[0][table], rtol=2e-5, atol=2e-5), f"{name}: {table}"


def small(dtype, strategy="gem-2d", model=1, **config):
    return scenario(3, model, strategy, dtype=dtype, **config) | {"steps": 2}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_tables_begin_alike_under_every_plan_and_move_bit_for_bit(dtype, tmp_path):
    """Rows are rounded at random before they are dealt out, or one plan's first rows would differ from another's."""
    then = {"strategy": "gem-2d", "config": {"dtype": dtype, "exchange": "whole", "chunks": 3}, "model": 1}
    tasks = {
        "one copy": small(dtype, model=3, sharding="row") | {"then": then},
        "whole tables": small(dtype, model=3, sharding="table") | {"then": then},
        "whole": small(dtype, exchange="whole") | {"then": {**then, "config": {"dtype": dtype, "sharding": "row"}, "model": 3}},
        "touched": small(dtype, exchange="touched") | {"then": then},
    }
    ranks = run_processes(3, run_ranks, tasks, tmp_path, timeout=120)
    begun = {name: joined([r[name]["first"] for r in ranks]) for name in tasks}
    for name, states in begun.items():
        for key, tensor in states.items():
            assert torch.equal(tensor, begun["one copy"][key]), (name, key)
    for name in tasks:
        before, after = joined([r[name]["last"] for r in ranks]), joined([r[name]["then"]["last"] for r in ranks])
        assert before["a.weight"].dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        for key, tensor in before.items():
            assert torch.equal(after[key], tensor), (name, key)


def trained(module, steps):
    for step in steps:
        toy_loss(module(random_group(TABLES, 6, step)), step).backward()


def on_one(dtype="bf16"):
    spec = next(s for s in specs() if s.name == "gem-2d")
    module = spec.build(TABLES, Mesh(1), Gem2dConfig(dtype=dtype, kernel="torch"))
    module.configure_optimizer(TableOptimizer(**ADAGRAD))
    module.set_learning_rate(0.1)
    return module.train()


def test_a_resumed_run_rounds_as_the_first_one_would_have():
    """With the generators of PyTorch that a checkpoint puts back."""
    torch.manual_seed(5)
    first = on_one()
    trained(first, range(3))
    kept, random = {name: held.parts[0][1].clone() for name, held in first.state_items()}, torch.get_rng_state()
    trained(first, range(3, 6))
    torch.manual_seed(6)
    second = on_one()
    for name, held in second.state_items():
        held.parts[0][1].copy_(kept[name])
    second.state_loaded()
    torch.set_rng_state(random)
    trained(second, range(3, 6))
    last = {name: held.parts[0][1] for name, held in first.state_items()}
    assert not torch.equal(last["a.weight"], kept["a.weight"])
    for name, held in second.state_items():
        assert torch.equal(held.parts[0][1], last[name]), name
