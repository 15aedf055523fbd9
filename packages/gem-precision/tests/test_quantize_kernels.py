"""The Triton kernels against the codec, bit for bit, in the interpreter (on a GPU: on the GPU)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")

from gem_core.errors import OpError
from gem_precision import site as site_module
from gem_precision.formats import FP8, MX, element, quantize_fp8, quantize_mx, rank_generator, swizzle_scales
from gem_precision.gemm import gemm
from gem_precision.kernels import interpreting
from gem_precision.kernels.decode import decode_matrix
from gem_precision.kernels.measure import fits, measure_on_device, measures
from gem_precision.kernels.quantize import norm_backward, norm_quantize, quantize_matrix
from gem_precision.kernels.scaled_gemm import scaled_gemm
from gem_precision.linear import convert_linear
from gem_precision.policy import Operand, fp8_linear, mx_linear
from gem_precision.site import SUMS, Site, _corner, measure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(DEVICE == "cpu" and not interpreting(), reason="needs a GPU or TRITON_INTERPRET=1"),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]
SHAPES = [(64, 128), (33, 70), (1, 32), (130, 5), (36, 1), (96, 257), (256, 128)]


def numbers(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Many magnitudes, exact zeros, denormals, and a NaN and an Inf where there is room."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-40, 40, shape, generator=generator).float())
    x[torch.rand(shape, generator=generator) < 0.1] = 0
    x[0] *= 2.0**-110
    if shape[0] > 40:
        x[40, 3], x[2, -1] = math.nan, -math.inf
    x = x.to(dtype)
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        # the interpreter turns bf16 denormals into wrong fp32 numbers; fp32 inputs test them
        x[x.abs() < 2.0**-126] = 0
    return x.to(DEVICE)


def assert_same(got, wanted) -> None:
    mine, theirs = (q.data.contiguous().view(torch.uint8).cpu() for q in (got, wanted))
    differ = (mine != theirs).nonzero()
    assert not len(differ), [(tuple(i), mine[tuple(i)].item(), theirs[tuple(i)].item()) for i in differ[:8].tolist()]
    a, b = got.scales.contiguous(), wanted.scales.contiguous()
    if a.dtype == torch.float32:
        assert torch.equal(a.isnan(), b.isnan())
        a, b = a.nan_to_num(), b.nan_to_num()
    assert torch.equal(a.cpu(), b.cpu())
    assert got.block == wanted.block
    assert got.elem == wanted.elem


def sqnr(reference: torch.Tensor, got: torch.Tensor) -> float:
    noise = (reference.double() - got.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise)) if noise else math.inf


def codec(x: torch.Tensor, operand: Operand, along: int, generator: torch.Generator | None = None):
    block = operand.block if along == 1 else operand.block[::-1]
    if operand.format == "fp8":
        q = quantize_fp8(x, elem=operand.elem, block=block)
    else:
        q = quantize_mx(x, elem=operand.elem, block=block, scale_rule=operand.scale_rule, rounding=operand.rounding, generator=generator)
    return q if along == 1 else q.transpose()


@pytest.mark.parametrize("rule", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("elem", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_mx_both_directions_in_one_read(elem, rule):
    operand = Operand(elem=elem, scale_rule=rule)
    # borders do not depend on the rule
    for shape in SHAPES if rule == "rceil" else [(33, 70), (256, 128)]:
        x = numbers(shape)
        got = quantize_matrix(x, operand, operand)
        assert_same(got.rows, codec(x, operand, 1))
        assert_same(got.columns, codec(x, operand, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_single_directions(dtype):
    operand = Operand()
    x = numbers((70, 130), dtype)
    assert_same(quantize_matrix(x, operand).rows, codec(x, operand, 1))
    assert_same(quantize_matrix(x, None, operand).columns, codec(x, operand, 0))
    strided = numbers((70, 260), dtype)[:, :130]
    assert_same(quantize_matrix(strided, operand).rows, codec(strided, operand, 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_squares_serve_both_directions(shape):
    operand = Operand(block=(32, 32))
    x = numbers(shape)
    got = quantize_matrix(x, operand, operand)
    assert_same(got.rows, codec(x, operand, 1))
    assert_same(got.columns, codec(x, operand, 0))


@pytest.mark.parametrize("elem", ["e4m3", "e2m1"])
@pytest.mark.parametrize("block", [(1, 32), (32, 32)])
def test_stochastic_rounding_takes_the_same_bits(elem, block):
    operand = Operand(elem=elem, block=block, rounding="stochastic")
    x = numbers((70, 130))
    got = quantize_matrix(x, operand, operand, generator=rank_generator(3, 1))
    generator = rank_generator(3, 1)
    assert_same(got.rows, codec(x, operand, 1, generator))
    if block == (1, 32):
        assert_same(got.columns, codec(x, operand, 0, generator))
    else:
        assert torch.equal(got.columns.data.view(torch.uint8), got.rows.data.view(torch.uint8).t())
    assert not torch.equal(got.rows.data.view(torch.uint8), codec(x, Operand(elem=elem, block=block), 1).data.view(torch.uint8))


@pytest.mark.parametrize("shape", [(128, 256), (70, 300), (1, 128), (257, 129), (384, 256)])
def test_fp8_blocks(shape):
    x = numbers(shape)
    strip, square = Operand("fp8", block=(1, 128)), Operand("fp8", block=(128, 128))
    both = quantize_matrix(x, strip, strip)
    assert_same(both.rows, codec(x, strip, 1))
    assert_same(both.columns, codec(x, strip, 0))
    mixed = quantize_matrix(x, strip, square)
    assert_same(mixed.rows, codec(x, strip, 1))
    assert_same(mixed.columns, codec(x, square, 0))
    squares = quantize_matrix(x, square, square)
    assert_same(squares.rows, codec(x, square, 1))
    assert_same(squares.columns, codec(x, square, 0))


@pytest.mark.parametrize("rows", [Operand(), Operand("fp8", block=(1, 128))], ids=str)
def test_sums_of_columns(rows):
    """Of whole and of cut tiles, beside the same codes as without."""
    columns = rows if rows.format == "mx" else Operand("fp8", block=(128, 128))
    generator = torch.Generator().manual_seed(6)
    for shape in [(256, 384), (70, 300), (1, 128), (513, 40), (130, 5)]:
        x = torch.randn(shape, generator=generator).to(torch.bfloat16).to(DEVICE)
        got = quantize_matrix(x, rows, columns, pad=32, sums=True)
        torch.testing.assert_close(got.sums.double(), x.double().sum(0), rtol=1e-5, atol=1e-4)
        plain = quantize_matrix(x, rows, columns, pad=32)
        assert plain.sums is None
        assert_same(got.rows, plain.rows)
        assert_same(got.columns, plain.columns)


@pytest.mark.parametrize("shape", [(128, 128), (70, 300), (130, 33)])
def test_scales_in_tiles(shape):
    x, operand = numbers(shape), Operand()
    got = quantize_matrix(x, operand, operand, swizzle=True)
    assert torch.equal(got.rows.scales, swizzle_scales(codec(x, operand, 1).scales))
    assert torch.equal(got.columns.scales, swizzle_scales(codec(x, operand, 0).scales.contiguous()))


@pytest.mark.parametrize("act", ["relu", "gelu", "silu", "relu_square"])
def test_activation_fused_equals_the_pair(act):
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(70, 130, generator=generator) * 3).to(torch.bfloat16).to(DEVICE)
    operand = Operand()
    fused = quantize_matrix(x, operand, operand, act=act, write_y=True)
    assert_same(fused.rows, codec(fused.y, operand, 1))
    assert_same(fused.columns, codec(fused.y, operand, 0))
    wide = x.float()
    wanted = {
        "relu": torch.relu(wide),
        "gelu": torch.nn.functional.gelu(wide),
        "silu": torch.nn.functional.silu(wide),
        "relu_square": torch.relu(wide).square(),
    }[act]
    # one bf16 ulp: both round an fp32 value that may differ in its last bits
    torch.testing.assert_close(fused.y.float(), wanted, rtol=2**-7, atol=1e-6)
    # without writing y the codes are the same
    assert_same(quantize_matrix(x, operand, operand, act=act).rows, fused.rows)


@pytest.mark.parametrize(("act", "error"), [("gelu", 2.2e-5), ("silu", 2e-6)])
def test_activations_are_exact_to_a_fraction_of_a_bf16_step(act, error):
    """Relative to float64, from the tail on the left, where PyTorch's own GELU has lost all digits, to the right; at the ends of what
    there is."""
    x = torch.cat([torch.linspace(-8, 8, 4090), torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, 0.0])]).view(32, 128)
    got = quantize_matrix(x.to(DEVICE), Operand(), act=act, dtype=torch.float32, write_y=True).y.cpu().view(-1)
    wide = x.double().view(-1)
    wanted = wide * torch.special.erfc(-wide / math.sqrt(2)) / 2 if act == "gelu" else wide * torch.sigmoid(wide)
    assert (got[:4090] / wanted[:4090] - 1).abs().nan_to_num().max() <= error
    assert torch.equal(got[4090:].nan_to_num(nan=7.0, posinf=9.0), torch.tensor([9.0, 7.0, 7.0, 1e30, 0.0, 0.0]))


@pytest.mark.parametrize("operand", [Operand(), Operand("fp8", block=(1, 128)), Operand(block=(32, 32))], ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("shape", [(40, 256), (129, 100)])
def test_norm_fused_equals_the_pair(kind, operand, shape):
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(shape, generator=generator) * 2 + 0.5).to(torch.bfloat16).to(DEVICE)
    weight = torch.rand(shape[1], generator=generator).to(DEVICE) + 0.5
    bias = torch.randn(shape[1], generator=generator).to(DEVICE) if kind == "layer" else None
    fused = norm_quantize(x, operand, operand, kind=kind, weight=weight, bias=bias)
    alone = norm_quantize(x, kind=kind, weight=weight, bias=bias)
    assert torch.equal(fused.y, alone.y)
    assert_same(fused.rows, codec(alone.y, operand, 1))
    assert_same(fused.columns, codec(alone.y, operand, 0))
    wide = x.float()
    if kind == "layer":
        wanted = torch.nn.functional.layer_norm(wide, shape[1:], weight, bias, 1e-6)
    else:
        wanted = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(fused.y.float(), wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("width", [100, 2500])
def test_gradient_of_the_norm(kind, width):
    """Against autograd in float64: rows that one block holds, and longer ones."""
    generator = torch.Generator().manual_seed(4)
    x, g = (torch.randn(9, width, generator=generator) * 2 + 0.3 for _ in range(2))
    stats = norm_quantize(x.to(DEVICE), kind=kind).stats
    got = norm_backward(x.to(DEVICE), g.to(DEVICE), stats, kind)
    wide = x.double().requires_grad_()
    centred = wide - wide.mean(1, keepdim=True) if kind == "layer" else wide
    (centred * torch.rsqrt(centred.square().mean(1, keepdim=True) + 1e-6)).backward(g.double())
    torch.testing.assert_close(got.cpu().double(), wide.grad, rtol=1e-4, atol=1e-5)
    more = norm_backward(x.to(DEVICE), g.to(DEVICE), stats, kind, x.to(DEVICE))
    torch.testing.assert_close(more, got + x.to(DEVICE), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", [mx_linear(), fp8_linear("block")], ids=["mx", "fp8"])
def test_input_of_a_norm_is_handed_on(policy, monkeypatch):
    """A skip connection around norm and linear: the same result and gradients as with the addition by itself; also where only one of the
    two is used."""
    generator = torch.Generator().manual_seed(7)
    if DEVICE == "cpu":
        monkeypatch.setattr("gem_precision.kernels.usable", lambda t: t.dim() == 2)
    net = convert_linear(nn.Linear(96, 96).to(DEVICE), Site("s", "linear", [("p", policy)]))
    x, g = (torch.randn(5, 14, 96, generator=generator).to(DEVICE) for _ in range(2))
    found: dict[tuple[bool, str], list[torch.Tensor]] = {}
    for through in (False, True):
        for used in ("both", "result", "x"):
            net.zero_grad()
            inputs = x.clone().requires_grad_()
            y, passed = net.after_norm_through(inputs, "rms", 1e-6) if through else (net.after_norm(inputs, "rms", 1e-6), inputs)
            total = {"both": passed + y, "result": y, "x": passed * 2}[used]
            total.backward(g)
            found[through, used] = [total.detach(), inputs.grad, *([] if used == "x" else [net.weight.grad, net.bias.grad])]
    assert found[True, "both"][0].shape == x.shape
    for used in ("both", "result", "x"):
        for a, b in zip(found[False, used], found[True, used]):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("before", [("rms", 1e-6), ("layer", 1e-5), ("act", "gelu"), ("act", "relu"), ("act", "silu")], ids=str)
@pytest.mark.parametrize("policy", [mx_linear(), fp8_linear("block")], ids=["mx", "fp8"])
def test_linear_behind_a_fused_step_equals_the_pair(before, policy, monkeypatch):
    """Forward, dX and dW of norm or activation -> linear, one pass against two, under autocast from fp32 rows."""
    generator = torch.Generator().manual_seed(3)
    net = convert_linear(nn.Linear(96, 64).to(DEVICE), Site("s", "linear", [("p", policy)]))
    x = (torch.randn(70, 96, generator=generator) + 0.2).to(DEVICE)
    g = torch.randn(70, 64, generator=generator).to(DEVICE).bfloat16()
    found = []
    for fused in (False, True):
        if DEVICE == "cpu":
            monkeypatch.setattr("gem_precision.kernels.usable", lambda t, fused=fused: fused and t.dim() == 2)
        else:
            monkeypatch.setattr("gem_precision.linear.can_fuse", lambda *a, fused=fused: fused)
        net.zero_grad()
        inputs = x.clone().requires_grad_()
        with torch.autocast(DEVICE, torch.bfloat16):
            y = net.after_norm(inputs, *before) if before[0] != "act" else net.after_activation(inputs, before[1])
        y.backward(g.to(y.dtype))
        found.append((y.float(), inputs.grad, net.weight.grad))
    for a, b in zip(*found):
        # the interpreter cuts fp32 off to bf16 instead of rounding, and a code may then differ by one
        assert sqnr(a.detach(), b.detach()) > (30 if DEVICE == "cpu" else 45)


@pytest.mark.parametrize("policy", [mx_linear(), fp8_linear("block"), mx_linear(weight_block=(32, 32))], ids=["mx", "fp8", "squares"])
def test_linear_with_the_kernels_equals_the_codec(policy, monkeypatch):
    """Awkward sizes: K of every GEMM is no multiple of a block."""
    generator = torch.Generator().manual_seed(5)
    net = convert_linear(nn.Linear(70, 45).to(DEVICE), Site("s", "linear", [("p", policy)]))
    x, g = torch.randn(77, 70, generator=generator).to(DEVICE), torch.randn(77, 45, generator=generator).to(DEVICE)
    found = []
    for kernels in (False, True):
        monkeypatch.setattr("gem_precision.kernels.usable", lambda t, kernels=kernels: kernels and t.dim() == 2)
        net.zero_grad()
        inputs = x.clone().requires_grad_()
        y = net(inputs)
        y.backward(g)
        found.append((y.detach(), inputs.grad, net.weight.grad))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_nothing_is_left_unwritten(monkeypatch):
    """Outputs begin as garbage; equality with the codec above then covers every byte. Here: that the poison would be seen."""
    real = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        t = real(self, *args, **kwargs)
        t.view(torch.uint8).fill_(0xAB)
        return t

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    operand, x = Operand(), numbers((65, 100))
    got = quantize_matrix(x, operand, operand)
    assert_same(got.rows, codec(x, operand, 1))
    assert_same(got.columns, codec(x, operand, 0))


@pytest.mark.parametrize("operand", [Operand(), Operand("fp8", block=(1, 128)), Operand(block=(32, 32))], ids=str)
def test_token_counts_are_padded_inside(operand):
    """Seventy rows as K: zeros up to 96, the rest as without."""
    x = numbers((70, 64))
    got, plain = quantize_matrix(x, operand, operand, pad=32).columns, quantize_matrix(x, operand, operand).columns
    assert got.data.shape == (64, 96)
    assert torch.equal(got.data[:, :70].view(torch.uint8), plain.data.view(torch.uint8))
    assert not got.data[:, 70:].view(torch.uint8).any()
    torch.testing.assert_close(got.scales, plain.scales, rtol=0, atol=0, equal_nan=True)


def test_empty_matrices():
    operand = Operand()
    for shape in ((0, 64), (64, 0)):
        got = quantize_matrix(torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16), operand, operand)
        assert got.rows.shape == shape
        assert got.columns.shape == shape[::-1]


def test_refusals():
    x = torch.zeros(32, 32, device=DEVICE)
    with pytest.raises(OpError, match="neither"):
        quantize_matrix(x)
    with pytest.raises(OpError, match="cannot serve"):
        quantize_matrix(x, Operand(), Operand(elem="e5m2"))
    with pytest.raises(OpError, match="two passes"):
        quantize_matrix(x, Operand("fp8", block=(1, 0)))
    with pytest.raises(OpError, match="tanh"):
        quantize_matrix(x, Operand(), act="tanh")
    with pytest.raises(OpError, match="tiles"):
        quantize_matrix(x, Operand(block=(32, 32)), swizzle=True)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device: the interpreter has no dot_scaled")
@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 128), (70, 40, 96), (1, 5, 33)])
@pytest.mark.parametrize("weights", [(1, 32), (32, 32)])
def test_scaled_gemm_equals_the_emulation(m, n, k, weights):
    generator = torch.Generator().manual_seed(m)
    a = quantize_mx(torch.randn(m, k, generator=generator).to(DEVICE))
    b = quantize_mx(torch.randn(n, k, generator=generator).to(DEVICE), block=weights)
    got, wanted = scaled_gemm(a, b, torch.float32), gemm(a, b, torch.float32, "emulated")
    # exact products, fp32 sums in another order
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_more_than_two_to_the_31_elements():
    """A matrix of 2^31 + 2^20 bf16 elements: the last rows are what they are alone, both ways."""
    operand, columns = Operand(), 4096
    rows = (1 << 31) // columns + 256
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    x[-256:] = torch.randn(256, columns, device=DEVICE)
    got = quantize_matrix(x, operand, operand)
    assert_same(type(got.rows)(got.rows.data[-256:], got.rows.scales[-256:], "e4m3", (1, 32)), codec(x[-256:], operand, 1))
    tail = codec(x[-256:], operand, 0)
    assert torch.equal(got.columns.data[:, -256:].contiguous().view(torch.uint8), tail.data.contiguous().view(torch.uint8))
    assert torch.equal(got.columns.scales[:, -8:], tail.scales)


@pytest.mark.parametrize("elem", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("kind", "block"), [("mx", (1, 32)), ("mx", (32, 32)), ("fp8", (1, 128)), ("fp8", (128, 128)), ("", (0, 0))])
def test_samples_are_the_codec_s(kind, block, elem, monkeypatch):
    """What the kernels measure is what PyTorch does, of rows and of columns, padded and not, with and without NaN and Inf, everywhere a
    window can be; every count exactly."""
    for shape, seed in (((40, 2080), 0), ((129, 70), 1), ((33, 130), 2)):
        x = numbers(shape, seed=seed)
        if seed == 2:
            x = torch.where(x.isfinite(), x, 0)
        for along in (0, 1):
            wide, q = (x, None) if along else (x.t(), None)
            if kind:
                operand = Operand(kind, elem, block)
                made = quantize_matrix(x, *((operand, None) if along else (None, operand)), pad=32)
                q = made.rows if along else made.columns
            for turn in (0, 1):
                assert fits(wide, q)
                row, column = _corner(wide, turn)
                window = row, min(row + 128, wide.shape[0]), column, min(column + 2048, wide.shape[1])
                got = measure_on_device(wide, q, window).cpu()
                monkeypatch.setattr(site_module, "measures", lambda *_: False)
                wanted = measure(wide, q, turn).cpu()
                exact = [SUMS.index(n) for n in ("amax", "saturated", "flushed", "count", "dead", "spoiled", "bad")]
                assert got[exact].tolist() == wanted[exact].tolist(), (shape, along, turn)
                torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elem", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("kind", "block"), [("mx", (1, 32)), ("mx", (32, 32)), ("fp8", (1, 128)), ("fp8", (128, 128)), ("fp8", (1, 0))])
def test_decoding_is_the_codec_s(kind, block, elem, dtype):
    """Every code under every scale, NaN and the ends of the range among them; rows and columns of odd sizes, one row and one column."""
    generator = torch.Generator().manual_seed(0)
    family = MX if kind == "mx" else FP8
    for rows, cols in ((256, 256), (33, 70), (1, 32), (130, 1)):
        if (rows, cols) == (256, 256):
            codes = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
        else:
            codes = torch.randint(0, 256, (rows, cols), generator=generator, dtype=torch.uint8)
        if elem == "e5m2":
            # the codec makes no infinities
            codes = torch.where(codes & 0x7F == 0x7C, 0x7B, codes).to(torch.uint8)
        lines, strips = (-(-size // (n or size)) for size, n in zip((rows, cols), block))
        if kind == "mx":
            scales = torch.arange(lines * strips).view(lines, strips).to(torch.uint8)
        else:
            scales = torch.rand(lines, strips, generator=generator) * 2.0**-9
        q = family(codes.view(element(elem).torch_dtype).to(DEVICE), scales.to(DEVICE), elem, block)
        if DEVICE == "cpu" and kind == "fp8" and dtype == torch.bfloat16:
            # the interpreter cuts fp32 off to bf16 instead of rounding
            continue
        for given in (q, q.transpose() if block[0] == block[1] else q):
            got, wanted = decode_matrix(given, dtype).cpu(), given.dequantize(dtype).cpu()
            if DEVICE == "cpu" and dtype == torch.bfloat16:
                tiny = wanted.abs() < 2.0**-126
                got, wanted = torch.where(tiny, 0, got), torch.where(tiny, 0, wanted)
            assert torch.equal(got.isnan(), wanted.isnan())
            assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


def test_samples_that_the_kernels_leave_to_pytorch():
    x = torch.zeros(64, 64, device=DEVICE)
    assert not fits(x, quantize_fp8(x, block=(1, 0)))
    assert not fits(x, quantize_mx(x, elem="e2m1"))
    assert not fits(x[None], None)
    assert not fits(x[:, ::2], None)
    assert measures(x, None) == (DEVICE == "cuda")
    assert not measures(x.double(), None)
