"""The backward pass of a norm that read what `norm_gdpa` gave, with the beginning of that one's: on a GPU, else in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gem_core import ops
from gem_core.errors import OpError
from gem_core.jagged import lengths_to_offsets
from gem_core.ops import dispatch, meeting, siblings
from gem_kernels.triton import dense
from gem_kernels.triton.common.device import on_cpu
from gem_kernels.triton.dense import norm_gdpa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
CLOSE = {"rtol": 2**-7, "atol": 5e-2} if DEVICE == "cuda" else {"rtol": 1e-5, "atol": 1e-4}
LENGTHS, KEYS = (5, 0, 70, 17), (3, 2, 0, 16)


@pytest.fixture(autouse=True)
def _where_it_runs() -> Iterator[None]:
    with nullcontext() if DEVICE == "cuda" else on_cpu(), dispatch.offering(*dense.specs()):
        yield


def _draw(*shape: int, seed: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype).requires_grad_()


def _inputs(slack: int, heads: int, d: int) -> list[Tensor]:
    c = heads * d
    kv = [_draw(sum(KEYS), heads, d, seed=i) for i in (1, 2)]
    return [_draw(sum(LENGTHS) + slack, heads, d, seed=0), *kv, _draw(24, c, seed=3), _draw(24, seed=4)]


def _step(given: list[Tensor], kind: str, **changes: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of ``(q, k, v, w, b)``; the rows go on beside the norm and the product that read them."""
    q, k, v, w, b = given
    offsets = [lengths_to_offsets(torch.tensor(n)).to(DEVICE) for n in (LENGTHS, KEYS)]
    s = siblings.flat(ops.norm_gdpa(q, k, v, *offsets, max_q_len=70, max_k_len=16, backend="triton"))
    y, s = ops.norm_linear(s, w, b, kind=kind, through=True, backend="triton")
    real = slice(sum(LENGTHS))
    loss = (y[real].float().sin().sum() + s[real].float().square().sum()) * 0.1
    return loss, list(torch.autograd.grad(loss, given))


@pytest.mark.parametrize(("slack", "heads", "d"), [(0, 2, 16), (9, 3, 16)])
def test_both_passes_in_one(slack: int, heads: int, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of two passes, slack rows included, and the pass is taken."""
    met: list[Tensor] = []
    meet = norm_gdpa.meet
    monkeypatch.setattr(norm_gdpa, "meet", lambda *args: met.append(meet(*args)) or met[-1])
    ran: list[str] = []
    launch = norm_gdpa.launch
    monkeypatch.setattr(
        norm_gdpa, "launch", lambda kernel, *args, **sizes: ran.append(kernel.fn.__name__) or launch(kernel, *args, **sizes)
    )
    given = _inputs(slack, heads, d)
    loss, found = _step(given, "rms")
    assert len(met) == 1
    assert "norm_gdpa_bwd_met_kernel" in ran
    assert "norm_gdpa_bwd_do_kernel" not in ran
    taken = meeting.left_gradients(met[0])
    assert taken is not None
    assert not taken[0][sum(LENGTHS) :].any()
    with monkeypatch.context() as apart:
        apart.setattr(meeting, "made_of", lambda _: None)
        other, expected = _step(given, "rms")
    assert len(met) == 1
    assert "norm_gdpa_bwd_do_kernel" in ran
    assert torch.equal(loss, other)
    for one, two in zip(found, expected):
        torch.testing.assert_close(one, two, **CLOSE)


def test_a_layer_norm_does_its_own_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_gdpa, "meet", lambda *_: pytest.fail("this norm has a mean"))
    _step(_inputs(0, 2, 16), "layer")


def test_a_gradient_that_was_written_since_counts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a hook, for one: what was left with it is of no use then."""
    given = _inputs(0, 2, 16)
    q, k, v, w, b = given
    offsets = [lengths_to_offsets(torch.tensor(n)).to(DEVICE) for n in (LENGTHS, KEYS)]

    def doubled(g: Tensor) -> None:
        g.mul_(2)

    def gradients() -> list[Tensor]:
        s = siblings.flat(ops.norm_gdpa(q, k, v, *offsets, max_q_len=70, max_k_len=16, backend="triton"))
        s.register_hook(doubled)
        y, s = ops.norm_linear(s, w, b, through=True, backend="triton")
        return list(torch.autograd.grad(y.float().sin().sum() + s.float().square().sum(), (q, k, v)))

    found = gradients()
    monkeypatch.setattr(meeting, "made_of", lambda _: None)
    for one, two in zip(found, gradients()):
        torch.testing.assert_close(one, two, **CLOSE)


def test_not_where_saved_tensors_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation drops what was saved; kept beside, it would take the memory that was to be free."""
    monkeypatch.setattr(norm_gdpa, "meet", lambda *_: pytest.fail("what was noted is kept"))
    given = _inputs(0, 2, 16)

    def loss(q: Tensor, k: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        offsets = [lengths_to_offsets(torch.tensor(n)).to(DEVICE) for n in (LENGTHS, KEYS)]
        s = siblings.flat(ops.norm_gdpa(q, k, v, *offsets, max_q_len=70, max_k_len=16, backend="triton"))
        y, s = ops.norm_linear(s, w, b, through=True, backend="triton")
        return y.float().sin().sum() + s.float().square().sum()

    checkpoint(loss, *given, use_reentrant=False).backward()
    assert all(t.grad is not None for t in given)


def _handed_on(given: list[Tensor], kind: str, *, once: bool = True, beside: bool = False, hook: bool = False) -> list[Tensor]:
    """Gradients of ``(x, k, v, w, b)``: rows go through `norm_linear`, which hands them on to `norm_gdpa`."""
    x, k, v, w, b = given
    offsets = [lengths_to_offsets(torch.tensor(n)).to(DEVICE) for n in (LENGTHS, KEYS)]
    y, s = ops.norm_linear(x.flatten(1) * 1, w, b, kind=kind, through=True, backend="triton")
    if once:
        meeting.read_once(s)
    if hook:
        s.register_hook(lambda g: g * 2)
    out = ops.norm_gdpa(meeting.in_heads(s, *x.shape[1:]), k, v, *offsets, max_q_len=70, max_k_len=16, backend="triton")
    loss = (y.float().sin().sum() + out.float().square().sum()) * 0.1
    if beside:
        loss = loss + s.float().cos().sum()
    return list(torch.autograd.grad(loss, given))


@pytest.mark.parametrize(("slack", "heads", "d", "kind"), [(0, 2, 16, "rms"), (9, 3, 16, "rms"), (9, 2, 16, "layer")])
def test_the_last_part_is_done_with_the_norm_before(slack: int, heads: int, d: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of two passes, slack rows included; by one pass for RMSNorm, which has one in common with `norm_gdpa`'s."""
    ran: list[str] = []
    launch = norm_gdpa.launch
    monkeypatch.setattr(
        norm_gdpa, "launch", lambda kernel, *args, **sizes: ran.append(kernel.fn.__name__) or launch(kernel, *args, **sizes)
    )
    given = _inputs(slack, heads, d)
    expected = _handed_on(given, kind, once=False)
    assert "norm_gdpa_bwd_late_kernel" not in ran
    ran.clear()
    found = _handed_on(given, kind)
    one_pass = kind == "rms"
    assert ("norm_gdpa_bwd_late_kernel" in ran) is one_pass
    assert ("norm_gdpa_bwd_dq_kernel" in ran) is not one_pass
    for one, two in zip(found, expected):
        torch.testing.assert_close(one, two, **CLOSE)


def test_what_another_implementation_does_not_take_is_finished_before() -> None:
    given = _inputs(9, 2, 16)
    expected = _handed_on(given, "rms", once=False)
    plain = next(s for s in dense.specs() if s.op == "norm_linear")

    def unaware(problem: Any, saved: Any, dout: Any, needs: Any) -> Any:
        return plain.backward(problem, saved, (dout[0], dout[1].clone()), needs)

    with dispatch.offering(*(replace(s, backward=unaware) if s is plain else s for s in dense.specs())):
        for one, two in zip(_handed_on(given, "rms"), expected):
            torch.testing.assert_close(one, two, **CLOSE)


@pytest.mark.parametrize("change", ["beside", "hook"])
def test_rows_that_are_not_read_once_are_an_error_where_they_should_be(change: str) -> None:
    """Without the promise they may be; a gradient that is not what was left is never taken for it."""
    given = _inputs(0, 2, 16)
    _handed_on(given, "rms", once=False, **{change: True})
    with pytest.raises(OpError, match="only norm_gdpa was to read"):
        _handed_on(given, "rms", **{change: True})
