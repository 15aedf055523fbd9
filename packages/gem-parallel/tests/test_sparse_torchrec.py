"""TorchRec's strategies behind the core's contract, in several processes on the CPU."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

pytest.importorskip("torchrec", reason="TorchRec is not installed")

from gem_core.batch import SparseGroup
from gem_core.config.schema import TableOptimizer
from gem_core.errors import ConfigError, DeviceError
from gem_core.testing.strategies import StrategyConformance, run_processes
from gem_core.train.mesh import Mesh
from gem_parallel.sparse import specs
from gem_parallel.sparse.config import Torchrec2dConfig, TorchrecConfig
from gem_parallel.sparse.simulate import Simulator, groups_of, joined, look_up, random_group, run_ranks, toy_loss, toy_tables
from gem_parallel.sparse.torchrec_tables import TorchrecTables, select

TABLES = toy_tables()
BUILD = {s.name: s.build for s in specs()}
UNEVEN = [[4, 3], [1, 0], [0, 6]]
PLANS = {
    "planner": {},
    "rows": {"sharding": "row"},
    "tables, weighted": {"sharding": "table", "weighted": True},
    "columns": {"sharding": "row", "tables": {"d": {"sharding": "column"}}},
    "rows and data": {"sharding": "row", "tables": {"b": {"sharding": "data"}, "c": {"sharding": "table"}}},
}


class TestPlanner(StrategyConformance):
    parallel: ClassVar = {"dense": "ddp", "sparse": "torchrec"}
    worlds = (2,)


class TestRows(StrategyConformance):
    parallel: ClassVar = {"dense": "ddp", "sparse": "torchrec", "torchrec": {"sharding": "row"}}
    worlds = (3,)


def task(name):
    return {
        "strategy": "torchrec", "config": PLANS[name], "model": 2, "steps": 6, "samples": UNEVEN, "optimizer": {"lr": 0.1, "eps": 1e-3},
        "weighted": "weighted" in name, "evaluate": True, "prefetch": name != "rows",
    }  # fmt: skip


def managed():
    """Every table takes raw ids far outside of its rows; new ids are given rows every second step. As many ids as rows."""
    config = {"sharding": "row", "zch_interval": 2, "tables": {n: {"ids": "zch"} for n in ("a", "b", "c", "d")}}
    found = {
        "strategy": "torchrec", "config": config, "model": 2, "steps": 40, "samples": [[6, 5], [4, 7]],
        "optimizer": {"lr": 0.1, "eps": 1e-3}, "evaluate": True, "factor": 1_000_003, "multiple": 4,
    }  # fmt: skip
    return found | {"then": {k: found[k] for k in ("strategy", "config", "model", "multiple")}}


TASKS = {name: task(name) for name in PLANS}
TASKS["columns"]["then"] = {"strategy": "torchrec", "config": {"sharding": "row"}, "model": 2}
TASKS["managed ids"] = managed()
TASKS["rows"]["then"] = {"strategy": "gem-2d", "config": {"exchange": "touched"}, "model": 1}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_processes(2, run_ranks, TASKS, tmp_path_factory.mktemp("two"), timeout=240)


@pytest.mark.parametrize("name", ["columns", "rows", "managed ids"])
def test_state_moves_to_another_plan_bit_for_bit(two, name):
    before, after = (joined([r[name][k] if k == "last" else r[name]["then"]["last"] for r in two]) for k in ("last", "then"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor), key
    for rank in two:
        for got, want in zip(rank[name]["then"]["steps"][0], rank[name]["steps"][-1]):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_managed_ids_have_rows_of_their_own(two):
    last = joined([r["managed ids"]["last"] for r in two])
    for table in ("a", "b", "c", "d"):
        ids, rows = last[f"{table}.zch_sorted_raw_ids"], last[f"{table}.zch_remapped_ids_mapping"]
        known = ids != 2**63 - 1
        assert rows.unique().numel() == rows.numel(), "every slot has another row"
        assert ids[known].unique().numel() == int(known.sum())
        assert int(known.sum()) > ids.numel() // 3
        assert (last[f"{table}.zch_counts"][known] > 0).all()
        spread = [int((half != 2**63 - 1).sum()) for half in ids.chunk(2)]
        assert min(spread) > 0, "ids are spread over the ranks"


def test_managed_ids_are_trained_apart(two):
    """Two ids of one table give different rows in evaluation, though both are far outside of it."""
    found = torch.cat([r["managed ids"]["steps"][-1][4] for r in two])  # c, event by event
    assert found.unique(dim=0).shape[0] > found.shape[0] // 2


def check_columns(ranks, weights, last):
    """Each column part of d keeps its own accumulator: as if it were a table of its own. The state tells their mean."""
    parts = [d.clone() for d in weights["d"].chunk(2, 1)]
    states = [torch.zeros(11), torch.zeros(11)]
    rest = Simulator(TABLES, weights, model=2, replicas=1, schedule="mean", optimizer=TableOptimizer(lr=0.1, eps=1e-3))
    for step in range(6):
        groups, seeds = groups_of(task("columns"), TABLES, step), [7 * step, 7 * step + 1]
        rest.weights[0]["d"] = torch.cat(parts, 1)
        gradient = torch.zeros(11, 8)
        for group, seed in zip(groups, seeds):
            leaves = {n: w.clone().requires_grad_() for n, w in rest.weights[0].items()}
            toy_loss(look_up(TABLES, leaves, group), seed).backward()
            gradient += leaves["d"].grad / 2
        for rank, want in enumerate(rest.step(groups, seeds)):
            for rows, got in zip(want.values(), ranks[rank]["steps"][step]):
                assert torch.allclose(got, rows, rtol=2e-5, atol=2e-5)
        for part, state, g in zip(parts, states, gradient.chunk(2, 1)):
            state += g.square().mean(1)
            part -= 0.1 * g / (state.sqrt() + 1e-3).unsqueeze(1)
    torch.testing.assert_close(last["d.weight"], torch.cat(parts, 1), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(last["d.accumulator"], sum(states) / 2, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", list(PLANS))
def test_equals_unsharded_training(two, name):
    ranks = [r[name] for r in two]
    first, last = joined([r["first"] for r in ranks]), joined([r["last"] for r in ranks])
    weights = {t.name: first[f"{t.name}.weight"] for t in TABLES.tables}
    assert not any(w.isnan().any() for w in weights.values())
    if name == "columns":
        check_columns(ranks, weights, last)
        return
    simulator = Simulator(TABLES, weights, model=2, replicas=1, schedule="mean", optimizer=TableOptimizer(lr=0.1, eps=1e-3))
    for step in range(6):
        for rank, want in enumerate(simulator.step(groups_of(task(name), TABLES, step), [7 * step, 7 * step + 1])):
            for key, rows, got in zip(want, want.values(), ranks[rank]["steps"][step]):
                assert torch.allclose(got, rows, rtol=2e-5, atol=2e-5), f"step {step}, rank {rank}, {key}"
    for table, weight in simulator.weights[0].items():
        torch.testing.assert_close(last[f"{table}.weight"], weight, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(last[f"{table}.accumulator"], simulator.states[0][table], rtol=2e-5, atol=2e-5)


def test_a_group_becomes_a_keyed_jagged_tensor_and_back_without_a_copy():
    group = random_group(TABLES, 4, 1, weighted=True)
    there = group.to_kjt()
    assert there.keys() == list(group.keys)
    back = SparseGroup.from_kjt(there)
    for tensors in (
        (group.values, there.values(), back.values),
        (group.lengths, there.lengths(), back.lengths),
        (group.weights, there.weights(), back.weights),
    ):
        assert len({t.data_ptr() for t in tensors}) == 1
    for key in group.keys:
        assert torch.equal(there[key].values(), group[key].values)
        assert torch.equal(back[key].values, group[key].values)
    part = select(group, list(group.keys[1:3]))
    assert part.values.data_ptr() == group[group.keys[1]].values.data_ptr()
    swapped = select(group, [group.keys[2], group.keys[0]])
    assert torch.equal(swapped[group.keys[0]].values, group[group.keys[0]].values)


def test_replicas_are_refused_by_one_dimension():
    with pytest.raises(ConfigError, match=r"parallel.replica = 2 asks for replicas"):
        BUILD["torchrec"](TABLES, Mesh(4, model=2, replica=2), TorchrecConfig())


def test_two_dimensions_need_cuda():
    with pytest.raises(DeviceError, match=r'runs on CUDA only(.|\n)*sparse = "gem-2d"'):
        BUILD["torchrec-2d"](TABLES, Mesh(4, model=2, replica=2), Torchrec2dConfig())


def test_a_process_group_is_needed():
    with pytest.raises(DeviceError, match="start with torchrun"):
        BUILD["torchrec"](TABLES, Mesh(1), TorchrecConfig())


def test_options_of_an_unknown_table_are_refused():
    config = TorchrecConfig(tables={"x": {"sharding": "row"}})
    with pytest.raises(ConfigError, match=r"no table 'x'(.|\n)*a, b, c, d"):
        BUILD["gem-2d"](TABLES, Mesh(1), {s.name: s for s in specs()}["gem-2d"].config_type(tables=config.tables))


@pytest.mark.parametrize("saves", [(), (1,), (3, 4)])
def test_replicas_are_averaged_so_many_steps_after_the_last_time(saves):
    """Telling the state averages too, and what is resumed from it has the next average in the same step as what went on."""

    class Replicas:
        def sync(self, **_):
            averaged.append(step)

    def begun():
        tables = TorchrecTables.__new__(TorchrecTables)
        torch.nn.Module.__init__(tables)
        tables.config, tables.device = Torchrec2dConfig(sync_every=3), torch.device("cpu")
        tables.steps, tables.replicated, tables._ahead, tables._module = 0, {}, None, [Replicas()]
        return tables

    plain, averaged = begun(), []
    for step in range(1, 10):
        plain.after_backward(torch.tensor(True))
        if step in saves:
            plain._flush()
    whole = list(averaged)
    assert whole == {(): [3, 6, 9], (1,): [1, 4, 7], (3, 4): [3, 3, 4, 7]}[saves]
    for save in saves:
        averaged.clear()
        resumed = begun()
        for step in range(save + 1, 10):
            resumed.after_backward(torch.tensor(True))
            if step in saves:
                resumed._flush()
        assert averaged == [at for at in whole if at > save]
