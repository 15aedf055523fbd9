"""Low-precision attention: on a GPU, else in Triton's interpreter. Against float64 by the floors of low-precision attention, against the
exact result at the rounded operands, and everything that the ops promise whatever the arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from gem_core import ops
from gem_core.errors import OpError
from gem_core.ops.contract import OpPrecision
from gem_kernels.triton.common.device import device_info, interpreting, on_cpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
MX, FP8 = OpPrecision(), OpPrecision(block=(128, 128))
PRECISIONS = {"mx": MX, "fp8": FP8}
LENGTHS = (1, 2, 7, 31, 32, 33, 127, 128, 129, 257, *((1024, 4096) if DEVICE == "cuda" else ()))

pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not interpreting(), reason="needs a GPU or TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]


@pytest.fixture(autouse=True)
def _where_it_runs() -> Iterator[None]:
    with nullcontext() if DEVICE == "cuda" else on_cpu():
        yield


def sqnr(reference: Tensor, got: Tensor) -> float:
    reference, got = reference.double(), got.double()
    if torch.equal(reference, got):
        return math.inf
    return float(10 * torch.log10(reference.square().sum() / (reference - got).square().sum()))


def tensors(lq: int, lk: int, h: int, d: int, hkv: int | None = None, dv: int | None = None, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (lq, h, d), (lk, hkv or h, d), (lk, hkv or h, dv or d), (lq, h, dv or d)
    return tuple(torch.randn(s, generator=generator).to(torch.bfloat16).to(DTYPE).to(DEVICE) for s in shapes)


def offsets(*bounds: int) -> Tensor:
    return torch.tensor(bounds, device=DEVICE, dtype=torch.int32)


def compare(op, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *at: Tensor | None, precision: OpPrecision, **options) -> None:
    """Outputs: cosine > 0.99 and >= 15 dB; gradients >= 12 dB, against float64 of the same inputs."""
    low = [t.clone().requires_grad_() for t in (q, k, v)]
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    out = op(*low, *at, precision=precision, backend="triton-lowp", **options)
    reference = op(*wide, *at, **options)
    out.backward(g)
    reference.backward(g.double())
    cosine = torch.nn.functional.cosine_similarity(reference.detach().flatten(), out.detach().double().flatten(), dim=0)
    assert cosine > 0.99
    assert sqnr(reference.detach(), out.detach()) >= 15
    top = max(1.0, float(wide[2].grad.abs().max()))
    for name, a, b in zip("qkv", wide, low):
        if float(a.grad.abs().max()) < 1e-12 * top:
            # zero in exact arithmetic; the plain backward rounds P and dP
            assert float(b.grad.float().abs().max()) < 0.02 * top, name
        else:
            assert sqnr(a.grad, b.grad) >= 12, (name, sqnr(a.grad, b.grad))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
@pytest.mark.parametrize("op", ["softmax", "gelu"])
def test_floors_at_all_lengths(op: str, precision: str, length: int) -> None:
    """Softmax over i.i.d. keys, and gdpa with the scores that QK-norm gives (unit variance)."""
    d = 64 if length < 1024 else 128
    q, k, v, g = tensors(length, length, 1, d, seed=length)
    if op == "softmax":
        compare(ops.jagged_attention, q, k, v, g, offsets(0, length), precision=PRECISIONS[precision])
    else:
        options = {"activation": "gelu", "scale_in": d**-0.5, "scale_out": 1 / length}
        compare(ops.gdpa, q, k, v, g, offsets(0, length), precision=PRECISIONS[precision], **options)


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (16, 8)}, {"causal": True, "window": 20}], ids=str)
def test_masks_and_grouped_heads(options: dict, precision: str) -> None:
    q, k, v, g = tensors(150, 150, 4, 32, hkv=2)
    at = offsets(0, 3, 77, 150)
    compare(ops.jagged_attention, q, k, v, g, at, precision=PRECISIONS[precision], **options)
    compare(ops.gdpa, q, k, v, g, at, precision=PRECISIONS[precision], activation="silu", scale_in=32**-0.5, **options)


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_cross_attention_sharing_and_shared_queries(precision: str) -> None:
    p = PRECISIONS[precision]
    q, k, v, g = tensors(90, 200, 2, 40, dv=24)
    compare(ops.jagged_attention, q, k, v, g, offsets(0, 50, 90), offsets(0, 20, 200), precision=p)
    index = torch.tensor([1, 0, 1], device=DEVICE)
    compare(ops.gdpa, q, k, v, g, offsets(0, 30, 50, 90), offsets(0, 60, 200), precision=p, activation="relu", kv_index=index)
    q, k, v, _ = tensors(8, 200, 2, 32)
    _, _, _, g = tensors(24, 1, 2, 32, seed=9)
    compare(ops.jagged_attention, q, k, v, g, None, offsets(0, 60, 60, 200), precision=p, broadcast_q=True)


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_slack_rows_with_nan_and_empty_samples(precision: str) -> None:
    q, k, v, g = tensors(170, 170, 2, 32)
    for t in (q, k, v):
        t[160:] = math.nan
    low = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = ops.jagged_attention(
        *low, offsets(0, 0, 140, 140, 160), precision=PRECISIONS[precision], backend="triton-lowp", return_lse=True
    )
    out.backward(g)
    assert out.isfinite().all()
    assert not out[160:].any()
    assert (lse[:, 160:] == -math.inf).all()
    for t in low:
        assert t.grad.isfinite().all()
        assert not t.grad[160:].any()


@pytest.mark.parametrize("op", ["jagged_attention", "gdpa"])
@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_samples_do_not_share_blocks(op: str, precision: str) -> None:
    """A neighbour of size 10^4 in the same packed tensor changes nothing."""
    q, k, v, _ = tensors(140, 140, 1, 32)
    run = {"precision": PRECISIONS[precision], "backend": "triton-lowp"}
    alone = getattr(ops, op)(q[:70], k[:70], v[:70], offsets(0, 70), **run)
    big = [torch.cat([t[:70], t[70:] * 1e4]) for t in (q, k, v)]
    packed = getattr(ops, op)(*big, offsets(0, 70, 140), **run)
    assert torch.equal(packed[:70], alone)


def rounded(x: Tensor, bounds: list[int], block: int) -> tuple[Tensor, list[Tensor]]:
    """E4M3 with power-of-two scales rounded up, a block of rows x columns of one head and sample; and the scale bytes a head and sample."""
    out, bytes_ = torch.zeros_like(x), []
    for a, b in zip(bounds, bounds[1:]):
        for head in range(x.shape[1]):
            y = x[a:b, head].double()
            rows, cols = -(-y.shape[0] // block), -(-y.shape[1] // block)
            padded = y.new_zeros(rows * block, cols * block)
            padded[: y.shape[0], : y.shape[1]] = y
            amax = padded.view(rows, block, cols, block).abs().amax((1, 3))
            exponent = torch.where(amax > 0, torch.log2(amax / 448).ceil(), -127.0).clamp(min=-127)
            scale = torch.exp2(exponent).repeat_interleave(block, 0).repeat_interleave(block, 1)[: y.shape[0], : y.shape[1]]
            out[a:b, head] = ((y / scale).float().to(torch.float8_e4m3fn).double() * scale).to(x.dtype)
            bytes_.append((exponent + 127).to(torch.uint8))
    return out, bytes_


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("d", [24, 64, 128])
def test_quantising_is_exact(block: int, d: int) -> None:
    """Codes and scales, transposed or not, of many magnitudes; and the rounded rows."""
    from gem_kernels.triton.lowp.quantize import quantize_rows, rounded_rows

    generator = torch.Generator().manual_seed(d)
    bounds = [0, 33, 33, 170, 171]
    x = torch.randn(175, 2, d, generator=generator) * torch.exp2(torch.randint(-20, 20, (175, 2, 1), generator=generator).float())
    x[40:80, 0] = 0
    x[171:] = math.nan
    x, at, info = x.to(DTYPE).to(DEVICE), offsets(*bounds), device_info(torch.device(DEVICE))
    wanted, wanted_bytes = rounded(x.cpu(), bounds, block)
    wide = rounded_rows(x, at, block, 256, info)
    assert torch.equal(wide[:171].cpu(), wanted[:171])
    assert not wide[171:].any()
    straight, transposed = quantize_rows(x, at, block, 256, info), quantize_rows(x, at, block, 256, info, transpose=True)
    pairs = [(head, s) for s in range(4) for head in range(2)]
    for (head, s), expected in zip(pairs, wanted_bytes):
        a, b = bounds[s], bounds[s + 1]
        first, column = a // block + s, (a // 32 + s) * 32
        for coded in (straight, transposed):
            found = coded.scales[head, first : first + expected.shape[0], : expected.shape[1]].cpu()
            assert torch.equal(found, expected)
        codes = straight.codes[a:b, head].view(torch.uint8)
        assert torch.equal(codes, transposed.codes[head, :, column : column + b - a].view(torch.uint8).t())
        values = codes[:, :d].cpu().view(torch.float8_e4m3fn).float()
        scale = torch.exp2(expected.float() - 127).repeat_interleave(block, 0).repeat_interleave(block, 1)[: b - a, :d]
        assert torch.equal((values * scale).to(x.dtype), wanted[a:b, head])


@pytest.mark.parametrize("precision", sorted(PRECISIONS))
def test_the_exact_result_at_the_rounded_operands(precision: str) -> None:
    """What is left is the rounding of P (3 bits of mantissa: > 28 dB), and nothing in lse and in the gradients' P. Hopper's FP8 products
    keep about 14 bits of a sum."""
    tolerance = 1e-3 if precision == "fp8" and DEVICE == "cuda" else 1e-5
    p = PRECISIONS[precision]
    bounds = [0, 100, 170]
    q, k, v, g = tensors(170, 170, 2, 64)
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = ops.jagged_attention(*inputs, offsets(*bounds), precision=p, backend="triton-lowp", return_lse=True)
    out.backward(g)
    wide = [rounded(t.cpu(), bounds, p.block[0])[0].to(DEVICE).double().requires_grad_() for t in (q, k, v)]
    reference, reference_lse = ops.jagged_attention(*wide, offsets(*bounds), return_lse=True)
    reference.backward(g.double())
    torch.testing.assert_close(lse.double(), reference_lse.double(), rtol=tolerance, atol=tolerance)
    assert sqnr(reference.detach(), out.detach()) > 28
    for a, b in zip(wide, inputs):
        assert sqnr(a.grad, b.grad) > 28


def test_a_spoiled_block_spoils_its_sample_only() -> None:
    q, k, v, _ = tensors(140, 140, 1, 32)
    k[10, 0, 3] = math.inf
    for precision in PRECISIONS.values():
        out = ops.jagged_attention(q, k, v, offsets(0, 70, 140), precision=precision, backend="triton-lowp")
        assert out[:70].isnan().all()
        assert out[70:].isfinite().all()


def test_empty_batches() -> None:
    q, k, v, _ = tensors(0, 0, 2, 32)
    for op in (ops.jagged_attention, ops.gdpa):
        assert op(q, k, v, offsets(0, 0, 0), precision=MX, backend="triton-lowp").shape == (0, 2, 32)
        assert op(q, k, v, offsets(0), precision=MX, backend="triton-lowp").shape == (0, 2, 32)


def test_refusals() -> None:
    q, k, v, _ = tensors(8, 8, 1, 32)

    def call(precision: OpPrecision | None, **options) -> None:
        ops.jagged_attention(q, k, v, offsets(0, 8), precision=precision, backend="triton-lowp", **options)

    for precision, options, reason in (
        (None, {}, "precision"),
        (OpPrecision(operands="e5m2"), {}, "E4M3"),
        (OpPrecision(scale_rule="floor"), {}, "rceil"),
        (OpPrecision(block=(1, 32)), {}, "1x32"),
        (MX, {"num_targets": torch.tensor([2], device=DEVICE)}, "candidates"),
    ):
        with pytest.raises(OpError, match=reason):
            call(precision, **options)


def test_chosen_before_the_emulation() -> None:
    """Where both can do a call, the kernel does it."""
    q, k, v, _ = tensors(8, 8, 1, 32)
    answers = [name for name, supported, _ in ops.available("gdpa", q, k, v, offsets(0, 8), precision=MX) if supported]
    assert answers[0] == "triton-lowp"
