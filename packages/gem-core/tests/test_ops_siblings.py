"""Gradients of slices of one projection are joined without a copy, and are what stacking gives."""

from __future__ import annotations

import pytest
import torch

from gem_core import ops
from gem_core.ops import siblings

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
