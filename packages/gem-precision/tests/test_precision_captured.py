"""``train.capture`` with a guarded recipe: replayed steps are the steps, also around samples and moves of a site."""

from __future__ import annotations

import json

import pytest
import torch

from gem_core.config import load_config
from gem_core.train import captured, quickstart_path, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8"])
def test_captured_training_is_the_training(recipe, tmp_path, monkeypatch):
    """Losses of 24 steps, the guard sampling every fifth, a site at level 1 from the twelfth on: the same with recorded steps as with steps
    computed as usual in the same rooms."""
    options = {
        "train.steps": 24, "train.capture": True, "train.log_every": 1, "data.batch_size": 256, "data.synthetic.eval_rows": 64,
        "precision.recipe": recipe, f"precision.{recipe}.allow_slow": True, f"precision.{recipe}.guard.sample_every": 5,
        f"precision.{recipe}.guard.max_demotions": 1, "train.tensorboard": False,
    }  # fmt: skip

    class Demotes:
        def __init__(self):
            self.runs = 0

        def on_start(self, info):
            self.guard = info.model.precision_guard

        def on_step(self, info, record):
            if info.step == 11:
                name = next(iter(self.guard.sites))
                self.guard._demote(11, self.guard.sites[name], 1, "by hand", {})

    real = captured.Captured._record
    recorded = []

    def run(records: bool) -> list[float]:
        monkeypatch.setattr(
            captured.Captured, "_record", lambda self, found: (recorded.append(found.state), real(self, found)) if records else None
        )
        folder = tmp_path / f"{recipe}-{records}"
        train(load_config(quickstart_path(), options), run_dir=folder, quiet=True, callbacks=[Demotes()])
        (move,) = [json.loads(line) for line in (folder / "guard.jsonl").read_text().splitlines()]
        assert (move["step"], move["reason"]) == (11, "by hand")
        return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]

    usual, replayed = run(False), run(True)
    assert len(usual) == len(replayed) == 24
    assert {sum(state) for state in recorded} == {0, 1}
    assert usual[-1] < usual[0]
    torch.testing.assert_close(torch.tensor(replayed), torch.tensor(usual), rtol=2e-4, atol=0)
