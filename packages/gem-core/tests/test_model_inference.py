"""A model as programs of ops computes what it computes otherwise: by an installed implementation, and by the ops one after another."""

from __future__ import annotations

import pytest
import torch

from gem_core.model.config import GemConfig
from gem_core.model.gem import Gem, GemLayer
from gem_core.model.inference import for_inference
from gem_core.ops import program
from gem_core.testing.models import random_batch, sample_features

TOWER = {"dim": 16, "heads": 2}
QUERIES = {"seeds": 2, "candidate_queries": 2}


def tower(**options):
    return {"sequence": {**TOWER, **options}}


OPTIONS = {
    "plain": {},
    "causal, candidate, queries": tower(attention="causal", candidate=True, pooling=QUERIES, event={"compare": True}),
    "window, no queries": tower(attention="window", window=2, pooling={"seeds": 0, "recent": 3}),
    "causal window, candidate": tower(attention="causal_window", window=3, candidate=True),
    "no attention": tower(attention=["causal", "none"], pffn={"kind": "none"}),
    "mixed keys, layer norm": tower(pffn={"keys": 4, "activation": "silu", "scale_in": 0.5, "scale_out": 2.0}, norm="layer"),
    "fewer layers, wide heads": {**tower(layers=1, head_dim=6), "layers": 3},
    "compression": tower(pooling={"seeds": 6, "candidate_queries": 2, "tokens": 3, "kron": 2}),
    "skipping layers": {**tower(attention="causal", candidate=True), "comp_skip": True, "layers": 3},
    "left alone: feed-forward": tower(ffn=24),
    "left alone: rotary": tower(rotary="position"),
    "left alone: cls": tower(cls=2),
    "left alone: norm_gdpa": tower(pffn={"kind": "norm_gdpa"}),
    "left alone: blocks": tower(attention="block"),
}


@pytest.fixture(params=["installed", "by the ops"])
def how(request, monkeypatch):
    if request.param == "by the ops":
        monkeypatch.setattr(program.Program, "run", lambda self, *wanted: program.reference(self, wanted))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_same_logits(options, how):
    torch.manual_seed(0)
    model = Gem(GemConfig.model_validate({"dim": 8, "embedding_dim": 8, **options}), sample_features()).eval()
    for lengths in ([0, 1, 5, 0, 40, 17], [900, 3], [0, 0]):
        batch = random_batch(sample_features(), len(lengths), lengths=lengths)
        want = model(batch).logits
        with for_inference(model):
            found = model(batch).logits
        torch.testing.assert_close(found, want, rtol=1e-5, atol=2e-6)
        assert torch.equal(model(batch).logits, want), "the model is not as before"


@torch.no_grad()
def test_programs_are_used_where_they_fit(monkeypatch):
    counted = []
    run = program.Program.run
    monkeypatch.setattr(program.Program, "run", lambda self, *wanted: counted.append(len(self.steps)) or run(self, *wanted))
    batch = random_batch(sample_features(), 4)
    for options, longest in (("causal, candidate, queries", 11), ("left alone: rotary", 1)):
        counted.clear()
        torch.manual_seed(0)
        model = Gem(GemConfig.model_validate({"dim": 8, "embedding_dim": 8, **OPTIONS[options]}), sample_features()).eval()
        with for_inference(model):
            model(batch)
        assert max(counted) == longest, options
    assert all("_next" not in vars(m) for m in model.modules() if isinstance(m, GemLayer))
