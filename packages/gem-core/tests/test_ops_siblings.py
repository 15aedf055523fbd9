"""Gradients of slices of one projection are joined without a copy, and are what stacking gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gem_core import ops
from gem_core.hookspecs import KernelSpec
from gem_core.model import layers
from gem_core.model.rows import Rows
from gem_core.model.sequence import SelfAttention, rotary_angles
from gem_core.ops import add_linear, dispatch, siblings

OFFSETS = torch.tensor([0, 3, 3, 8])


def _qkv(count: int = 3, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, count, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _grad(split, op) -> torch.Tensor:
    x = _qkv().requires_grad_()
    weight = torch.linspace(-1, 1, 8 * 2 * 4, dtype=x.dtype).view(8, 2, 4)
    (op(*split(x)) * weight).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    "op",
    [
        lambda q, k, v: ops.jagged_attention(q, k, v, OFFSETS),
        lambda q, k, v: ops.jagged_attention(ops.norm(q), k, v, OFFSETS),
        lambda q, k, v: ops.block_attention(q, k, v, OFFSETS),
        lambda q, k, v: ops.jagged_attention(k, q, v, OFFSETS) + q,
        lambda q, k, v: q * 2,
    ],
    ids=["attention", "q normalised", "block attention", "in another order", "one of three"],
)
def test_gradient_is_that_of_stacking(op) -> None:
    torch.testing.assert_close(_grad(siblings.unbind, op), _grad(lambda x: x.unbind(1), op), rtol=1e-12, atol=1e-12)


def test_siblings_are_joined_without_a_copy() -> None:
    q, k, v = siblings.unbind(_qkv().requires_grad_())
    out = ops.jagged_attention(q, k, v, OFFSETS)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    assert len({g.untyped_storage().data_ptr() for g in found}) == 1
    joined = siblings._joined(found)
    assert joined is not None
    assert joined.data_ptr() == found[0].data_ptr()
    assert torch.equal(joined, torch.stack(found, 1))


def test_groups() -> None:
    q, k, v = _qkv().unbind(1)
    assert siblings.groups((q, k, v), (True, True, True)) == [range(3)]
    assert siblings.groups((q, k, v), (True, False, True)) == []
    assert siblings.groups((q.contiguous(), *_qkv(2).unbind(1)), (True, True, True)) == [range(1, 3)]
    assert siblings.groups((k, q, v), (True, True, True)) == []
    assert siblings.groups((None, q), (False, True)) == []


def test_places_what_lies_elsewhere() -> None:
    q, k, v = _qkv().unbind(1)
    grads = [q.contiguous(), k.contiguous(), v.contiguous()]
    assert siblings.place([range(3)], grads) == {0, 1, 2}
    assert torch.equal(siblings._joined(grads), _qkv())


def test_no_rows() -> None:
    x = _qkv(rows=0).requires_grad_()
    out = ops.jagged_attention(*siblings.unbind(x), torch.tensor([0, 0]))
    out.sum().backward()
    assert x.grad.shape == x.shape


def test_compiles() -> None:
    """Inside a compiled graph the split is PyTorch's own; strides of the gradients are as the graph was told."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return ops.jagged_attention(*siblings.unbind(x), OFFSETS)

    plain, compiled = _qkv().requires_grad_(), _qkv().requires_grad_()
    step(plain).sum().backward()
    torch.compile(step, fullgraph=True, backend="aot_eager")(compiled).sum().backward()
    torch.testing.assert_close(compiled.grad, plain.grad)


def test_two_dimensions() -> None:
    x = _qkv().flatten(1).requires_grad_()
    y = _qkv().requires_grad_()
    for given, parts in ((x, siblings.unbind(x, 3, 2, 4)), (y, siblings.unbind(y))):
        ops.jagged_attention(*parts, OFFSETS).square().sum().backward()
        assert given.grad.shape == given.shape
    assert torch.equal(x.grad, y.grad.flatten(1))


def _noting(op: str, seen: list[Tensor | None]) -> KernelSpec:
    """The reference of ``op``: of attention with column sums left beside its gradients, of `norm_linear` with a look for them."""
    reference = next(s for s in dispatch.kernel_specs(op) if s.name == "reference")

    def backward(problem, saved, dout, needs):
        grads = reference.backward(problem, saved, dout, needs)
        if op == "norm_linear":
            seen.append(siblings.sums_of(dout[0]))
            return grads
        joined = torch.stack(grads[:3], 1)
        parts = joined.unbind(1)
        siblings.leave_sums(parts, joined.flatten(1).sum(0, dtype=torch.float32))
        return (*parts, *grads[3:])

    return replace(reference, name="noting", backward=backward, priority=1000)


@pytest.mark.parametrize("written", [False, True])
def test_column_sums_reach_the_projection(written: bool) -> None:
    """From attention's backward to that of the linear layer before it, unless the gradient was changed on the way."""
    torch.manual_seed(0)
    module, s = SelfAttention(8, 2, 4), torch.randn(8, 8, requires_grad=True)
    if written:
        module.qkv.register_forward_hook(lambda _m, _x, y: y[0].register_hook(lambda g: g.mul_(2)) and None)
    seen: list[Tensor | None] = []
    with dispatch.offering(_noting("jagged_attention", seen), _noting("norm_linear", seen)):
        module(s, Rows(OFFSETS, 8, 5)).square().sum().backward()
    (sums,) = seen
    if written:
        assert sums is None
    else:
        torch.testing.assert_close(sums, module.qkv.linear.bias.grad)


def test_sums_that_are_left_anew_take_the_place_of_those_before() -> None:
    """A kernel that writes gradients once more does not count as a write."""
    parts = torch.zeros(4, 2, 1, 3).unbind(1)
    for sums in (torch.ones(6), torch.full((6,), 2.0)):
        siblings.leave_sums(parts, sums)
        found = siblings.sums_of(parts[0])
        assert found is not None
        assert torch.equal(found, sums)


def test_gradients_of_gradients() -> None:
    weight = _qkv(3).requires_grad_()

    def found(split) -> Tensor:
        x = _qkv(3).requires_grad_()
        (g,) = torch.autograd.grad(split(x), x, weight.unbind(1), create_graph=True)
        return torch.autograd.grad(g.square().sum(), weight)[0]

    assert torch.equal(found(siblings.unbind), found(lambda x: x.unbind(1)))


@pytest.mark.parametrize("kind", ["full", "causal", "window", "block"])
@pytest.mark.parametrize("turned", [False, True])
def test_column_sums_of_softmax_attention_follow_from_those_of_its_results_gradient(
    kind: str, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of values they are those, of keys zero: from a skip connection's product on, to the projection's bias. Angles turn values."""
    monkeypatch.setattr(layers, "_many", lambda _x: True)
    monkeypatch.setattr(add_linear, "implementation", lambda _x, _w: lambda residual, x, w, b: residual + F.linear(x, w, b))
    torch.manual_seed(0)
    module, rows = SelfAttention(8, 2, 4, kind, window=1, block=2), Rows(OFFSETS, 8, 5)  # type: ignore[arg-type]
    s, angles = torch.randn(8, 8, requires_grad=True), rotary_angles(rows, 4, "position") if turned else None
    seen: list[Tensor | None] = []
    with dispatch.offering(_noting("norm_linear", seen)):
        module(s, rows, angles).square().sum().backward()
    (sums,) = seen
    if turned:
        assert sums is None
    else:
        torch.testing.assert_close(sums, module.qkv.linear.bias.grad)
