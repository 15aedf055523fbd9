"""Sums of partial results, and column sums that the norm's backward pass leaves with its gradient: on a GPU, else in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from gem_core import ops
from gem_core.ops import dispatch, siblings
from gem_kernels.triton import dense
from gem_kernels.triton.common.device import on_cpu
from gem_kernels.triton.dense import norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.fixture(autouse=True)
def _where_it_runs() -> Iterator[None]:
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        yield


def _draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("shape", [(1, 5), (33, 40), (700, 3, 32), (132, 2, 67), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_programs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from gem_kernels.triton.common.sums import sum_rows

    x = _draw(*shape)
    found = sum_rows(x, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, x.double().sum(0).to(dtype), rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=2e-5)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize(("rows", "c"), [(1, 16), (300, 96), (1100, 48)])
def test_column_sums_beside_a_norms_gradient(rows: int, c: int, layer: bool) -> None:
    """With the gradient that is added to it, for several programs and a last one with fewer rows; the gradient as without sums."""
    x, dy, dtotal = (_draw(rows, c, seed=i) for i in range(3))
    mean = x.mean(1) if layer else None
    rstd = torch.rsqrt((x.var(1, correction=0) if layer else x.square().mean(1)) + 1e-6)
    given = x, None, dy, dtotal, mean, rstd, False, False, layer
    plain, *_ = norm.norm_grads(*given)
    dx, _, _, sums = norm.norm_grads(*given, want_sum=True)
    assert sums is not None
    assert torch.equal(dx, plain)
    torch.testing.assert_close(sums.double(), dx.double().sum(0), rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter of Triton 3.6 multiplies bf16 bit patterns")
def test_they_come_with_the_gradient_of_an_input_that_is_handed_on() -> None:
    x, w = _draw(5000, 64, dtype=torch.bfloat16).requires_grad_(), _draw(96, 64, seed=1, dtype=torch.bfloat16).requires_grad_()
    seen = []
    with dispatch.offering(*dense.specs()):
        before = x * 1.0
        before.register_hook(lambda g: seen.append((siblings.sums_of(g), g)))
        y, handed_on = ops.norm_linear(before, w, through=True, backend="triton")
        (y.float().sin().sum() + handed_on.float().square().sum()).backward()
    ((sums, gradient),) = seen
    assert sums is not None
    assert float((sums - gradient.double().sum(0)).abs().max()) <= 2**-9 * float(gradient.double().abs().sum(0).max())
