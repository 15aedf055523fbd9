"""Wukong experts computed together give what they give one by one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gem_core.model.casts import WeightCasts, product_weights
from gem_core.model.config import InteractionConfig, WukongConfig
from gem_core.model.experts import SummedExperts
from gem_core.model.wukongs import summed, together

DEVICE = SimpleNamespace(is_cuda=True)


def made(experts=2, *, tokens=5, n=5, dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = InteractionConfig(
        experts=("wukong",) * experts, tokens=tokens, wukong=WukongConfig(**{"fm_tokens": 3, "rank": 2, "hidden": 7, **options})
    )
    layer = SummedExperts(n, 4, config).to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            if p.dim() == 1:
                p.normal_()
    return layer


def one_by_one(experts, x):
    y = x
    for expert in experts:
        y = y + expert(x)
    return y


def gradients(layer, compute, x, dy):
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    y = compute(layer.experts, leaf)
    y.backward(dy)
    return y, leaf.grad, {name: p.grad for name, p in layer.experts.named_parameters()}


@pytest.mark.parametrize("experts", [1, 2, 3])
@pytest.mark.parametrize("batch", [6, 1, 0])
def test_results_and_gradients(experts, batch):
    layer = made(experts)
    x, dy = torch.randn(2, batch, 5, 4, dtype=torch.float64)
    assert together(layer.experts, layer.shortcut, DEVICE) == list(layer.experts)
    y, dx, grads = gradients(layer, summed, x, dy)
    expected, wanted_dx, wanted = gradients(layer, one_by_one, x, dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(dx, wanted_dx)
    assert len(grads) == 8 * experts
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[name], msg=name)


def test_gradients_are_those_of_differences():
    layer = made()
    names = [n for n, _ in layer.named_parameters() if n.startswith("experts")]

    def run(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values)), (x,))

    layer.forward = lambda x: summed(layer.experts, x)
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *(layer.get_parameter(n) for n in names)))


def test_under_autocast_with_weights_cast_together():
    layer = made(dtype=torch.float32)
    x, dy = torch.randn(2, 64, 5, 4).bfloat16()
    casts = WeightCasts(lambda: product_weights(layer), torch.bfloat16)

    def cast(compute):
        def run(experts, leaf):
            with torch.autocast("cpu", torch.bfloat16), casts.swapped():
                return compute(experts, leaf)

        return run

    y, dx, grads = gradients(layer, cast(summed), x, dy)
    expected, wanted_dx, wanted = gradients(layer, cast(one_by_one), x, dy)
    exact, exact_dx, exact_grads = gradients(layer.double(), one_by_one, x.double(), dy.double())
    assert y.dtype == torch.bfloat16

    def off(a, b):
        return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())

    assert off(y, exact) < 1.1 * off(expected, exact) < 0.02
    assert off(dx, exact_dx) < 1.1 * off(wanted_dx, exact_dx) < 0.02
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert off(grad, exact_grads[name]) < 1.5 * off(wanted[name], exact_grads[name]) + 2e-3, name


def test_what_is_not_computed_together():
    layer = made()
    assert together(layer.experts, layer.shortcut, SimpleNamespace(is_cuda=False)) is None
    assert together(layer.experts, nn.Linear(2, 2), DEVICE) is None
    for options in ({"experts": 2, "rank": 0}, {"experts": 2, "n": 6}):
        other = made(**options)
        assert together(other.experts, other.shortcut, DEVICE) is None
    mixed = SummedExperts(5, 4, InteractionConfig(experts=("wukong", "dot"), tokens=5))
    assert together(mixed.experts, mixed.shortcut, DEVICE) is None

    class Quantised(nn.Linear):
        pass

    mlp = layer.experts[1].fm.mlp
    plain = mlp.layers[1]
    mlp.layers[1] = Quantised(7, 12)
    assert together(layer.experts, layer.shortcut, DEVICE) is None
    mlp.layers[1] = plain
    handle = plain.register_forward_hook(lambda *_: None)
    assert together(layer.experts, layer.shortcut, DEVICE) is None
    handle.remove()
    mlp.forward = mlp.forward
    assert together(layer.experts, layer.shortcut, DEVICE) is None
    del mlp.forward
    mlp.dropout.p = 0.5
    assert together(layer.experts, layer.shortcut, DEVICE) is None
    assert together(layer.eval().experts, layer.shortcut, DEVICE) == list(layer.experts)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("experts", [1, 2, 4])
def test_layer_on_a_device(experts):
    layer = made(experts, dtype=torch.float32, tokens=128, n=128, fm_tokens=64, rank=24, hidden=256)
    x = torch.randn(40, 128, 4)
    with torch.autocast("cuda", torch.bfloat16):
        found = layer.cuda()(x.cuda())
    expected = layer.cpu().double()(x.double())
    assert found.dtype == torch.bfloat16
    assert float((found.detach().cpu().double() - expected).norm() / expected.norm()) < 0.01
