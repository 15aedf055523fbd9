"""Column sums that backward kernels leave beside the gradients of one projection: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gem_core import ops
from gem_core.jagged import lengths_to_offsets
from gem_core.model.pooling import SeedPooling
from gem_core.model.rows import Rows
from gem_core.ops import dispatch, siblings
from gem_kernels.triton import attention
from gem_kernels.triton.attention import column_sums, launch_backward
from gem_kernels.triton.attention.spec import backward, supports
from gem_kernels.triton.common.device import on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
on_hopper = pytest.mark.skipif(
    DEVICE == "cpu" or torch.cuda.get_device_capability() != (9, 0), reason="the Hopper kernels need an sm_90 device"
)
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _where_it_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(column_sums, "ROWS_EACH", 0)
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        yield


def _draw(*shape: int, seed: int, dtype: torch.dtype, slack: float = torch.nan, used: int | None = None) -> Tensor:
    """Normal numbers; rows from ``used`` on are ``slack``."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if used is not None:
        made[used:] = slack
    return made.to(DEVICE, dtype)


def _offsets(lengths: Sequence[int]) -> Tensor:
    return lengths_to_offsets(torch.tensor(lengths)).to(DEVICE)


def _gradients(op: str, split: Sequence[Tensor], others: Sequence[Tensor], offsets: dict[str, Any], **options: Any) -> list[Tensor]:
    """Of the slices ``split`` of one tensor, which are the op's last inputs."""
    out = getattr(ops, op)(*others, *split, *offsets.values(), **options)
    dout = _draw(*out.shape, seed=9, dtype=out.dtype)
    return list(torch.autograd.grad(out, split, dout))


def _agrees(grads: Sequence[Tensor], least: float) -> None:
    """The sums that came with the gradients are theirs, up to ``least`` of the sums of absolute values."""
    found = siblings.sums_of(grads[0])
    assert found is not None
    joined = torch.stack(list(grads), 1).flatten(1).double()
    assert float((found - joined.sum(0)).abs().max()) <= least * float(joined.abs().sum(0).max())


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("shared", [True, False])
def test_few_queries(op: str, shared: bool) -> None:
    """Keys and values of one projection, read by few queries: samples without keys, of one tile, of several."""
    dtype = torch.float32 if DEVICE == "cpu" else BF16
    keys, heads, d = (0, 5, 70, 1, 33, 0), 2, 16
    kv = _draw(sum(keys) + 3, 2, heads, d, seed=1, dtype=dtype, used=sum(keys))
    q = _draw(7 if shared else 7 * len(keys), heads, d, seed=2, dtype=dtype)
    offsets = {"q": None if shared else _offsets([7] * len(keys)), "k": _offsets(keys)}
    forced = next(s for s in attention.specs() if (s.op, s.name) == (op, "triton-sample"))
    scheme = "q_resident"
    spec = replace(forced, name=scheme, backward=partial(backward, scheme=scheme), supports=partial(supports, scheme=scheme))
    with dispatch.offering(spec):
        more = {"broadcast_q": shared, "max_q_len": 7, "max_k_len": 70, "backend": scheme}
        grads = _gradients(op, kv.requires_grad_().unbind(1), [q], offsets, **more)
    # sums of what is rounded afterwards
    _agrees(grads, 1e-6 if dtype == torch.float32 else 2**-9)


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
def test_shared_queries_by_shares_of_the_keys(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many programs share the keys, whose borders then lie within samples: the same dK and dV, and sums of all of them."""
    dtype = torch.float32 if DEVICE == "cpu" else BF16
    keys, heads, d = (0, 5, 170, 1, 33, 0, 64, 0), 2, 16
    kv = _draw(sum(keys) + 3, 2, heads, d, seed=1, dtype=dtype, used=sum(keys)).requires_grad_()
    q = _draw(7, heads, d, seed=2, dtype=dtype).requires_grad_()
    forced = next(s for s in attention.specs() if (s.op, s.name) == (op, "triton-sample"))
    scheme = "q_resident"
    spec = replace(forced, name=scheme, backward=partial(backward, scheme=scheme), supports=partial(supports, scheme=scheme))
    dout = _draw(7 * len(keys), heads, d, seed=9, dtype=dtype)
    found = []
    for per_sm in (2, 4, 6, 14):

        def run_with(x: Any, kernel: str, propose: Any, run: Any, n: int = per_sm) -> None:
            run({**propose(kernel, x.plan, x.info)[0], "PERSISTENT": n})

        monkeypatch.setattr(launch_backward, "choose_and_run", run_with)
        monkeypatch.setattr(launch_backward, "_MOST_SHARES", per_sm)
        with dispatch.offering(spec):
            more = {"broadcast_q": True, "max_q_len": 7, "max_k_len": 170, "backend": scheme}
            parts = kv.unbind(1)
            found.append(torch.autograd.grad(getattr(ops, op)(q, *parts, None, _offsets(keys), **more), (q, *parts), dout))
            _agrees(found[-1][1:], 1e-6 if dtype == torch.float32 else 2**-9)
    for dq, dk, dv in found[1:]:
        assert torch.equal(dk, found[0][1])
        assert torch.equal(dv, found[0][2])
        torch.testing.assert_close(dq, found[0][0], rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
    with torch.no_grad():
        exact = [t.detach().double().nan_to_num().requires_grad_() for t in (q, *kv.unbind(1))]
    out = getattr(ops, op)(*exact, None, _offsets(keys), broadcast_q=True, backend="reference")
    for grad, wanted in zip(found[-1], torch.autograd.grad(out, exact, dout.double())):
        assert float((grad - wanted).norm() / wanted.norm()) < (1e-5 if dtype == torch.float32 else 1e-2)


LENGTHS = (0, 1, 64, 65, 130, 700, 128, 0, 333)


@on_hopper
@pytest.mark.parametrize("op", ["gdpa", "norm_gdpa"])
def test_hopper_few_keys(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 128 keys in one kernel, with a program for every SM: samples without keys and without rows."""
    monkeypatch.setattr("gem_kernels.triton.hopper.launch.choose", lambda *_: {"GLUON": 1, "FUSED": 1, "BLOCK_N": 64, "STAGES": 3})
    monkeypatch.setattr("gem_kernels.triton.hopper.norm_gdpa.choose", lambda *_: {"GLUON": 1, "FUSED": 1})
    lengths, keys = LENGTHS * 4, (128, 0, 1, 77, 64, 65, 128, 100, 3) * 4
    kv = _draw(sum(keys) + 3, 2, 4, 128, seed=1, dtype=BF16, used=sum(keys)).requires_grad_()
    q = _draw(sum(lengths), 4, 128, seed=2, dtype=BF16).requires_grad_()
    offsets = {"q": _offsets(lengths), "k": _offsets(keys)}
    backend = "hopper-only" if op == "gdpa" else "hopper"
    more = {"max_q_len": 700, "max_k_len": 128, "activation": "fast_gelu", "backend": backend}
    out = getattr(ops, op)(q, *(parts := kv.unbind(1)), *offsets.values(), **more)
    grads = torch.autograd.grad(out, (q, *parts), _draw(*out.shape, seed=9, dtype=BF16))
    _agrees(grads[1:], 1e-5)
    again = torch.autograd.grad(getattr(ops, op)(q, *parts, *offsets.values(), **more), parts, _draw(*out.shape, seed=9, dtype=BF16))
    assert torch.equal(siblings.sums_of(grads[1]), siblings.sums_of(again[0]))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter of Triton 3.6 multiplies bf16 bit patterns")
def test_bias_gradient_of_a_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pooling's keys and values: without a product with ones, and that of float64."""
    from gem_kernels.triton.dense import norm_linear

    read: list[Tensor | None] = []

    def noting(dy: Tensor) -> Tensor:
        read.append(siblings.sums_of(dy))
        return column_sum(dy)

    column_sum = norm_linear.column_sum
    monkeypatch.setattr(norm_linear, "column_sum", noting)
    torch.manual_seed(0)
    lengths = (40, 0, 700, 129)
    module = SeedPooling(256, 2, 128, 64, seeds=32).cuda()
    s = torch.randn(sum(lengths), 256, device="cuda")
    rows = Rows(_offsets(lengths), sum(lengths), 700)
    grads = []
    for dtype in (BF16, torch.float64):
        made = module.to(dtype)
        made.zero_grad()
        made(s.to(dtype), rows)[0].square().mean().backward()
        grads.append(made.kv.linear.bias.grad.double())
    assert read[0] is not None
    assert float((grads[0] - grads[1]).norm() / grads[1].norm()) < 2e-2
