"""The codec against exact arithmetic: every element code, every scale rule, and the edges."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.errors import OpError
from gem_precision.formats import (
    BLOCKS,
    ELEMENTS,
    MX,
    SCALE_RULES,
    code_values,
    decode,
    encode,
    pack_codes,
    quantize_fp8,
    quantize_mx,
    quantize_mx_groups,
    scale_values,
    swizzle_scales,
    unpack_codes,
    unswizzle_scales,
)

ALL = sorted(ELEMENTS)
BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def exact_scale(amax: float, elem, rule: str) -> int:
    """The table of `gem_precision.formats.mx` in rational arithmetic."""
    if not math.isfinite(amax):
        return 255
    if amax == 0:
        return 0
    a = Fraction(amax)

    def floor_log2(x: Fraction) -> int:
        e = math.frexp(float(x))[1] - 1
        while Fraction(2) ** e > x:
            e -= 1
        while Fraction(2) ** (e + 1) <= x:
            e += 1
        return e

    low = floor_log2(a)
    if rule == "floor":
        e = low - elem.emax
    elif rule == "ceil":
        e = low - elem.emax + (Fraction(2) ** low != a)
    elif rule == "rceil":
        ratio = a / Fraction(elem.largest)
        e = floor_log2(ratio)
        e += Fraction(2) ** e != ratio
    else:
        unit = Fraction(2) ** (low - elem.mbits)
        e = floor_log2(round(a / unit) * unit) - elem.emax
    return max(e, -127) + 127


@pytest.mark.parametrize("name", ALL)
def test_decode_of_every_code_is_exact(name):
    elem = ELEMENTS[name]
    codes = torch.arange(1 << elem.bits, dtype=torch.int32).to(torch.uint8)
    if elem.torch_dtype is not None:
        codes = codes.view(elem.torch_dtype)
    values = decode(codes, elem, torch.float64)
    torch.testing.assert_close(values, code_values(elem), rtol=0, atol=0, equal_nan=True)
    finite = values[values.isfinite()]
    assert finite.abs().max() == elem.largest
    # every scale byte beside every code, in float64, where the products are exact
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    mx = MX(codes[None, :].expand(256, -1).contiguous(), scales[:, None].expand(256, -(-codes.numel() // 32)).contiguous(), name, (1, 32))
    decoded = mx.dequantize(torch.float64)
    wanted = values[None, :] * torch.tensor([2.0 ** (e - 127) if e < 255 else math.nan for e in range(256)], dtype=torch.float64)[:, None]
    assert torch.equal(decoded.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert decoded[255].isnan().all()


@pytest.mark.parametrize("name", ALL)
def test_nearest_even_for_all_bf16(name):
    """Against a search over the format's values, ties by the even code; also signs, saturation and NaN."""
    elem = ELEMENTS[name]
    grid = code_values(elem)[: elem.sign_code]
    grid = grid[grid.isfinite()]
    x = BF16.float()
    codes = encode(x, elem).view(torch.uint8).to(torch.int64)
    magnitude = x.abs().double().clamp(max=elem.largest).nan_to_num(0.0)
    upper = torch.searchsorted(grid, magnitude).clamp(max=grid.numel() - 1)
    lower = (upper - 1).clamp(min=0)
    below, above = magnitude - grid[lower], grid[upper] - magnitude
    nearest = torch.where(below < above, lower, upper)
    nearest = torch.where((below == above) & (lower % 2 == 0), lower, nearest)
    wanted = torch.where(x.signbit(), nearest + elem.sign_code, nearest)
    wanted = torch.where(x.isnan(), elem.nan_code, wanted)
    got = torch.where(x.isnan(), codes & (elem.sign_code - 1), codes)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_integer_path_equals_the_cast(name):
    """The stochastic path with a threshold of 1/2 and no ties is rounding to nearest: ties both paths to one definition."""
    elem = ELEMENTS[name]
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(3)) * torch.exp2(torch.linspace(-20, 18, 200_000))
    half = torch.full(x.shape, 1 << 23, dtype=torch.int32)
    assert torch.equal(encode(x, elem, half).view(torch.uint8), encode(x, elem).view(torch.uint8))


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("name", ALL)
def test_scale_of_every_bf16_amax(name, rule):
    """Every power-of-two border, every mantissa, denormals, zero, NaN and Inf."""
    elem = ELEMENTS[name]
    amax = BF16[: 1 << 15]
    x = torch.zeros(amax.numel(), 32, dtype=torch.bfloat16)
    x[:, 5] = amax
    got = quantize_mx(x, elem=name, scale_rule=rule).scales[:, 0]
    sample = list(range(0, 1 << 15, 37)) + [m for e in range(256) for m in (e * 128 - 1, e * 128, e * 128 + 1) if 0 <= m < 1 << 15]
    sample += [m for e in (0, 1, 2, 100, 127, 250, 254) for m in range(e * 128, e * 128 + 128)]
    for i in sample:
        assert int(got[i]) == exact_scale(float(amax[i]), elem, rule), (i, float(amax[i]))


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70))
def test_any_fp32_bits(name, rule, bits):
    """Scale exact; elements equal to the quotient in float64 rounded by the codec's own tested rounding; decode finite."""
    elem = ELEMENTS[name]
    x = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    mx = quantize_mx(x, elem=name, scale_rule=rule)
    for b, byte in enumerate(mx.scales.tolist()):
        part = x[32 * b : 32 * b + 32]
        amax = float(part.abs().amax())
        assert byte == exact_scale(amax, elem, rule)
        decoded = mx.dequantize()[32 * b : 32 * b + 32]
        if byte == 255:
            assert decoded.isnan().all()
            continue
        assert decoded.isfinite().all()
        quotient = part.double() / 2.0 ** (byte - 127)
        step = torch.exp2(torch.frexp(quotient)[1].double().clamp(min=elem.emin + 1) - 1 - elem.mbits)
        wanted = (quotient / step).round() * step
        wanted = wanted.clamp(-elem.largest, elem.largest)
        got = decode(mx.data[32 * b : 32 * b + 32], elem, torch.float64)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("rule", SCALE_RULES)
def test_edges(rule):
    zero = quantize_mx(torch.zeros(3, 64), scale_rule=rule)
    assert (zero.scales == 0).all()
    assert torch.equal(zero.dequantize(), torch.zeros(3, 64))
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(2, 64)
        x[1, 40] = bad
        mx = quantize_mx(x, scale_rule=rule)
        assert mx.scales.tolist() == [[mx.scales[0, 0].item()] * 2, [mx.scales[0, 0].item(), 255]]
        out = mx.dequantize()
        assert out[1, 32:].isnan().all()
        assert torch.equal(out[0], x[0])
        assert torch.equal(out[1, :32], x[1, :32])
    tiny = torch.full((1, 32), 2.0**-149)
    assert quantize_mx(tiny, scale_rule=rule).scales.item() == 0
    small = torch.full((1, 32), 2.0**-126)
    assert torch.equal(quantize_mx(small, scale_rule=rule).dequantize(), small)
    top = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert quantize_mx(top, scale_rule=rule).dequantize().isfinite().all()


def test_only_floor_and_even_saturate():
    """448 < x < 512 overflows E4M3 under floor; rceil never saturates and wastes less range than ceil."""
    x = torch.linspace(1.0, 2.0, 129)[:-1, None].expand(-1, 32).contiguous()
    worst = {r: ((quantize_mx(x, scale_rule=r).dequantize() - x).abs() / x).amax().item() for r in SCALE_RULES}
    assert worst["floor"] > 0.12
    assert worst["ceil"] <= 1 / 16
    assert worst["rceil"] <= 1 / 16
    assert (quantize_mx(x, scale_rule="rceil").scales <= quantize_mx(x, scale_rule="ceil").scales).all()


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (64, 96), (5, 100), (33, 32), (2, 3, 40, 70), (0, 32), (4, 0)])
def test_blocks_and_tails(block, shape):
    """A tail block is a shorter block: nothing outside it has a say, and the payload is not padded."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    mx = quantize_mx(x, block=block, scale_rule="rceil")
    r, c = block
    assert mx.data.shape == x.shape
    assert mx.scales.shape == (*shape[:-2], -(-shape[-2] // r), -(-shape[-1] // c))
    decoded = mx.dequantize()
    for i in range(mx.scales.shape[-2]):
        for j in range(mx.scales.shape[-1]):
            part = x[..., i * r : (i + 1) * r, j * c : (j + 1) * c]
            if 1 in block:
                alone = quantize_mx(part.reshape(-1, part.shape[-2] * part.shape[-1]))
                assert torch.equal(alone.dequantize().view(part.shape), decoded[..., i * r : (i + 1) * r, j * c : (j + 1) * c])
            amax = part.abs().amax(dim=(-1, -2))
            got = mx.scales[..., i, j]
            wanted = torch.tensor([exact_scale(float(a), ELEMENTS["e4m3"], "rceil") for a in amax.flatten()]).view(amax.shape)
            assert torch.equal(got.long(), wanted)


def test_squares_are_transpose_invariant():
    x = torch.randn(70, 101, generator=torch.Generator().manual_seed(2))
    one, two = quantize_mx(x, block=(32, 32)).transpose(), quantize_mx(x.t().contiguous(), block=(32, 32))
    assert torch.equal(one.data.contiguous().view(torch.uint8), two.data.view(torch.uint8))
    assert torch.equal(one.scales, two.scales)
    rows, columns = quantize_mx(x, block=(32, 1)), quantize_mx(x.t().contiguous(), block=(1, 32))
    assert torch.equal(rows.transpose().data.contiguous().view(torch.uint8), columns.data.view(torch.uint8))


@pytest.mark.parametrize("name", ALL)
def test_elementwise_sqnr(name):
    """18 dB is the floor that the field uses for E4M3; the others follow from their mantissa bits."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(4))
    error = quantize_mx(x, elem=name).dequantize() - x
    sqnr = 10 * torch.log10(x.square().sum() / error.square().sum())
    assert sqnr >= {"e4m3": 30, "e5m2": 25, "e3m2": 24, "e2m3": 29, "e2m1": 17}[name]


@pytest.mark.parametrize(("bits", "n"), [(4, 1), (4, 64), (4, 33), (6, 4), (6, 5), (6, 30), (6, 31)])
def test_packing_round_trip(bits, n):
    codes = torch.randint(0, 1 << bits, (3, n), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, (n * bits + 7) // 8)
    assert torch.equal(unpack_codes(packed, bits, n), codes)


def test_fp4_order_is_low_nibble_first():
    assert pack_codes(torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8), 4).tolist() == [[0x21, 0x43]]


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (300, 7), (256, 8), (129, 5)])
def test_swizzle(shape):
    scales = torch.randint(0, 255, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    flat = swizzle_scales(scales)
    assert torch.equal(unswizzle_scales(flat, *shape), scales)
    columns = (shape[1] + 3) // 4
    for r, c in [(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, 0)]:
        tile = (r // 128) * columns + c // 4
        assert flat[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] == scales[r, c]


@pytest.mark.parametrize("offsets", [[0, 5, 5, 70, 103], [0, 32, 64], [0], [0, 0], [0, 1], [0, 31, 64, 97]])
@pytest.mark.parametrize("slack", [0, 3])
def test_jagged_groups(offsets, slack):
    rows = offsets[-1] + slack
    x = torch.randn(rows, 12, generator=torch.Generator().manual_seed(6))
    x[offsets[-1] :] = math.nan
    got = quantize_mx_groups(x, torch.tensor(offsets, dtype=torch.int32))
    decoded = got.dequantize()
    for g, (a, b) in enumerate(zip(offsets, offsets[1:])):
        alone = quantize_mx(x[a:b], block=(32, 1))
        assert torch.equal(got.data[a:b].view(torch.uint8), alone.data.view(torch.uint8))
        s = int(got.scale_offsets[g])
        assert torch.equal(got.scales[s : s + alone.scales.shape[0]], alone.scales)
        assert torch.equal(decoded[a:b], alone.dequantize())
    assert torch.equal(decoded[offsets[-1] :], torch.zeros(slack, 12))


@pytest.mark.parametrize("block", [(1, 0), (0, 1), (1, 128), (128, 1), (128, 128)])
def test_fp8_blocks(block):
    x = torch.randn(200, 300, generator=torch.Generator().manual_seed(7)) * torch.exp2(torch.linspace(-8, 8, 300))
    x[:, 128:256] = 0
    q = quantize_fp8(x, block=block)
    decoded = q.dequantize(torch.float64)
    # half an ulp of E4M3, or half its smallest step for small elements
    scales = (decoded / q.data.double()).nan_to_num(0)
    assert ((decoded - x.double()).abs() <= x.double().abs() / 16 * (1 + 1e-6) + scales.abs() * 2.0**-9).logical_or(decoded == 0).all()
    assert q.data.float().abs().max() == 448
    back = quantize_fp8(x.t().contiguous(), block=(block[1], block[0]))
    assert torch.equal(q.transpose().dequantize(), back.dequantize())


def test_fp8_edges():
    x = torch.ones(3, 256)
    x[0, 0], x[1] = math.inf, 0
    q = quantize_fp8(x)
    assert q.dequantize()[0, :128].isnan().all()
    assert torch.equal(q.dequantize()[1:], x[1:])
    assert torch.equal(q.dequantize()[0, 128:], x[0, 128:])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"elem": "e3m4"}, "e3m4"), ({"block": (1, 16)}, "1x16"), ({"scale_rule": "round"}, "round"), ({"rounding": "up"}, "up")],
)
def test_messages_name_the_choices(arguments, word):
    with pytest.raises(OpError, match=word):
        quantize_mx(torch.ones(2, 32), **arguments)
    with pytest.raises(OpError, match="float64"):
        quantize_mx(torch.ones(2, 32, dtype=torch.float64))


def test_scale_values_cover_all_bytes():
    values = scale_values(torch.arange(256, dtype=torch.int32).to(torch.uint8), torch.float64)
    assert values[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert values[255].isnan()
