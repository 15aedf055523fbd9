"""Sums of partial results, and column sums in the norm's backward pass: on a GPU, else in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

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


@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 33, 40), (3, 700, 32), (2, 132, 67), (2, 0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_programs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from gem_kernels.triton.common.sums import sum_rows

    x = _draw(*shape)
    found = sum_rows(x, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, x.double().sum(1).to(dtype), rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=2e-5)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("rows", "c"), [(1, 16), (300, 96), (1100, 48)])
def test_column_sums_beside_a_norms_gradient(rows: int, c: int, layer: bool, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weight, bias and the gradient itself, with what is added to that; for several programs, and a last one with fewer rows."""
    monkeypatch.setattr(norm, "MANY_ROWS", 0 if many else 1 << 20)
    x, dy, dtotal = (_draw(rows, c, seed=i) for i in range(3))
    weight = _draw(c, seed=3)
    mean = x.mean(1) if layer else None
    rstd = torch.rsqrt((x.var(1, correction=0) if layer else x.square().mean(1)) + 1e-6)
    hat = ((x - (0 if mean is None else mean[:, None])) * rstd[:, None]).double()
    given = x, weight, dy, dtotal, mean, rstd
    plain, *_ = norm.norm_grads(*given, False, False, layer)
    dx, dweight, dbias, sums = norm.norm_grads(*given, True, True, layer, want_sum=True)
    torch.testing.assert_close(dx, plain)
    for found, expected in ((dweight, (dy * hat).sum(0)), (dbias, dy.double().sum(0)), (sums, dx.double().sum(0))):
        assert found is not None
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)
