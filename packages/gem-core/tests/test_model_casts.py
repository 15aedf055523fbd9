"""Weights cast together are the weights that autocast would cast one by one: same results and gradients, bit for bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gem_core.model.casts import CastWeights, WeightCasts, product_weights
from gem_core.model.config import GemConfig
from gem_core.model.gem import Gem
from gem_core.model.layers import TokenMix
from gem_core.model.tables import LocalTables
from gem_core.testing.models import random_batch, sample_features


def cast_once(places):
    return WeightCasts(lambda: places, torch.bfloat16).swapped()


OPTIONS = {
    "dim": 8, "embedding_dim": 8, "layers": 2,
    "sequence": {"dim": 16, "heads": 2, "pooling": {"seeds": 2}},
    "interaction": {"tokens": 4, "wukong": {"rank": 4, "hidden": 16}},
}  # fmt: skip


def model():
    torch.manual_seed(0)
    features = sample_features()
    made = Gem(GemConfig.model_validate(OPTIONS), features).train()
    assert isinstance(made.tables, LocalTables)
    return made, random_batch(features, 6)


def trained(together):
    made, batch = model()
    places = product_weights(made, [made.heads, made.tables]) if together else []
    with torch.autocast("cpu", torch.bfloat16), cast_once(places):
        logits = made(batch).logits
    logits.float().square().sum().backward()
    return logits, {name: p.grad for name, p in made.named_parameters()}


def test_results_and_gradients_are_those_of_autocast():
    (logits, grads), (expected, wanted) = trained(True), trained(False)
    assert torch.equal(logits, expected)
    for name, grad in grads.items():
        assert (grad is None) == (wanted[name] is None), name
        if grad is not None and not grad.is_sparse:
            assert grad.dtype == torch.float32
            assert torch.equal(grad, wanted[name]), name


class Casts(TorchDispatchMode):
    def __init__(self, shapes):
        super().__init__()
        self.shapes, self.seen = shapes, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32 and args[0].shape in self.shapes:
            self.seen[func] += 1
        return func(*args, **(kwargs or {}))


def test_no_weight_of_a_layer_is_cast_by_itself():
    made, batch = model()
    places = product_weights(made, [made.heads, made.tables])
    weights = {p.shape for p in made.layers.parameters() if p.dim() > 1 and p.numel() > 100}
    assert len(places) > 20
    seen = []
    for used in (places, []):
        with Casts(weights) as counted, torch.autocast("cpu", torch.bfloat16), cast_once(used):
            made(batch)
        seen.append(sum(counted.seen.values()))
    assert seen[0] == 0
    assert seen[1] > 10


def test_parameters_are_back_afterwards_whatever_happens():
    made, _ = model()
    name = next(iter(made.layers[0].blocks))
    before = dict(made.named_parameters())

    def fail():
        with cast_once(product_weights(made)):
            assert made.layers[0].blocks[name].attention.out.weight.dtype == torch.bfloat16
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    after = dict(made.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[n] is after[n] for n in before)


def test_what_is_cast():
    class Other(nn.Linear):
        pass

    tied = nn.Linear(3, 3)
    net = nn.ModuleDict(
        {
            "a": nn.Linear(2, 3, bias=False),
            "b": Other(2, 3),
            "mix": TokenMix(2, 3),
            "table": nn.Embedding(4, 2),
            "c": tied,
            "d": nn.Linear(3, 3),
        }
    )
    net["d"].weight = tied.weight
    assert product_weights(net, [net["mix"]]) == [(net["a"], "weight"), (net["c"], "bias"), (net["d"], "bias")]
    with cast_once([]):
        pass


def test_gradients_of_other_layouts_and_absent_ones():
    a, b, c = (torch.randn(3, 4, requires_grad=True) for _ in range(3))
    x, y, z = CastWeights.apply(torch.bfloat16, a, b, c)
    grads = torch.randn(4, 3, dtype=torch.bfloat16).t(), torch.randn(3, 4, dtype=torch.bfloat16)
    torch.autograd.backward([x, y], grads)
    assert torch.equal(a.grad, grads[0].float())
    assert torch.equal(b.grad, grads[1].float())
    assert c.grad is None
    assert torch.equal(z, c.bfloat16())


def test_kept_weights_follow_their_parameters_and_keep_their_gradients():
    made, batch = model()
    casts = WeightCasts(lambda: product_weights(made, [made.heads, made.tables]), torch.bfloat16)
    kept = casts.keep(200)
    assert 5 < len(kept) < len(casts.places)
    assert all(torch.equal(k.copy, k.parameter.bfloat16()) for k in kept)
    with torch.no_grad():
        kept[0].parameter.mul_(2)
    kept[1].copy.detach().zero_()
    with torch.autocast("cpu", torch.bfloat16), casts.swapped():
        logits = made(batch).logits
    assert torch.equal(kept[0].copy, kept[0].parameter.bfloat16())
    assert not kept[1].copy.any(), "copies of unchanged parameters are not written again"
    logits.float().square().sum().backward()
    assert all(k.parameter.grad is None and k.copy.grad.dtype == torch.bfloat16 for k in kept)
    others = [p for _, p in made.layers.named_parameters() if not any(p is k.parameter for k in kept)]
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in others)
    assert casts.keep(200) == kept


def test_gradients_of_kept_weights_are_those_of_the_others():
    made, batch = model()
    casts = WeightCasts(lambda: product_weights(made, [made.heads, made.tables]), torch.bfloat16)
    kept = casts.keep(1)
    with torch.autocast("cpu", torch.bfloat16), casts.swapped():
        logits = made(batch).logits
    logits.float().square().sum().backward()
    expected, wanted = trained(True)
    assert torch.equal(logits, expected)
    names = {id(p): name for name, p in made.named_parameters()}
    for k in kept:
        assert torch.equal(k.copy.grad.float(), wanted[names[id(k.parameter)]])
