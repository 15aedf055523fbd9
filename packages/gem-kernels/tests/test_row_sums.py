"""Sums over rows that `add_linear` leaves, and the norms that take them: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from gem_core import ops
from gem_core.jagged import lengths_to_offsets
from gem_core.ops import meeting, row_sums
from gem_core.ops.contract import Problem
from gem_core.ops.pool_rows import OP
from gem_kernels.triton.common.device import on_cpu
from gem_kernels.triton.common.launch import launch
from gem_kernels.triton.hopper import add_linear
from gem_kernels.triton.hopper import norm_gdpa as hopper_norm_gdpa
from gem_kernels.triton.pool_rows import spec as pool_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SMALL = {"BLOCK_N": 32, "BLOCK_C": 64, "num_warps": 1, "num_stages": 1}


@pytest.fixture(autouse=True)
def _where_it_runs() -> Iterator[None]:
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        yield


def _rows(count: int, columns: int, away: float = 0.0) -> Tensor:
    """Rows of unlike sizes, ``away`` from zero."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, columns, generator=generator) * torch.rand(count, 1, generator=generator) * 4 + away
    return rows.to(DEVICE, DTYPE)


def _sums(rows: Tensor, parts: int) -> Tensor:
    """As a kernel leaves them."""
    each = rows.double().unflatten(1, (parts, -1))
    return torch.stack([each.sum(2), (each - each.mean(2, keepdim=True)).square().sum(2)]).transpose(1, 2).float().contiguous()


def test_they_go_with_the_rows_until_these_are_written() -> None:
    rows = _rows(4, 8)
    assert row_sums.found(rows) is None
    row_sums.leave(rows, _sums(rows, 2))
    same = meeting.in_heads(rows, 2, 4)
    assert row_sums.found(same) is row_sums.found(rows) is not None
    passed = rows.view_as(rows)
    assert row_sums.found(passed) is None
    row_sums.hand_on(rows, passed)
    assert row_sums.found(passed) is row_sums.found(rows)
    rows[0, 0] = 5.0
    assert row_sums.found(rows) is None


@pytest.mark.parametrize("away", [0.0, 30.0])
@pytest.mark.parametrize("parts", [1, 2])
def test_statistics_of_norm_gdpa(away: float, parts: int) -> None:
    """Mean and rstd from sums over parts are those of whole rows, zero past the last offset; sums of keys as before."""
    from gem_kernels.triton.dense.norm_gdpa_kernels import norm_gdpa_stats_kernel

    rows, end, keys, (heads, d) = 75, 70, 6, (2, 64)
    q, k = _rows(rows, heads * d, away), _rows(keys, heads * d)
    offsets = torch.tensor([0, 30, end], device=DEVICE)
    found = []
    for sums in (None, _sums(q, parts)):
        mean, rstd = (torch.full((rows,), float("nan"), device=DEVICE) for _ in range(2))
        of_keys = torch.full((heads, keys), float("nan"), device=DEVICE)
        grid = 2 + -(-rows // (4 if sums is None else 32))
        shape = {"H": heads, "D": d, "COLUMNS": heads * d, "ROWS": 4, "PARTS": parts, "MANY": 32, "num_warps": 4}
        args = q, sums, k, mean, rstd, of_keys, offsets, 2, rows, keys, 2, 1e-6
        launch(norm_gdpa_stats_kernel, (grid,), q.device, *args, heads * d, d, heads * d, d, **shape)
        found.append((mean[:end], rstd, of_keys))
    wanted = q[:end].double()
    for mean, rstd, of_keys in found:
        torch.testing.assert_close(mean.double(), wanted.mean(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rstd[:end].double(), (wanted.var(1, correction=0) + 1e-6).rsqrt(), rtol=1e-5, atol=0.0)
        assert not rstd[end:].any()
        torch.testing.assert_close(of_keys.T, k.float().view(keys, heads, d).sum(2), rtol=1e-5, atol=1e-5)


def test_pooling_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        for name in ("SCORES", "SUMS"):
            monkeypatch.setattr(pool_rows, name, SMALL)
        monkeypatch.setattr(pool_rows, "FACTORS", {"BLOCK_M": 16, "CHUNK": 2, "num_warps": 1})
    lengths, c = (0, 5, 130, 1, 64, 0, 65), 512 if DEVICE == "cuda" else 128
    m = c // 4
    x, a = _rows(sum(lengths) + 9, c, 0.5), _rows(m, c) / 4
    problem = Problem(OP, DEVICE, None, (("x", DTYPE),), (("C", c), ("M", m), ("G", 2)), (("eps", 1e-6), ("scale", 0.1)))
    offsets = lengths_to_offsets(torch.tensor(lengths)).to(DEVICE)
    y, (w, r) = pool_rows.forward(problem, x, a, offsets)
    asked: list[Tensor] = []
    monkeypatch.setattr(row_sums, "found", lambda rows: asked.append(rows) or _sums(rows, 2))
    again, (weights, rstd) = pool_rows.forward(problem, x, a, offsets)
    assert asked[0] is x
    live, wanted = sum(lengths), (x.double().square().mean(1) + 1e-6).rsqrt()
    for found in (r, rstd):
        torch.testing.assert_close(found[:live].double(), wanted[:live], rtol=1e-5, atol=0.0)
        assert not found[live:].any()
    near = 1e-5 if torch.float32 == DTYPE else 2e-2
    for one, two in ((again, y), (weights[:live], w[:live])):
        assert float((one.double() - two).norm() / two.double().norm()) < near


@pytest.mark.skipif(not HOPPER, reason="needs an sm_90 device")
@pytest.mark.parametrize("columns", [256, 512])
@pytest.mark.parametrize("rows", [1, 129, 20_001])
def test_add_linear_leaves_them(rows: int, columns: int) -> None:
    x, residual, w = _rows(rows, 512), _rows(rows, columns, 1.0), _rows(columns, 512) / 16
    bias = _rows(1, columns)[0]
    problem = Problem("add_linear", "cuda", 90, (("x", DTYPE),), (("K", 512), ("N", columns)))
    y, _ = add_linear.forward(problem, residual, x, w, bias)
    exact = residual.double() + x.double() @ w.double().T + bias.double()
    sums = row_sums.found(y)
    assert sums is not None
    torch.testing.assert_close(sums, _sums(exact, columns // 256), rtol=1e-4, atol=1e-2)


@pytest.mark.skipif(not HOPPER, reason="needs an sm_90 device")
def test_norm_gdpa_of_what_add_linear_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result with the sums that were left is that without them, up to rounding."""
    lengths, keys = (700, 0, 65, 1, 128), 4
    rows = sum(lengths)
    problem = Problem("add_linear", "cuda", 90, (("x", DTYPE),), (("K", 512), ("N", 512)))
    x, residual, w, bias = _rows(rows, 512), _rows(rows, 512), _rows(512, 512) / 16, _rows(1, 512)[0]
    y, _ = add_linear.forward(problem, residual, x, w, bias)
    kv = [_rows(keys * len(lengths), 512).view(-1, 4, 128) for _ in range(2)]
    offsets = lengths_to_offsets(torch.tensor(lengths)).cuda()
    key_offsets = torch.arange(len(lengths) + 1, device=DEVICE) * keys
    taken: list[Tensor | None] = []
    run = hopper_norm_gdpa.launch

    def spied(kernel, grid, device, *args, **sizes):
        if kernel.fn.__name__ == "norm_gdpa_stats_kernel":
            taken.append(args[1])
        run(kernel, grid, device, *args, **sizes)

    monkeypatch.setattr(hopper_norm_gdpa, "launch", spied)
    options = {"max_q_len": 700, "max_k_len": keys, "backend": "hopper"}
    found, wanted = (ops.norm_gdpa(meeting.in_heads(q, 4, 128), *kv, offsets, key_offsets, **options) for q in (y, y.clone()))
    assert [t is None for t in taken] == [False, True]
    assert float((found.double() - wanted).norm() / wanted.double().norm()) < 5e-3
