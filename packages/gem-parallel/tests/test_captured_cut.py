"""Captured steps with tables of this package: cut at the look-ups, they train as one process does on the joined batch.

The cut is the same code with and without graphs; here it runs without.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec

import pytest
import torch

from gem_core.errors import ConfigError
from gem_core.hookspecs import KernelSpec
from gem_core.ops import adamw
from gem_core.ops.contract import YES
from gem_core.ops.dispatch import offering
from gem_core.plugins import manager
from gem_core.testing.strategies import StrategyConformance, run_processes, run_training, train_rank
from gem_core.train import captured, replicas
from gem_core.train import step as train_step
from gem_core.train.mesh import Mesh
from gem_parallel.dense.ddp import check_mesh

GEM_2D = {"dense": "ddp", "sparse": "gem-2d"}
STRATEGIES = {
    1: {"gem-2d": {"sparse": "gem-2d"}, **({"fbgemm": {"sparse": "fbgemm"}} if find_spec("fbgemm_gpu") else {})},
    2: {
        "core": {"dense": "ddp"},
        "rows over two": {**GEM_2D, "gem-2d": {"sharding": "row"}},
        "touched rows": {**GEM_2D, "replica": 2, "model": 1, "gem-2d": {"exchange": "touched"}},
        **({"torchrec": {"dense": "ddp", "sparse": "torchrec"}} if find_spec("torchrec") else {}),
    },
}
SIZES = {1: [[(9,)], [(5,)], [(9,)], [(9,)], [(5,)]], 2: [[(6, 6)], [(9, 2)], [(6, 6)], [(0, 5)], [(6, 6)]]}


def captured_ranks(rank, world, task):
    """`train_rank` for each sparse strategy, its steps cut; a device that records is not asked for. Gradients travel at the end, or as
    between hosts."""
    train_step.check_capture = lambda *_: None
    replicas.BUCKET = 4096
    found = {}
    for name, parallel in task["parallel"].items():
        os.environ["LOCAL_WORLD_SIZE"] = "1" if name == "touched rows" else str(world)
        config = StrategyConformance.config(parallel)
        config["train"] = {**config["train"], "capture": True}
        found[name] = train_rank(rank, world, {"config": config, "scenarios": {"s": task["sizes"]}})["s"]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_cut_steps_train_as_one_process_does(world, tmp_path):
    """Even and uneven ranks and one without samples; losses, gradient norms, parameters, tables and their accumulators."""
    sizes = SIZES[world]
    ranks = run_processes(world, captured_ranks, {"parallel": STRATEGIES[world], "sizes": sizes}, tmp_path)
    joined = [[(sum(parts),) for parts in micro] for micro in sizes]
    alone = train_rank(0, 1, {"config": StrategyConformance.config({}), "scenarios": {"s": joined}})["s"]
    for name in STRATEGIES[world]:
        for rank, found in enumerate(ranks):
            for step, (got, want) in enumerate(zip(found[name]["losses"], alone["losses"], strict=True)):
                assert got == pytest.approx(want, rel=1e-5), (name, rank, step)
            assert found[name]["differs"] == "", name
        for key, value in alone["state"].items():
            off = float((ranks[0][name]["state"][key] - value).abs().max())
            assert off <= 1e-5 * (1 + float(value.abs().max())), (name, key, off)


@pytest.mark.parametrize("name", list(STRATEGIES[1]))
def test_a_step_that_does_not_count_leaves_the_tables_alone(name, monkeypatch):
    """Its gradients are NaN; the tables make them zeros themselves, and the steps after it train on."""
    monkeypatch.setattr(train_step, "check_capture", lambda *_: None)
    real_loss, real_cut, changed = train_step.TrainStep._loss, train_step.TrainStep._cut, []

    def loss(self, output, batch):
        return real_loss(self, output, batch) * (float("nan") if len(changed) == 2 else 1.0)

    def cut(self, room, fed, following):
        def held():
            return [part.clone() for _, shards in self.parts.tables.state_items() for _, part in shards.parts]

        before = held()
        assert before
        vector = real_cut(self, room, fed, following)
        changed.append(not all(torch.equal(one, two) for one, two in zip(before, held(), strict=True)))
        return vector

    monkeypatch.setattr(train_step.TrainStep, "_loss", loss)
    monkeypatch.setattr(train_step.TrainStep, "_cut", cut)
    monkeypatch.setattr(captured, "_zero_unless", lambda *_: pytest.fail("a pass of its own"))
    config = StrategyConformance.config(STRATEGIES[1][name])
    config["train"] = {**config["train"], "capture": True, "nonfinite": "skip"}
    train_rank(0, 1, {"config": config, "scenarios": {"s": [[(9,)]] * 5}})
    assert changed == [True, True, False, True, True]


def with_copies(rank, world, task):
    """`train_rank` in bf16 with AdamW that writes the weights' copies; and how many it wrote."""
    train_step.check_capture = lambda *_: None
    train_step.KEPT = task["least"]
    config = StrategyConformance.config(task["parallel"])
    config["train"] = {**config["train"], "capture": world > 1}
    config["precision"] = {"recipe": "bf16"}
    written = []

    def forward(_problem, update):
        written.append(update.gradient.dtype)
        return adamw.reference(update), ()

    with offering(KernelSpec(adamw.OP, "definition", forward, None, lambda _: YES, 10)):
        found = train_rank(rank, world, {"config": config, "scenarios": {"s": task["sizes"]}})["s"]
    assert all(dtype == torch.bfloat16 for dtype in written)
    return {**found, "written": len(written)}


@pytest.mark.skipif("bf16" not in {s.name for s in manager().offers("recipe")}, reason="nobody offers the recipe bf16")
def test_two_processes_average_gradients_of_copies(tmp_path):
    """Gradients that weights' bf16 copies have are averaged in bf16; losses are those without copies up to rounding."""
    task = {"parallel": {"dense": "ddp"}, "sizes": SIZES[2], "least": 50}
    both = run_processes(2, with_copies, task, tmp_path)
    (plain, _) = run_processes(2, with_copies, {**task, "least": 1 << 30}, tmp_path)
    assert plain["written"] == 0
    for found in both:
        assert found["written"] == both[0]["written"] > 50
        assert found["differs"] == ""
        for got, want in zip(found["losses"], plain["losses"], strict=True):
            assert got == pytest.approx(want, rel=2e-3)


def test_a_captured_run_evaluates_saves_and_resumes(tmp_path, monkeypatch):
    """The whole trainer: losses are those of steps as usual, and after a stop the run goes on as if there had been none."""
    monkeypatch.setattr(train_step, "check_capture", lambda *_: None)
    rows = {"rows": 320, "eval_rows": 40, "test_rows": 40, "users": 30, "length": {"law": "lognormal", "mean": 4.0, "max": 20}}

    def losses(name, *, capture, **task):
        train = {"steps": 12, "log_every": 1, "tensorboard": False, "checkpoint_every": 6, "capture": capture}
        config = {
            "run": {"device": "cpu", "seed": 1}, "data": {"batch_size": 16, "synthetic": rows}, "eval": {"every": 4}, "train": train,
            "model": {"name": "gem", "layers": 1, "dim": 8, "embedding_dim": 8}, "parallel": {"sparse": "gem-2d"},
        }  # fmt: skip
        result = run_training(0, 1, {"config": config, "run_dir": str(tmp_path / name), **task})
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return result["status"], [r["loss"] for r in map(json.loads, lines)]

    usual, straight = losses("usual", capture=False), losses("straight", capture=True)
    assert straight[1] == pytest.approx(usual[1], rel=1e-5)
    assert losses("broken", capture=True, stop_at=7) == ("interrupted", straight[1][:7])
    assert losses("broken", capture=True, resume=True) == ("finished", straight[1])


def test_ddp_leaves_averaging_to_captured_steps():
    """A mesh that asks for more than copies is refused as ever."""
    spec = manager().find("dense_strategy", "ddp")
    spec.averages(Mesh(2))
    with pytest.raises(ConfigError, match="asks to split it"):
        spec.averages(Mesh(4, 2, 2))
    assert spec.averages is check_mesh
    assert manager().find("dense_strategy", "fsdp").averages is None
