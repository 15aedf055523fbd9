"""gem-2d in four and eight processes against the single-process simulators of the same rules."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from gem_core.config.schema import TableOptimizer
from gem_core.testing.strategies import run_processes
from gem_parallel.sparse.simulate import Simulator, groups_of, joined, look_up, run_ranks, toy_tables

TABLES = toy_tables()
ADAGRAD = {"lr": 0.1, "eps": 1e-3}
# With accumulators that no gradient can change in fp32, row-wise AdaGrad is exact SGD of rate lr / sqrt(1e12).
SGD = {"lr": 0.05e6, "eps": 1e-30, "initial_accumulator": 1e12}
UNEVEN = [[4, 3, 0, 5], [1, 0, 6, 2], [3, 3, 3, 3]]


def scenario(schedule="article", exchange="whole", *, model=2, optimizer=ADAGRAD, steps=10, samples=UNEVEN, weighted=False, **options):
    config = {"exchange": exchange, "unit_mb": 1, "sharding": "row", "tables": {"b": {"sharding": "table"}}, **options}
    if exchange == "whole":
        config["schedule"] = schedule
    prefetch = steps % 2 == 0
    return {
        "strategy": "gem-2d", "config": config, "model": model, "steps": steps, "samples": samples, "optimizer": optimizer,
        "weighted": weighted, "prefetch": prefetch, "evaluate": True,
    }  # fmt: skip


FOUR = {
    "article": scenario(),
    "article, fbgemm, chunks": scenario(kernel="fbgemm", chunks=2),
    "article, weighted, whole tables, one copy at a time": scenario(weighted=True, sharding="table", window=1),
    "article, four replicas": scenario(model=1, chunks=3),
    "article, plain adagrad": scenario(momentum_scale=1.0, steps=5),
    "torchrec, chunks": scenario("torchrec", chunks=4),
    "torchrec": scenario("torchrec"),
    "torchrec, fbgemm, weighted": scenario("torchrec", kernel="fbgemm", weighted=True),
    "torchrec, four replicas": scenario("torchrec", model=1),
    "touched": scenario(exchange="touched"),
    "touched, fbgemm, weighted": scenario(exchange="touched", kernel="fbgemm", weighted=True),
    "touched, four replicas": scenario(exchange="touched", model=1, sharding="auto"),
    "touched, rows in bf16": scenario(exchange="touched", model=1, output="bf16", steps=2),
    "article, rows in bf16": scenario(output="bf16", steps=2),
    "article, copies of peers' memory": scenario(collective="copy-engine", chunks=2),
    "torchrec, copies of peers' memory": scenario("torchrec", collective="copy-engine", samples=[[4, 3, 0, 5], [1, 0, 6, 2]]),
    "article, copies in two hosts of two": scenario(model=1, collective="copy-engine", per_host=2),
    "no replicas": scenario(model=4, weighted=True),
    "one sgd step, article": scenario(optimizer=SGD, steps=1, momentum_scale=1.0),
    "one sgd step, torchrec": scenario("torchrec", optimizer=SGD, steps=1, momentum_scale=1.0),
    "one sgd step, touched": scenario(exchange="touched", optimizer=SGD, steps=1),
}
if find_spec("fbgemm_gpu") is None:
    FOUR = {name: task for name, task in FOUR.items() if "fbgemm" not in name}
WIDE = [[2, 0, 3, 1, 4, 0, 2, 2], [1, 2, 1, 2, 0, 3, 1, 1]]
EIGHT = {
    "article": scenario(samples=WIDE, model=4),
    "torchrec": scenario("torchrec", samples=WIDE, model=2),
    "touched": scenario(exchange="touched", samples=WIDE, model=2, weighted=True),
    "ranks without a table, rows in bf16": scenario(samples=WIDE, model=8, sharding="table", output="bf16", steps=2),
}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_processes(4, run_ranks, FOUR, tmp_path_factory.mktemp("four"), timeout=240)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return run_processes(8, run_ranks, EIGHT, tmp_path_factory.mktemp("eight"), timeout=240)


def check(ranks, task, schedule, scale):
    world = len(ranks)
    rounding = 2e-2 if task["config"].get("output") == "bf16" else 2e-5
    state = joined([r["first"] for r in ranks])
    weights = {t.name: state[f"{t.name}.weight"] for t in TABLES.tables}
    assert not any(w.isnan().any() for w in weights.values()), "some rows are held by no rank"
    simulator = Simulator(
        TABLES, weights, model=task["model"], replicas=world // task["model"], schedule=schedule, scale=scale,
        optimizer=TableOptimizer(**task["optimizer"]),
    )  # fmt: skip
    for step in range(task["steps"]):
        expected = simulator.step(groups_of(task, TABLES, step), [7 * step + r for r in range(world)])
        for rank, want in enumerate(expected):
            for key, rows, got in zip(want, want.values(), ranks[rank]["steps"][step]):
                close = torch.allclose(got.float(), rows, rtol=rounding, atol=rounding)
                assert close, f"step {step}, rank {rank}, {key}: off by {float((got - rows).abs().max()):.3g}"
    simulator.average()
    last = joined([r["last"] for r in ranks])
    for name, weight in simulator.weights[0].items():
        torch.testing.assert_close(last[f"{name}.weight"], weight, rtol=rounding, atol=rounding)
        torch.testing.assert_close(last[f"{name}.accumulator"], simulator.states[0][name], rtol=rounding, atol=rounding)
    return weights, last


def rule(name, task):
    if task["config"]["exchange"] == "touched":
        return "mean", 1.0
    replicas = (8 if task["samples"] is WIDE else 4) // task["model"]
    return task["config"]["schedule"], task["config"].get("momentum_scale", replicas)


@pytest.mark.parametrize("name", list(FOUR))
def test_equals_its_simulator_in_four_processes(four, name):
    task = FOUR[name]
    check([r[name] for r in four], task, *rule(name, task))


@pytest.mark.parametrize("name", list(EIGHT))
def test_equals_its_simulator_in_eight_processes(eight, name):
    task = EIGHT[name]
    check([r[name] for r in eight], task, *rule(name, task))


@pytest.mark.parametrize("name", [n for n in FOUR if n.startswith("one sgd step")])
def test_one_sgd_step_equals_unsharded_sgd_with_the_mean_gradient(four, name):
    weights, last = check([r[name] for r in four], FOUR[name], "mean", 1.0)
    assert any(not torch.equal(last[f"{n}.weight"], w) for n, w in weights.items())


def test_momentum_scaling_matters(four):
    """The scaled accumulators give larger steps; without this the comparison above would not notice a missing scale."""
    scaled, plain = (joined([r[n]["last"] for r in four])["a.weight"] for n in ("article", "article, plain adagrad"))
    assert float((scaled - plain).abs().max()) > 1e-2


def test_initial_rows_do_not_depend_on_the_plan(four):
    states = [joined([r[n]["first"] for r in four]) for n in FOUR]
    for state in states[1:]:
        for name, tensor in states[0].items():
            if name.endswith(".weight"):
                assert torch.equal(state[name], tensor)


def test_evaluation_reads_the_trained_rows(four):
    """Under the article's order and with touched rows, what evaluation looks up is what the final state holds."""
    for name in ("article", "touched"):
        task, ranks = FOUR[name], [r[name] for r in four]
        last = joined([r["last"] for r in ranks])
        for rank, group in enumerate(groups_of(task, TABLES, 0)):
            found = look_up(TABLES, {t.name: last[f"{t.name}.weight"] for t in TABLES.tables}, group)
            for got, want in zip(ranks[rank]["steps"][-1], found.values()):
                torch.testing.assert_close(got, want[0] if isinstance(want, tuple) else want, rtol=1e-5, atol=1e-5)


def test_full_copies_are_gone_after_forward(four):
    """[after forward, after backward] of every step."""
    for name in FOUR:
        replicas = 4 // FOUR[name]["model"]
        for rank in four:
            memory = rank[name]["memory"]
            forward, backward = memory[::2], memory[1::2]
            assert not any(forward), name
            if FOUR[name]["config"]["exchange"] == "whole" and replicas > 1:
                assert all(backward), "copies live from backward to the next forward"
            else:
                assert not any(backward)
