"""The guard inside the trainer: NE drift against a shadow evaluation in bf16, decisions in the run folder and in checkpoints."""

from __future__ import annotations

import json
import math

import pytest
import torch

import gem_precision.linear_op as linear_module
from gem_core.config import load_config, resolve
from gem_core.train import quickstart_path, train
from gem_core.train.build import build_parts
from gem_core.train.heldout import HeldOut
from gem_core.train.offline import evaluate_run
from gem_core.train.runfolder import RunFolder
from gem_core.train.runtime import runtime
from gem_precision.policy import mx_linear
from gem_precision.site import linear_levels

OPTIONS = {
    "train.steps": 16,
    "train.checkpoint_every": 8,
    "data.batch_size": 64,
    "data.eval_batch_size": 100,
    "data.synthetic.eval_rows": 256,
    "run.threads": 1,
    "eval.every": 100,
    "eval.group": "user_id",
    "precision.recipe": "mxfp8",
    "precision.mxfp8.guard.drift_every": 4,
    "precision.mxfp8.guard.drift_rows": 200,
    "precision.mxfp8.guard.max_drift": 0.006,
    "precision.mxfp8.guard.sample_every": 1000,
    "precision.mxfp8.guard.on_spike": "sample",
}
SITE = "layers.0.interaction.experts.0.fm.mlp.layers.1"


def config(**more):
    return load_config(quickstart_path(), OPTIONS | more)


@pytest.fixture
def damaged(monkeypatch):
    """The weight of SITE gets random signs whenever it is quantised for the forward pass; samples are too far apart to demote it."""
    real = linear_module.quantise
    generator = torch.Generator().manual_seed(0)

    def quantise(x, operand, **options):
        q = real(x, operand, **options)
        if tuple(x.shape) == (128, 64) and options.get("along", 1) == 1:
            q.data.view(torch.uint8).bitwise_xor_(torch.randint(0, 2, x.shape, generator=generator, dtype=torch.uint8) << 7)
        return q

    monkeypatch.setattr(linear_module, "quantise", quantise)


def decisions(folder) -> list[dict]:
    path = folder / "guard.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def guard_state(folder) -> dict:
    return RunFolder(folder).checkpoints.latest()[0].state("shared")["guard"]


def test_a_sound_run_does_not_drift(tmp_path):
    train(config(), run_dir=tmp_path / "run", quiet=True)
    assert decisions(tmp_path / "run") == []
    assert set(guard_state(tmp_path / "run")["levels"].values()) == {0}
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < abs(last["guard_drift"]) < 0.006


def test_drift_demotes_the_site_and_the_decision_outlives_the_process(tmp_path, damaged):
    folder = tmp_path / "run"
    train(config(), run_dir=folder, quiet=True)
    (found,) = decisions(folder)
    assert (found["site"], found["before"], found["after"], found["reason"]) == (SITE, "mxfp8", "bf16", "NE drift")
    assert found["step"] in (4, 8)
    assert found["evidence"]["ne"] > 1.006 * found["evidence"]["shadow_ne"]
    state = guard_state(folder)
    assert state["levels"][SITE] == len(linear_levels("mxfp8", mx_linear())) - 1
    assert [d["site"] for d in state["decisions"]] == [SITE]
    assert [level for name, level in state["levels"].items() if name != SITE] == [0] * (len(state["levels"]) - 1)
    # evaluating the run computes the demoted site in bf16; with the recipe's precision everywhere the damage would show
    value = evaluate_run(folder).results["ctr"]["ne"].value
    other = evaluate_run(folder, overrides=["precision.mxfp8.seed=1"]).results["ctr"]["ne"].value
    assert value == pytest.approx(json.loads((folder / "summary.json").read_text())["tasks"]["ctr"]["ne"], rel=1e-6)
    assert other > value + 1e-4
    # a resumed run goes on at the demoted level and tells nothing twice
    train(config(**{"train.steps": 20}), run_dir=folder, resume=True, quiet=True)
    assert decisions(folder) == [found]
    assert guard_state(folder)["levels"] == state["levels"]


def test_held_out_slice_is_the_same_at_every_call():
    """And it holds whole batches of at least as many rows as asked for."""
    resolved = resolve(config())
    with runtime(resolved.config) as rt:
        parts = build_parts(resolved, rt, trains=False)
        held = HeldOut(resolved, parts, rt)
        parts.model.train()
        first = held(200)
        assert first == held(200)
        assert parts.model.training
        assert sum(b.size for b in held._kept[200].batches) == 200
        assert math.isfinite(first)
