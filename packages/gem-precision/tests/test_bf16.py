"""The recipe bf16."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import gem_core
from gem_core.config import config_from_dict
from gem_core.errors import ConfigError
from gem_core.hookspecs import RecipeSpec
from gem_core.plugins import manager
from gem_core.testing.recipes import RecipeConformance
from gem_core.train.contract import RecipeContext
from gem_precision.bf16 import Bf16Config, apply_bf16


class TestBf16(RecipeConformance):
    spec = RecipeSpec("bf16", Bf16Config, apply_bf16)
    min_sqnr_db = 40.0  # three bf16 products of 64 to 128 terms: 2^-9 relative rounding, about 45 dB
    min_grad_sqnr_db = 35.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(32, 32), nn.ModuleList([nn.Linear(32, 1), nn.Linear(32, 1)])
        self.seen = {}

    def forward(self, x):
        y = self.body(x)
        self.seen["body"] = y.dtype
        outs = [head(y) for head in self.heads]
        self.seen["heads"] = outs[0].dtype
        return torch.cat(outs, 1)


def applied(**options):
    torch.manual_seed(0)
    net = Net()
    guard = apply_bf16(net, Bf16Config(**options), RecipeContext())
    return net, {name: precision for name, precision, _ in guard.describe()}


def test_products_are_bf16_and_kept_modules_fp32():
    x = torch.randn(64, 32)
    net, sites = applied(keep=("heads.*",))
    net(x)
    assert net.seen == {"body": torch.bfloat16, "heads": torch.float32}
    assert sites == {"body": "bf16", "heads.0": "fp32", "heads.1": "fp32"}
    exact = nn.functional.linear(nn.functional.linear(x.bfloat16(), net.body.weight.bfloat16(), net.body.bias.bfloat16()).float(),
                                 net.heads[0].weight, net.heads[0].bias)  # fmt: skip
    assert torch.equal(net(x)[:, :1], exact)
    net, sites = applied(keep=())
    net(x)
    assert net.seen["heads"] == torch.bfloat16
    assert set(sites.values()) == {"bf16"}


def test_it_is_offered_by_name():
    assert manager().find("recipe", "bf16").apply is apply_bf16
    assert manager().distribution_of("recipe", "bf16") == "gem-precision"


def test_parameters_that_are_not_fp32_are_refused():
    with pytest.raises(ConfigError, match=r"body.weight is torch.bfloat16"):
        apply_bf16(Net().bfloat16(), Bf16Config(), RecipeContext())


def test_training_through_the_configuration(tmp_path):
    """Same run in fp32 and bf16: the numbers differ, the losses agree within bf16's rounding, the header tells the precision."""
    config = {
        "run": {"device": "cpu"},
        "data": {
            "batch_size": 128,
            "synthetic": {"rows": 4000, "eval_rows": 1000, "users": 300, "length": {"law": "lognormal", "mean": 5.0, "max": 30}},
        },
        "model": {"name": "gem", "layers": 1, "dim": 16, "embedding_dim": 16},
        "train": {"steps": 20, "log_every": 1, "tensorboard": False},
    }
    losses = {}
    for recipe in ("fp32", "bf16"):
        chosen = config_from_dict({**config, "precision": {"recipe": recipe}})
        gem_core.train(chosen, run_dir=tmp_path / recipe, quiet=True)
        losses[recipe] = [json.loads(line)["loss"] for line in (tmp_path / recipe / "metrics.jsonl").read_text().splitlines()]
        header = json.loads((tmp_path / recipe / "run.json").read_text())
        assert header["precision"]["recipe"] == recipe
        assert recipe in header["precision"]["sites"]
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=2e-2)


def test_weights_are_cast_together_unless_gradients_must_travel(monkeypatch):
    """In one process one cast serves all weights outside of ``keep``, with the gradients that single casts give, bit for bit."""
    x, found = torch.randn(64, 32), []
    for several, at_end in ((False, False), (True, False), (True, True)):
        monkeypatch.setattr("gem_precision.bf16._several", lambda several=several: several)
        net, _ = applied(keep=("heads",))
        net.weight_casts.all_at_end = at_end
        y = net(x)
        y.square().sum().backward()
        node = y.grad_fn
        found.append([y.detach(), *(p.grad for p in net.parameters())])
        names, waiting = set(), [node]
        while waiting:
            node = waiting.pop()
            names.add(node.name())
            waiting += [following for following, _ in node.next_functions if following is not None]
        assert ("CastWeightsBackward" in names) == (not several or at_end)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
