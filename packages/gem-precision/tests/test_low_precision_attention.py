"""Emulated MX attention against float64: cosine and SQNR floors at lengths 1...4096, and everything that the ops promise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gem_core import ops
from gem_core.errors import OpError
from gem_core.ops.contract import OpPrecision

MX = OpPrecision()
POLICIES = {
    "default": MX,
    "dscores-e5m2": OpPrecision(dscores="e5m2"),
    "dscores-e4m3": OpPrecision(dscores="e4m3"),
    "strips": OpPrecision(block=(1, 32)),
    "fp8": OpPrecision(block=(128, 128)),
    "fp8-dscores-e4m3": OpPrecision(block=(128, 128), dscores="e4m3"),
}


def sqnr(reference: Tensor, got: Tensor) -> float:
    reference, got = reference.double(), got.double()
    if torch.equal(reference, got):
        return math.inf
    return float(10 * torch.log10(reference.square().sum() / (reference - got).square().sum()))


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.detach().double().flatten(), b.detach().double().flatten(), dim=0))


def compare(op, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *offsets: Tensor, precision: OpPrecision = MX, **options) -> None:
    """Outputs: cosine > 0.99 and >= 15 dB; gradients >= 12 dB, against float64 of the same bf16 inputs."""
    low = [t.clone().requires_grad_() for t in (q, k, v)]
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    out = op(*low, *offsets, precision=precision, **options)
    reference = op(*wide, *offsets, **options)
    out.backward(g)
    reference.backward(g.double())
    assert cosine(reference, out) > 0.99
    assert sqnr(reference.detach(), out.detach()) >= 15
    for name, a, b in zip("qkv", wide, low):
        # a gradient that is zero in exact arithmetic must be zero
        if float(a.grad.abs().max()) < 1e-12 * max(1.0, float(wide[2].grad.abs().max())):
            assert float(b.grad.float().abs().max()) == 0, name
        else:
            assert sqnr(a.grad, b.grad) >= 12, (name, sqnr(a.grad, b.grad))


def tensors(lq: int, lk: int, h: int, d: int, hkv: int | None = None, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (lq, h, d), (lk, hkv or h, d), (lk, hkv or h, d), (lq, h, d)
    return tuple(torch.randn(s, generator=generator).to(torch.bfloat16) for s in shapes)


@pytest.mark.parametrize("length", [1, 2, 7, 31, 32, 33, 100, 257, 1024, 4096])
@pytest.mark.parametrize("op", ["softmax", "gelu"])
@pytest.mark.parametrize("policy", ["default", "fp8"])
def test_floors_at_all_lengths(policy, op, length):
    """Softmax over i.i.d. keys, and GDPA with the scores that QK-norm gives (unit variance)."""
    d = 64 if length >= 1024 else 128
    q, k, v, g = tensors(length, length, 1, d, seed=length)
    offsets = torch.tensor([0, length])
    if op == "softmax":
        compare(ops.jagged_attention, q, k, v, g, offsets, precision=POLICIES[policy])
    else:
        options = {"activation": "gelu", "scale_in": d**-0.5, "scale_out": 1 / length}
        compare(ops.gdpa, q, k, v, g, offsets, precision=POLICIES[policy], **options)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies(name):
    q, k, v, g = tensors(150, 150, 2, 64)
    offsets = torch.tensor([0, 40, 40, 150])
    compare(ops.jagged_attention, q, k, v, g, offsets, precision=POLICIES[name])
    compare(ops.gdpa, q, k, v, g, offsets, precision=POLICIES[name], activation="silu", scale_in=0.125)


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (16, 8)}, {"causal": True, "window": 20}], ids=str)
def test_masks_and_grouped_heads(options):
    q, k, v, g = tensors(130, 130, 4, 32, hkv=2)
    offsets = torch.tensor([0, 3, 77, 130], dtype=torch.int32)
    compare(ops.jagged_attention, q, k, v, g, offsets, **options)
    compare(ops.gdpa, q, k, v, g, offsets, activation="gelu", scale_in=32**-0.5, **options)


def test_cross_attention_broadcast_and_targets():
    q, k, v, g = tensors(90, 60, 2, 32)
    compare(ops.jagged_attention, q, k, v, g, torch.tensor([0, 50, 90]), torch.tensor([0, 20, 60]))
    q, k, v, _ = tensors(8, 60, 2, 32)
    g = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    compare(ops.jagged_attention, q, k, v, g, None, torch.tensor([0, 20, 60]), broadcast_q=True)
    q, k, v, g = tensors(90, 90, 2, 32)
    compare(ops.jagged_attention, q, k, v, g, torch.tensor([0, 50, 90]), causal=True, num_targets=torch.tensor([4, 7]))


def test_slack_rows_with_nan_and_empty_samples():
    q, k, v, g = tensors(70, 70, 2, 32)
    for t in (q, k, v):
        t[64:] = math.nan
    low = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = ops.jagged_attention(*low, torch.tensor([0, 0, 64, 64]), precision=MX, return_lse=True)
    out.backward(g)
    assert out.isfinite().all()
    assert torch.equal(out[64:], torch.zeros_like(out[64:]))
    assert (lse[:, 64:] == -math.inf).all()
    for t in low:
        assert t.grad.isfinite().all()
        assert torch.equal(t.grad[64:], torch.zeros_like(t.grad[64:]))


def test_one_large_score_does_not_overflow():
    """Scores around 3e4 and rows that see one huge key: the row maximum is taken out first."""
    q, k, v, g = tensors(40, 40, 1, 32)
    q, k = q * 60, k * 60
    compare_finite = [t.clone().requires_grad_() for t in (q, k, v)]
    out = ops.jagged_attention(*compare_finite, torch.tensor([0, 40]), precision=MX)
    out.backward(g)
    assert out.isfinite().all()
    assert all(t.grad.isfinite().all() for t in compare_finite)


def test_samples_do_not_share_blocks():
    """A neighbour of size 10^4 in the same packed tensor changes nothing."""
    q, k, v, _ = tensors(40, 40, 1, 32)
    alone = ops.jagged_attention(q[:20], k[:20], v[:20], torch.tensor([0, 20]), precision=MX)
    big = [torch.cat([t[:20], t[20:] * 1e4]) for t in (q, k, v)]
    packed = ops.jagged_attention(*big, torch.tensor([0, 20, 40]), precision=MX)
    assert torch.equal(packed[:20], alone)


def test_chosen_only_with_a_precision():
    q, k, v, _ = tensors(8, 8, 1, 32)
    with pytest.raises(OpError, match="precision"):
        ops.jagged_attention(q, k, v, torch.tensor([0, 8]), backend="mx_emulated")
    with pytest.raises(OpError, match="float64"):
        ops.jagged_attention(q.double(), k.double(), v.double(), torch.tensor([0, 8]), precision=MX, backend="mx_emulated")


def test_under_compile():
    q, k, v, _ = (t.float().requires_grad_() for t in tensors(12, 12, 1, 16))
    for op in (ops.jagged_attention, ops.gdpa):
        compiled = torch.compile(lambda q, k, v, o, op=op: op(q, k, v, o, precision=MX), fullgraph=True, backend="aot_eager")
        offsets = torch.tensor([0, 5, 12])
        torch.testing.assert_close(compiled(q, k, v, offsets), op(q, k, v, offsets, precision=MX))
