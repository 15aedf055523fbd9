"""The kernels of summed Wukong experts against their definition in fp64, and within the module that calls them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from gem_core.ops import expert_tokens
from gem_core.ops.contract import Problem
from gem_core.ops.expert_tokens import OP, Implementation
from gem_kernels.triton.common.device import on_cpu
from gem_kernels.triton.tokens import spec
from gem_kernels.triton.tokens.spec import specs, supports

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]


def problem(n, d, experts, rank, f, dtype):
    return Problem(OP, DEVICE, None, (("x", dtype),), (("N", n), ("D", d), ("E", experts), ("R", rank), ("F", f)))


def definition(x, weight, bias, experts, f):
    """(total, products) by autograd's own ops."""
    projected = weight.shape[0] - (x.shape[1] - f)
    z = weight[:projected] @ x
    products = (x @ z.transpose(1, 2)).unflatten(2, (experts, -1)).permute(2, 0, 1, 3).flatten(2)
    below = x[:, f:] + weight[projected:] @ x
    return torch.cat([x[:, :f] + bias.view(f, -1), below], 1), products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("samples", "n", "d", "experts", "rank", "f"),
    [(5, 128, 192, 2, 24, 64), (7, 17, 40, 1, 5, 9), (3, 33, 64, 4, 8, 16), (600, 16, 32, 3, 4, 8)],
)
def test_against_the_definition(samples, n, d, experts, rank, f, dtype):
    if DEVICE == "cpu" and samples > 100:
        pytest.skip("many samples a program, on a device")
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)

    x, weight, bias = drawn(samples, n, d), drawn(experts * rank + n - f, n, scale=n**-0.5), drawn(f * d)
    douts = drawn(samples, n, d), *(drawn(samples, n * rank, scale=d**-0.5) for _ in range(experts))
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = definition(*exact, experts, f)
    wanted = torch.autograd.grad(expected, exact[:2], (douts[0].double(), torch.stack(douts[1:]).double()))
    run = Implementation(specs()[0], problem(n, d, experts, rank, f, dtype))
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        assert supports(run.problem)
        found = run.forward(x, weight, bias)
        grads = run.backward(x, weight, douts[0], douts[1:])
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for got, want in zip((*found, *grads), (*expected, *wanted)):
        assert got.shape == want.shape
        assert got.dtype == dtype
        assert float(((got.double() - want).norm() / want.norm()).detach()) < bound


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_summed_experts_with_and_without_the_kernels(monkeypatch):
    """A layer's experts under autocast: results and gradients differ by rounding."""
    from gem_core.model.config import InteractionConfig
    from gem_core.model.experts import SummedExperts
    from gem_core.ops.dispatch import offering

    torch.manual_seed(0)
    config = InteractionConfig.model_validate({"experts": ["wukong"] * 2, "tokens": 32, "wukong": {"rank": 8, "hidden": 64}})
    layer = SummedExperts(32, 64, config).to(DEVICE)
    x, dout = torch.randn(37, 32, 64, device=DEVICE), torch.randn(37, 32, 64, device=DEVICE)
    found, launched = [], []
    real = spec.launch
    monkeypatch.setattr(spec, "launch", lambda kernel, *given, **sizes: (launched.append(kernel), real(kernel, *given, **sizes)))
    chosen = expert_tokens.implementation
    for choose in (lambda *_: None, chosen):
        monkeypatch.setattr(expert_tokens, "implementation", choose)
        given = x.clone().requires_grad_()
        with offering(*specs()), torch.autocast("cuda", torch.bfloat16):
            y = layer(given)
        names, parameters = zip(*layer.named_parameters())
        grads = torch.autograd.grad(y, (given, *parameters), dout.to(y.dtype))
        found.append(dict(zip(("y", "x", *names), (y.detach(), *grads))))
    assert len(launched) == 2, "forward and backward, of the second pass only"
    for name, want in found[0].items():
        assert float((found[1][name] - want).norm() / want.norm()) < 2e-2, name


def test_what_no_program_holds_is_refused():
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        assert supports(problem(128, 192, 2, 24, 64, torch.bfloat16))
        assert not supports(problem(192, 256, 4, 24, 96, torch.bfloat16))
        assert not supports(problem(64, 64, 5, 4, 32, torch.bfloat16))


def test_chips_of_less_shared_memory_are_refused():
    """A program of the backward pass takes 112 KiB for these tokens; sm_89 has 99."""
    for arch, fits in ((80, False), (89, False), (90, True), (100, True), (120, False)):
        dims = ("N", 128), ("D", 192), ("E", 2), ("R", 24), ("F", 64)
        assert bool(supports(Problem(OP, "cuda", arch, (("x", torch.bfloat16),), dims))) == fits, arch
