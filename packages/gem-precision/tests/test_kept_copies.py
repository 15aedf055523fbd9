"""Recipe bf16 in the trainer where the optimizer writes the weights' bf16 copies itself: the run is the one without, resumed ones too."""

from __future__ import annotations

import json

import pytest
import torch

import gem_core.train.step as step_module
from gem_core.config import load_config
from gem_core.hookspecs import KernelSpec
from gem_core.ops import adamw
from gem_core.ops.contract import YES, no
from gem_core.ops.dispatch import offering
from gem_core.train import quickstart_path, train
from gem_core.train.runfolder import RunFolder

OPTIONS = {
    "train.steps": 12,
    "train.log_every": 1,
    "train.checkpoint_every": 6,
    "train.clip_norm": 0.5,
    "data.batch_size": 64,
    "data.synthetic.eval_rows": 256,
    "run.threads": 1,
    "eval.every": 6,
    "precision.recipe": "bf16",
}


@pytest.fixture
def kept(monkeypatch):
    """Updates of parameters with copies, by the definition; all but the smallest weights are kept."""
    monkeypatch.setattr(step_module, "KEPT", 100)
    updates = []

    def forward(_problem, update):
        updates.append(update)
        return adamw.reference(update), ()

    with offering(KernelSpec(adamw.OP, "definition", forward, None, lambda _: YES, 10)):
        yield updates


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    checkpoint = RunFolder(folder).checkpoints.latest()[0]
    return {**checkpoint.tensors("model"), **checkpoint.tensors("optimizer")}


def test_a_run_with_copies_is_the_one_without(tmp_path, kept):
    config = load_config(quickstart_path(), OPTIONS)
    train(config, run_dir=tmp_path / "whole", quiet=True)
    assert len(kept) >= 12 * 10
    assert all(u.copy is not None and u.gradient.dtype == torch.bfloat16 for u in kept)
    assert all(torch.equal(u.copy, u.parameter.bfloat16()) for u in kept[-10:])
    del kept[:]
    with offering(KernelSpec(adamw.OP, "definition", lambda *_: None, None, lambda _: no("not here"), 10)):
        train(config, run_dir=tmp_path / "plain", quiet=True)
    assert not kept
    torch.testing.assert_close(losses(tmp_path / "whole"), losses(tmp_path / "plain"), rtol=2e-3, atol=0.0)
    plain, whole = weights(tmp_path / "plain"), weights(tmp_path / "whole")
    assert plain.keys() == whole.keys()
    for name in plain:
        if name.endswith(".step"):
            assert torch.equal(plain[name], whole[name])

    train(load_config(quickstart_path(), {**OPTIONS, "train.steps": 6}), run_dir=tmp_path / "resumed", quiet=True)
    train(config, run_dir=tmp_path / "resumed", quiet=True, resume=True)
    again = weights(tmp_path / "resumed")
    assert all(torch.equal(again[name], value) for name, value in whole.items())
