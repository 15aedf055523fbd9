"""`norm_linear` that hands its input on: the same results and gradients, and no pass over the rows to add gradients up."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gem_core import ops
from gem_core.errors import OpError
from gem_core.model.config import PoolingConfig
from gem_core.model.pooling import Pooling
from gem_core.model.rows import Rows
from gem_core.model.sequence import SelfAttention


def tensors(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    shapes = (2, 9, 6), (8, 6), (8,)
    return [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def plain(x, w, b, **options):
    return ops.norm_linear(x, w, b, **options), x


def through(x, w, b, **options):
    return ops.norm_linear(x, w, b, through=True, **options)


def gradients(op, use, dtype=torch.float64, **options):
    given = tensors(dtype)
    y, x = op(*given, **options)
    use(y, x).backward()
    return [t.grad for t in given]


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    "use",
    [
        lambda y, x: y.square().sum() + x.sin().sum(),
        lambda y, x: y.sum() + x.mul(3.0).sum() + x.cos().sum(),
        lambda y, x: y.sin().sum(),
        lambda y, x: x.sin().sum(),
    ],
    ids=["both", "the input twice", "the result only", "the input only"],
)
def test_gradients_are_those_of_using_the_input_itself(kind, use):
    for found, expected in zip(gradients(through, use, kind=kind), gradients(plain, use, kind=kind)):
        if expected is None:
            assert found is None or not found.any()
        else:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_input_is_handed_on():
    x, w, b = tensors()
    y, passed = through(x, w, b)
    assert torch.equal(y, ops.norm_linear(x, w, b))
    assert torch.equal(passed, x)
    assert passed.data_ptr() == x.data_ptr()
    with torch.no_grad():
        assert through(x, w, b)[1] is x
    with pytest.raises(OpError, match="through"):
        ops.norm_linear(x, w, b, residual=x, through=True)


def test_under_autocast_the_input_keeps_its_precision():
    x, w, b = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, passed = through(x, w, b)
    assert y.dtype == torch.bfloat16
    assert passed is x


class Additions(TorchDispatchMode):
    """Counts additions of two tensors of rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.seen = rows, Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_) and args[0].shape == self.rows:
            self.seen[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def test_a_tower_adds_no_gradients_of_rows():
    lengths = torch.tensor([3, 0, 5])
    rows = Rows(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), 8, 5)
    torch.manual_seed(0)
    blocks = [SelfAttention(8, 2, 4) for _ in range(2)]
    pools = [Pooling(PoolingConfig(seeds=2), 8, 2, 4, 8) for _ in range(2)]
    first = torch.randn(8, 8, requires_grad=True)
    s, tokens = first, []
    for block, pool in zip(blocks, pools):
        pooled, s = pool(block(s, rows), rows)
        tokens.append(pooled)
    loss = s.sin().sum() + torch.cat(tokens).square().sum()
    with Additions(first.shape) as counted:
        loss.backward()
    assert not counted.seen
    assert first.grad.abs().sum() > 0
