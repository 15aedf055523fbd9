"""The Triton norm, norm_linear, linear_norm, mlp and norm_gdpa pass the conformance kit: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from gem_core import ops
from gem_core.ops.explain import problem_of
from gem_core.testing.kernels import KernelConformance, compare
from gem_kernels.triton import dense, hopper
from gem_kernels.triton.common.device import on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SPECS = {spec.op: spec for spec in dense.specs()}
# the interpreter of Triton 3.6 multiplies bf16 bit patterns, hence fp16 there
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def _where_it_runs() -> Iterator[None]:
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        yield


class TestNorm(KernelConformance):
    spec, device, dtypes = SPECS["norm"], DEVICE, (torch.float32, torch.bfloat16)


class TestNormLinear(KernelConformance):
    spec, device, dtypes = SPECS["norm_linear"], DEVICE, DTYPES


class TestLinearNorm(KernelConformance):
    spec, device, dtypes = SPECS["linear_norm"], DEVICE, DTYPES


class TestMlp(KernelConformance):
    spec, device, dtypes = SPECS["mlp"], DEVICE, DTYPES


class TestNormGdpa(KernelConformance):
    spec, device, dtypes = SPECS["norm_gdpa"], DEVICE, DTYPES if DEVICE == "cuda" else DTYPES[:1]


if DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0):
    HOPPER = {spec.op: spec for spec in hopper.specs() if spec.name == "hopper"}

    class TestHopperMlp(KernelConformance):
        spec, device, dtypes = HOPPER["mlp"], DEVICE, (torch.bfloat16, torch.float16)

    class TestHopperNormGdpa(KernelConformance):
        spec, device, dtypes = HOPPER["norm_gdpa"], DEVICE, (torch.bfloat16, torch.float16)


def _draw(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def _against_reference(op: str, wanted: tuple[str, ...], **arguments: object) -> None:
    """Result and gradients of ``wanted`` through the public function, against the reference in float64."""
    found = {}
    for backend in ("triton", ops.REFERENCE):
        given = dict(arguments)
        for name in wanted:
            leaf = arguments[name].detach()
            given[name] = (leaf.double() if backend == ops.REFERENCE else leaf).requires_grad_()
        result = getattr(ops, op)(**given, backend=backend)
        results = result if isinstance(result, tuple) else (result,)
        weights = [_draw(*r.shape, seed=9 + i).to(r.dtype) for i, r in enumerate(results)]
        grads = torch.autograd.grad(results, [given[n] for n in wanted], weights)
        found[backend] = [r.detach() for r in results] + list(grads)
    for name, got, want in zip([f"result {i}" for i in range(len(results))] + list(wanted), found["triton"], found[ops.REFERENCE]):
        compare(got, want, 1e-5, name)


@pytest.mark.parametrize("columns", [256, 300, 1000])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_linear_norm_rows_in_several_chunks(columns: int, kind: str) -> None:
    """1, 2 and 4 chunks a row block; biases far from 0, so that the variance of joined chunks is put to the test."""
    b = _draw(columns, seed=2) + 5
    _against_reference("linear_norm", ("x", "w", "b"), x=_draw(70, 40), w=_draw(columns, 40, scale=0.2, seed=1), b=b, kind=kind)


def test_wide_linear_norm_is_a_product_and_a_norm() -> None:
    _against_reference("linear_norm", ("x", "w"), x=_draw(20, 16), w=_draw(1100, 16, seed=1))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_linear_with_rows_in_several_chunks_and_splits(kind: str) -> None:
    x, residual = _draw(300, 200), _draw(300, 200, seed=3)
    _against_reference("norm_linear", ("x", "w", "residual"), x=x, w=_draw(140, 200, scale=0.1, seed=1), residual=residual, kind=kind)


def test_layer_norm_of_rows_far_from_zero() -> None:
    """The lazy norm subtracts μ Σw from x wᵀ: statistics are taken about the row's first element, so that they do not cancel."""
    x = _draw(40, 64) + 300
    n = (x - x.mean(1, keepdim=True)) / x.std(1, unbiased=False, keepdim=True)
    w = _draw(48, 64, seed=1)
    got = ops.norm_linear(x, w, kind="layer", backend="triton")
    assert (got - n @ w.T).norm() <= 1e-3 * got.norm()


def test_mlp_backward_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not fit in the workspace are done in turns, and the weights' gradients add up."""
    from gem_kernels.triton.dense import mlp

    monkeypatch.setattr(mlp, "WORKSPACE_BYTES", 1)
    x, residual = _draw(300, 24), _draw(300, 24, seed=5)
    w1, b1, w2, b2 = _draw(64, 24, seed=1), _draw(64, seed=2), _draw(24, 64, seed=3), _draw(24, seed=4)
    wanted = ("x", "w1", "b1", "w2", "b2", "residual")
    _against_reference("mlp", wanted, x=x, w1=w1, b1=b1, w2=w2, b2=b2, residual=residual, norm="layer")


def test_gradient_of_the_sum_alone() -> None:
    """Only x + residual is used: the norm's result contributes nothing."""
    x, residual, w = _draw(9, 16).requires_grad_(), _draw(9, 16, seed=1), _draw(8, 16, seed=2).requires_grad_()
    _, total = ops.norm_linear(x, w, residual=residual, backend="triton")
    dx, dw = torch.autograd.grad(total.sum(), (x, w), allow_unused=True)
    assert torch.equal(dx, torch.ones_like(dx))
    assert dw is None or not dw.any()


def test_refusals_say_why() -> None:
    double = problem_of("norm", x=_draw(4, 8).double())
    assert "float64" in SPECS["norm"].supports(double).reason
    assert "16384" in SPECS["norm"].supports(problem_of("norm", x=_draw(1, 20000))).reason
    wide = problem_of("mlp", x=_draw(1, 600), w1=_draw(8, 600), b1=None, w2=_draw(8, 8), b2=None)
    assert "in up to 128" in SPECS["mlp"].supports(wide).reason
    q, offsets = _draw(3, 1, 300), torch.tensor([0, 3], device=DEVICE)
    assert "head widths" in SPECS["norm_gdpa"].supports(problem_of("norm_gdpa", q=q, k=q, v=q, q_offsets=offsets)).reason
