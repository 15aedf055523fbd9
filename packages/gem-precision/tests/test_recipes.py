"""Recipes: what they decide and why, the conformance kit, overrides, saved activations, codecs."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import gem_precision
from gem_core import ops
from gem_core.batch import Batch
from gem_core.cli import main
from gem_core.config import load_config, resolve
from gem_core.errors import ConfigError
from gem_core.plugins import manager
from gem_core.testing.recipes import RecipeConformance, sqnr_db
from gem_core.train import quickstart_path
from gem_core.train.build import build_parts, build_source
from gem_core.train.runtime import runtime
from gem_precision.codecs import specs as codec_specs
from gem_precision.guard import GuardConfig
from gem_precision.linear import GroupedLinear, LowPrecisionLinear
from gem_precision.recipe import RECIPES, RecipeConfig, choices, specs
from gem_precision.saved import SavedActivations

SPECS = {s.name: s for s in specs()}


class TestFp8Rowwise(RecipeConformance):
    spec = SPECS["fp8-rowwise"]


class TestFp8Block(RecipeConformance):
    spec = SPECS["fp8-block"]


class TestMxfp8(RecipeConformance):
    spec = SPECS["mxfp8"]


class TestMxfp8StochasticHadamard(RecipeConformance):
    spec = SPECS["mxfp8"]
    config = RecipeConfig(stochastic_gradients=True, hadamard=16, guard=GuardConfig(sample_every=1))


class TestMxfp8WgradBf16(RecipeConformance):
    spec = SPECS["mxfp8-wgrad-bf16"]


class TestMxfp8Attention(RecipeConformance):
    spec = SPECS["mxfp8-attention"]


class TestMx4Saved(RecipeConformance):
    """Four bits in the saved activations: their noise is in the gradients only."""

    spec = SPECS["mx4-saved"]
    min_grad_sqnr_db = 10.0


class Tower(nn.Module):
    """Layers, a narrow linear, experts, attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(3))
        self.narrow = nn.Linear(64, 8)
        self.experts = GroupedLinear(2, 64, 64)
        self.attend = nn.Module()
        self.attend.attention_precision = None
        self.heads = nn.ModuleDict({"ctr": nn.Linear(64, 1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        x = self.experts(x, torch.tensor([0, x.shape[0] // 2, x.shape[0]]))
        return self.heads["ctr"](x) + self.narrow(x).sum(-1, keepdim=True)


def described(guard) -> dict[str, tuple[str, str]]:
    return {name: (precision, why) for name, precision, why in guard.describe()}


def test_exceptions_and_their_reasons():
    net = Tower()
    found = described(gem_precision.apply(net, "mxfp8"))
    assert found["layers.0.0"][0] == "mxfp8"
    assert found["layers.1.2"][0] == "mxfp8"
    assert found["layers.2.0"] == ("bf16", "one of the last 1 layers")
    assert found["narrow"][0] == "bf16"
    assert "narrower than 32" in found["narrow"][1]
    assert found["heads.ctr"] == ("fp32", "keep: always in high precision")
    assert found["layers.0.1"][0] == "bf16"
    assert found["experts"][0] == "mxfp8"
    assert isinstance(net.layers[0][0], LowPrecisionLinear)
    assert type(net.layers[2][0]) is nn.Linear
    assert net.attend.attention_precision is None
    net(torch.randn(8, 64)).sum().backward()


@pytest.mark.parametrize("autocast", [False, True])
def test_calls_of_few_rows_stay_in_bf16_and_are_listed(autocast):
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    guard = gem_precision.apply(net, "fp8-block", config=RecipeConfig(min_features=1))
    site, x = guard.sites["0"], torch.randn(4, 3, 64)
    plain = nn.functional.linear(x.bfloat16(), net[0].weight.bfloat16(), net[0].bias.bfloat16())
    assert site.min_rows == 0
    for few, norm in ((11, False), (12, False), (13, False), (13, True)):
        site.min_rows = few
        given = x.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = net[0].after_norm(given, "rms", 1e-6) if norm else net[0](given)
        reference = nn.functional.linear(ops.norm(given).to(torch.bfloat16), net[0].weight.bfloat16(), net[0].bias.bfloat16())
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, reference if norm else plain) == (few == 13)
        assert (described(guard)["0"] == ("bf16", "calls of 12 rows: fewer than 13 do not pay for quantised weights")) == (few == 13)
    assert described(guard)["1"][0] == "fp8-block"
    compiled = torch.compile(net[0], backend="eager", fullgraph=True, dynamic=True)
    for rows in (8, 9, 20, 21):
        assert torch.equal(compiled(x.new_ones(rows, 64)), net[0](x.new_ones(rows, 64)))


def test_attention_recipe_sets_the_ops_precision():
    net = Tower()
    found = described(gem_precision.apply(net, "mxfp8-attention"))
    assert found["attend"][0] == "mxfp8-attention"
    assert net.attend.attention_precision is not None
    guard = net.precision_guard
    with guard.shadow():
        assert net.attend.attention_precision is None
        assert all(s.precision == "bf16" for s in guard.sites.values())
    assert net.attend.attention_precision is not None


def test_overrides_by_pattern():
    config = RecipeConfig(overrides={"layers.*": "mxfp8-wgrad-bf16", "layers.0.*": "bf16", "narrow": "fp8-block"}, last_layers=0)
    found = described(gem_precision.apply(Tower(), "mxfp8", config=config))
    assert found["layers.1.0"][0] == "mxfp8-wgrad-bf16"
    assert found["layers.0.0"] == ("bf16", "overrides: 'layers.0.*' -> bf16")
    assert found["narrow"][0] == "fp8-block"
    with pytest.raises(ConfigError, match="matches no linear"):
        gem_precision.apply(Tower(), "mxfp8", config=RecipeConfig(overrides={"layer.*": "bf16"}))
    with pytest.raises(ConfigError, match="'head' matches no module"):
        gem_precision.apply(Tower(), "mxfp8", config=RecipeConfig(keep=("layers.0.*", "head")))
    with pytest.raises(ConfigError, match="mxfp9"):
        gem_precision.apply(Tower(), "mxfp8", config=RecipeConfig(overrides={"layers.*": "mxfp9"}))
    with pytest.raises(ConfigError, match="mxfp9"):
        gem_precision.apply(Tower(), "mxfp9")


def test_without_heads_the_last_linear_stays():
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    found = described(gem_precision.apply(net, "mxfp8"))
    assert found["0"][0] == "mxfp8"
    assert found["2"][0] == "bf16"
    assert "prediction head" in found["2"][1]
    naive = described(gem_precision.apply(nn.Sequential(nn.Linear(64, 64)), "mxfp8", config=RecipeConfig(keep=(), scale_rule="floor")))
    assert naive["0"][0] == "mxfp8"


def test_recipes_are_frozen_hashable_and_offered():
    names = {"bf16", "fp8-rowwise", "fp8-block", "mxfp8", "mxfp8-wgrad-bf16", "mxfp8-attention", "fp8-attention", "mx4-saved"}
    assert set(gem_precision.recipes()) == names
    assert len({hash(r) for r in RECIPES.values()}) == len(names)
    for name in names:
        assert manager().find("recipe", name).name == name
    for name in ("mxfp8", "mxfp4"):
        assert manager().find("codec", name).alignment == 32


def test_grouped_linear_refuses_fp8_with_a_reason():
    found = described(gem_precision.apply(Tower(), "fp8-block"))
    assert found["experts"] == ("bf16", "grouped linears take MX or bf16")


@pytest.mark.parametrize("elem", ["e4m3", "e2m1"])
def test_saved_activations(elem):
    """Bytes fall to 8.25/16 and 4.25/16; weights and statistics are not touched; the forward is unchanged."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 128))
    packed = copy.deepcopy(plain)
    saved = SavedActivations(elem)
    x = torch.randn(64, 128)
    grads, outs = [], []
    for net, context in ((plain, None), (packed, saved)):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            if context is None:
                y = net(inputs)
            else:
                with context():
                    y = net(inputs)
        y.float().square().mean().backward()
        outs.append(y)
        grads.append([inputs.grad, *(p.grad for p in net.parameters())])
    assert torch.equal(*outs)
    bits = {"e4m3": 8.25, "e2m1": 4.25}[elem]
    assert saved.count.after / saved.count.before == pytest.approx(bits / 16)
    # x, and the inputs of GELU and of the last linear, and no weight
    assert saved.count.before >= 2 * 64 * (128 + 256 + 256)
    assert saved.count.before < 2 * 64 * (128 + 256 + 256) + 2 * 128 * 256
    floor = {"e4m3": 24, "e2m1": 10}[elem]
    for a, b in zip(*grads):
        assert sqnr_db(a, b) >= floor


@pytest.mark.parametrize("spec", codec_specs(), ids=lambda s: s.name)
def test_codecs_shard_by_shard(spec):
    """Quantise-then-gather equals gather-then-quantise bit for bit at aligned borders."""
    x = torch.randn(8 * 96, generator=torch.Generator().manual_seed(0)).view(16, 48)
    payload, scales = spec.encode(x)
    parts = [spec.encode(x.flatten()[a : a + 96]) for a in range(0, x.numel(), 96)]
    assert torch.equal(torch.cat([p for p, _ in parts]), payload)
    assert torch.equal(torch.cat([s for _, s in parts]), scales)
    decoded = spec.decode(payload, scales, torch.float32)
    assert decoded.shape == (x.numel(),)
    assert sqnr_db(x.flatten(), decoded) > {"mxfp8": 30, "mxfp8_e5m2": 24, "mxfp4": 15}[spec.name]
    odd_payload, odd_scales = spec.encode(x.flatten()[:33])
    assert torch.equal(spec.decode(odd_payload, odd_scales, torch.float32)[:32], spec.decode(*spec.encode(x.flatten()[:32]), torch.float32))


def test_gem_model_trains_with_every_recipe():
    """The tiny model: forward, backward, sampled sites, finite metrics."""
    from gem_core.testing.models import random_batch, sample_features

    features = sample_features()
    config = manager().find("model", "gem").config_type()
    for name in RECIPES:
        torch.manual_seed(0)
        model = manager().find("model", "gem").build(config, features)
        guard = manager().find("recipe", name).apply(model, manager().find("recipe", name).config_type(), _context())
        batch = random_batch(features, 6)
        assert isinstance(batch, Batch)
        output = model(batch)
        loss = output.logits.float().square().mean()
        loss.backward()
        values = guard.on_step(1, loss.detach())
        assert all(torch.isfinite(torch.tensor(float(v))) for v in values.values())
        sites = [p for _, p, _ in guard.describe()]
        if name not in ("bf16", "mx4-saved"):
            assert any(p.startswith(("fp8", "mxfp8")) for p in sites), name


def _context():
    from gem_core.train.contract import RecipeContext

    return RecipeContext()


def test_explain_command():
    from typer.testing import CliRunner

    from gem_core.cli.app import build

    result = CliRunner().invoke(build(), ["precision", "explain", "--set", "precision.recipe=mxfp8-attention", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert {r["precision"] for r in rows} >= {"mxfp8", "bf16", "fp32", "mxfp8-attention"}
    assert all(r["why"] for r in rows)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["precision", "explain", "--device", "nonsense"], "--device"),
        (["precision", "explain", "--device", "cuda"], "there is no GPU here"),
        (["bench", "precision-ne", "--split", "nonsense"], "--split"),
        (["bench", "precision-step", "--recipe", "mxpf8"], "there is no recipe called 'mxpf8'"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_trained(words, told, monkeypatch, capsys):
    from gem_precision.bench import ne, steps

    def never(*_, **__):
        raise AssertionError

    for module, name in ((ne, "parity"), (steps, "measure")):
        monkeypatch.setattr(module, name, never)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-attention"])
def test_a_recipe_adds_no_graph_break(recipe):
    """The whole model: as many graphs as in bf16, whose only breaks are the look-ups."""
    counts = []
    for name in ("bf16", recipe):
        torch._dynamo.reset()
        resolved = resolve(load_config(quickstart_path(), {"precision.recipe": name, "data.batch_size": 16, "run.threads": 1}))
        with runtime(resolved.config) as rt:
            parts = build_parts(resolved, rt, trains=False)
            parts.model.tables.forward = torch.compiler.disable(parts.model.tables.forward)
            batch = next(iter(build_source(resolved, "train", rt)))
            counts.append(torch._dynamo.explain(parts.model)(batch).graph_count)
    assert counts[0] == counts[1]


def test_linears_of_one_row_a_sample_stay_in_bf16(monkeypatch):
    """Where FP8 is real: they are left as they are, so that what is fused for plain linears takes them. An override, allow_slow or
    min_rows = 0 quantise them; emulated recipes, which are there for their numbers, do too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    expert = nn.ModuleDict({"interaction": nn.ModuleDict({"up": nn.Linear(2048, 4096)}), "qkv": nn.Linear(2048, 4096)})
    net = nn.ModuleDict({"layer": expert, "heads": nn.Linear(64, 1)})

    def chosen(recipe: str, **options) -> dict[str, str]:
        rows = choices(net, RECIPES[recipe], RecipeConfig(**options), torch.device("cuda"))
        return {c.module: c.precision for c in rows}

    name = "layer.interaction.up"
    assert chosen("fp8-block") == {name: "bf16", "layer.qkv": "fp8-block", "heads": "fp32"}
    for options in ({"allow_slow": True}, {"min_rows": 0}, {"overrides": {name: "fp8-block"}}, {"per_sample": ()}):
        assert chosen("fp8-block", **options)[name] == "fp8-block"
    assert chosen("mxfp8")[name] == "mxfp8"
