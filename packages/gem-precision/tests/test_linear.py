"""Linear and grouped linear: SQNR floors, exactness of the emulation, policies, autograd plumbing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gem_core.errors import ConfigError, OpError
from gem_core.model.layers import added_linear
from gem_precision import linear_op
from gem_precision.formats import FP8, quantize_fp8, quantize_mx
from gem_precision.gemm import PAD, gemm, quantise, supports, with_spare_rows
from gem_precision.kernels.block_gemm import parts_of, serves
from gem_precision.linear import GroupedLinear, convert_linear, grouped_linear, low_precision_linear
from gem_precision.policy import BF16, Gemm, LinearPolicy, Operand, fp8_linear, mx_linear
from gem_precision.site import SUMS, Site, linear_levels, measure

POLICIES = {
    "mxfp8": mx_linear(),
    "mxfp8-squares": mx_linear(weight_block=(32, 32)),
    "mxfp8-rht-sr": mx_linear(stochastic_gradients=True, hadamard=16),
    "mxfp8-rht32": mx_linear(hadamard=32),
    "mxfp8-wgrad-bf16": mx_linear(wgrad=False),
    "fp8-rowwise": fp8_linear("rowwise"),
    "fp8-block": fp8_linear("block"),
}


def sqnr(reference: Tensor, got: Tensor) -> float:
    reference = reference.double()
    return float(10 * torch.log10(reference.square().sum() / (reference - got.double()).square().sum()))


def run(policy: LinearPolicy, m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    generator = torch.Generator().manual_seed(m + k + n)
    x = torch.randn(m, k, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype).requires_grad_()
    g = torch.randn(m, n, generator=generator).to(dtype)
    y = low_precision_linear(x, w, None, Site("test", "linear", [("p", policy)], generator=torch.Generator().manual_seed(1)))
    y.backward(g)
    xd, wd, gd = x.detach().double(), w.detach().double(), g.double()
    return {"y": sqnr(xd @ wd.t(), y.detach()), "dx": sqnr(gd @ wd, x.grad), "dw": sqnr(gd.t() @ xd, w.grad)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("shape", [(256, 256, 128), (300, 96, 70), (33, 512, 40)])
def test_sqnr_floors(name, shape, dtype):
    """Forward >= 26 dB, dX >= 25, dW >= 24, >= 34 with wgrad in bf16. Stochastic rounding doubles the noise of an operand's gradient
    (uniform over a whole step): 25 - 10 log10(5/2) for GEMMs with one such operand."""
    found = run(POLICIES[name], *shape, dtype)
    stochastic = 10 * math.log10(5 / 2) if name == "mxfp8-rht-sr" else 0.0
    assert found["y"] >= 26
    assert found["dx"] >= 25 - stochastic
    assert found["dw"] >= (34 if name == "mxfp8-wgrad-bf16" else 24 - stochastic)


def test_emulation_is_the_product_of_decoded_operands():
    """To the last bit where every product and sum is exact: small integers times powers of two."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (64, 96), generator=generator).float()
    w = torch.randint(-8, 9, (32, 96), generator=generator).float() / 64
    got = gemm(quantize_mx(x), quantize_mx(w), torch.float32)
    assert torch.equal(got, x @ w.t())


def test_each_gemm_quantises_along_its_own_k():
    """Rows of x with very different sizes: wgrad, which contracts over the rows, must share scales down the columns."""
    site = Site("s", "linear", [("mxfp8", mx_linear())], sampling=True)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    g = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    low_precision_linear(x, w, None, site).backward(g)
    x0, w0 = x.detach(), w.detach()
    wanted_y = quantize_mx(x0).dequantize() @ quantize_mx(w0).dequantize().t()
    wanted_dx = quantize_mx(g).dequantize() @ quantize_mx(w0, block=(32, 1)).dequantize()
    wanted_dw = quantize_mx(g, block=(32, 1)).dequantize().t() @ quantize_mx(x0, block=(32, 1)).dequantize()
    torch.testing.assert_close(x.grad, wanted_dx)
    torch.testing.assert_close(w.grad, wanted_dw)
    torch.testing.assert_close(low_precision_linear(x, w, None, site).detach(), wanted_y)
    assert set(site.samples) == {"fprop.x", "fprop.w", "wgrad.x", "dy", "dgrad.dy", "dgrad.w", "wgrad.dy"}


@pytest.mark.parametrize("d", [16, 32])
def test_hadamard_helps_where_an_outlier_hurts(d):
    """One 10-sigma element a row in four bits: its block mates lose less when it is spread over them first."""
    generator = torch.Generator().manual_seed(4)
    x, w = torch.randn(128, 256, generator=generator), torch.randn(64, 256, generator=generator)
    x[torch.arange(128), torch.randint(0, 256, (128,), generator=generator)] = 10.0
    fp4, reference = Operand(elem="e2m1"), x.double() @ w.double().t()
    plain, spread = (sqnr(reference, gemm(*(quantise(t, fp4, hadamard=h) for t in (x, w)), torch.float32)) for h in (None, d))
    assert spread >= plain + 1


def test_saved_activation_is_eight_bits():
    saved: list[Tensor] = []
    x = torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        low_precision_linear(x, w, None, Site("s", "linear", [("mxfp8", mx_linear())]))
    assert not any(t.shape == x.shape and t.dtype == x.dtype for t in saved)
    assert sum(t.numel() * t.element_size() for t in saved if t.data_ptr() != w.data_ptr()) == 128 * 64 * 33 // 32


def test_autocast_and_extra_dims():
    x = torch.randn(4, 5, 64, requires_grad=True)
    linear = convert_linear(nn.Linear(64, 32), Site("s", "linear", [("mxfp8", mx_linear())]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    assert y.shape == (4, 5, 32)
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert linear.weight.grad.dtype == torch.float32
    torch.testing.assert_close(linear.bias.grad, torch.full((32,), 20.0))
    assert linear(torch.zeros(0, 64)).shape == (0, 32)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-rht32", "fp8-block", "mxfp8-wgrad-bf16"])
def test_compiled_whole(name, autocast):
    """One graph without breaks, the same numbers; a demotion takes effect; samples are taken without compiling anew."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    sites = [Site(str(i), "linear", linear_levels(name, POLICIES[name])) for i in (0, 2)]
    convert_linear(net[0], sites[0])
    convert_linear(net[2], sites[1])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=backend)

    def gradients(model, rows):
        net.zero_grad()
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().sum().backward()
        return [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]

    for level in (0, len(sites[0].levels) - 1):
        for site in sites:
            site.move(level)
        for rows, sampling in ((40, False), (70, False), (40, True)):
            for site in sites:
                site.sampling = sampling
                site.samples.clear()
            found = gradients(compiled, rows)
            seen = [set(site.samples) for site in sites]
            for site in sites:
                site.samples.clear()
            for a, b in zip(found, gradients(net, rows)):
                torch.testing.assert_close(a, b)
            assert seen == [set(site.samples) for site in sites]
            assert all(seen) == sampling
        assert len(graphs) <= 2 * (1 + (level > 0))


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("wants_dw", [True, False])
def test_ops_keep_their_promises(name, wants_dw):
    """Fake shapes and strides are the real ones, at each level."""
    site = Site("s", "linear", linear_levels(name, POLICIES[name]))
    for level in range(len(site.levels)):
        site.move(level)
        x, w = torch.randn(45, 70, requires_grad=True), torch.randn(40, 70, requires_grad=wants_dw)
        b = torch.randn(40, requires_grad=wants_dw)
        tests = ("test_schema", "test_faketensor", "test_autograd_registration")
        told = (site.key, torch.float32, "", 0.0, wants_dw, True)
        for plus in (None, torch.randn(45, 40, requires_grad=True)):
            torch.library.opcheck(linear_op.linear, (x, w, b, *told, plus), test_utils=tests)
        y, data, scales, stats = linear_op.linear(x, w, b, *told, None)
        with FakeTensorMode() as mode:
            fakes = linear_op.linear(*map(mode.from_tensor, (x, w, b)), *told, None)
        for real, fake in zip((y, data, scales, stats), fakes):
            assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)
        saved = x.detach() if wants_dw and site.policy.wgrad.b is None else None
        told_back = (site.key, torch.float32, "", 0.0, True, wants_dw, wants_dw)
        torch.library.opcheck(
            linear_op.linear_backward, (torch.randn(45, 40), w.detach(), saved, data, scales, stats, *told_back), test_utils=tests[:2]
        )


def test_conversion_is_in_place():
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    keys, weight = list(net.state_dict()), net[0].weight
    x = torch.randn(8, 32)
    before = net(x)
    convert_linear(net[0], Site("0", "linear", [("mxfp8", mx_linear())]))
    assert list(net.state_dict()) == keys
    assert net[0].weight is weight
    assert not torch.equal(net(x), before)
    assert "mxfp8" in repr(net[0])

    class Odd(nn.Linear):
        pass

    with pytest.raises(OpError, match="Odd"):
        convert_linear(Odd(4, 4), Site("odd", "linear", [("mxfp8", mx_linear())]))


def test_ladder():
    names = [name for name, _ in linear_levels("mxfp8", mx_linear())]
    assert names == ["mxfp8", "mxfp8-wgrad-bf16", "bf16"]
    assert [n for n, _ in linear_levels("mxfp8-wgrad-bf16", mx_linear(wgrad=False))] == ["mxfp8-wgrad-bf16", "bf16"]
    assert [n for n, _ in linear_levels("bf16", mx_linear().all_bf16())] == ["bf16"]
    assert hash(mx_linear()) == hash(mx_linear())


@pytest.mark.parametrize("offsets", [[0, 40, 40, 97, 128], [0, 1], [0, 0, 0], [0, 64, 128]])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-rht-sr", "mxfp8-wgrad-bf16", "mxfp8-squares"])
def test_grouped_linear(name, offsets):
    rows, groups = offsets[-1] + 3, len(offsets) - 1
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=generator)
    x[offsets[-1] :] = math.nan
    x.requires_grad_()
    w = (torch.randn(groups, 48, 64, generator=generator) / 8).requires_grad_()
    b = torch.randn(groups, 48, generator=generator).requires_grad_()
    g = torch.randn(rows, 48, generator=generator)
    site = Site("s", "grouped", [("p", POLICIES[name])], generator=torch.Generator().manual_seed(2))
    y = grouped_linear(x, w, torch.tensor(offsets), b, site=site)
    y.backward(g)
    assert torch.equal(y[offsets[-1] :], torch.zeros(3, 48))
    assert torch.equal(x.grad[offsets[-1] :], torch.zeros(3, 64))
    slack = 10 * math.log10(5 / 2) if "sr" in name else 0.0
    for i, (a, e) in enumerate(zip(offsets, offsets[1:])):
        xd, wd, gd = x.detach()[a:e].double(), w.detach()[i].double(), g[a:e].double()
        if a == e:
            assert torch.equal(w.grad[i], torch.zeros(48, 64))
            continue
        assert sqnr(xd @ wd.t() + b.detach()[i].double(), y.detach()[a:e]) >= 26
        assert sqnr(gd @ wd, x.grad[a:e]) >= 25 - slack
        assert sqnr(gd.t() @ xd, w.grad[i]) >= 24 - slack
        torch.testing.assert_close(b.grad[i], g[a:e].sum(0))
    if name == "mxfp8":
        # a group's gradient is the one it has alone: no block reaches across a border
        for i, (a, e) in enumerate(zip(offsets, offsets[1:])):
            wi = w.detach()[i].clone().requires_grad_()
            low_precision_linear(x.detach()[a:e], wi, None, Site("one", "linear", [("p", POLICIES[name])])).backward(g[a:e])
            torch.testing.assert_close(w.grad[i], wi.grad, rtol=1e-5, atol=1e-5)


def test_grouped_module_without_site_and_fp8_refusal():
    layer = GroupedLinear(2, 16, 8)
    x, offsets = torch.randn(10, 16), torch.tensor([0, 4, 9])
    y = layer(x, offsets)
    torch.testing.assert_close(y[4:9], x[4:9] @ layer.weight[1].t() + layer.bias[1])
    assert torch.equal(y[9], torch.zeros(8))
    layer.site = Site("g", "grouped", [("fp8-block", fp8_linear("block"))])
    with pytest.raises(OpError, match="MX or bf16"):
        layer(x, offsets)


def test_rows_are_filled_up_from_the_storage_or_by_a_copy():
    base = torch.arange(7 * 16, dtype=torch.uint8).view(7, 16)
    spare = with_spare_rows(base[:5].view(torch.float8_e4m3fn))
    assert spare.shape == (8, 16)
    roomy = torch.zeros(8, 16, dtype=torch.uint8)
    inside = with_spare_rows(roomy[:5])
    assert inside.shape == (8, 16)
    assert inside.data_ptr() == roomy.data_ptr()
    assert torch.equal(spare[:5].view(torch.uint8), base[:5])


def test_policies_refuse_nonsense():
    with pytest.raises(ConfigError, match="both"):
        Gemm(Operand(), None)
    with pytest.raises(ConfigError, match="24"):
        Gemm(Operand(), Operand(), hadamard=24)
    with pytest.raises(ConfigError, match="block"):
        Operand(block=(32, 1))
    assert not BF16.quantised
    assert "RHT 16" in str(replace(Gemm(Operand(), Operand()), hadamard=16))


def test_back_ends_refuse_with_a_reason_on_cpu():
    a, b = quantize_mx(torch.randn(32, 64)), quantize_mx(torch.randn(32, 64))
    for name in ("torch", "triton"):
        assert "cpu" in supports(name, a, b).reason
        with pytest.raises(OpError, match="cpu"):
            gemm(a, b, torch.float32, name)
    with pytest.raises(OpError, match="cutlass"):
        gemm(a, b, torch.float32, "cutlass")
    assert "families" in supports("torch", a, quantize_fp8(torch.randn(32, 64))).reason


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_measure_counts_what_is_not_finite_and_leaves_it_out(bad):
    x = torch.randn(4, 64)
    clean = measure(x, quantize_mx(x))
    x[1, 3] = bad
    spoiled = measure(x, quantize_mx(x))
    named = dict(zip(SUMS, spoiled.tolist()))
    assert (named["bad"], named["spoiled"]) == (1, 1)
    assert spoiled.isfinite().all()
    assert named["count"] == clean[SUMS.index("count")] - 32


def test_measure_sees_saturation_flushing_and_error():
    x = torch.full((1, 32), 500.0)
    # floor: scale 2^0, 500 saturates at 448
    assert measure(x, quantize_mx(x, scale_rule="floor"))[1] == 32
    assert measure(x, quantize_mx(x, scale_rule="rceil"))[1] == 0
    x = torch.ones(1, 32)
    x[0, 0] = 1e7
    sums = measure(x, quantize_mx(x))
    assert sums[2] == 31
    assert sums[8] / sums[3] == pytest.approx(31 / 32, abs=0.01)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [512, 500, 513])
@pytest.mark.parametrize("name", ["fp8-rowwise", "fp8-block", "mxfp8"])
def test_hardware_back_ends_equal_the_emulation(name, tokens):
    """cuBLAS against decoded operands, forward and backward. bf16 output: half an ulp. Any token count."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(tokens, 640, generator=generator, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(384, 640, generator=generator, device="cuda", dtype=torch.bfloat16)
    policy = POLICIES[name]
    a, b = quantise(x, policy.fprop.a), quantise(w, policy.fprop.b)
    answer = supports("torch", a, b)
    if not answer:
        pytest.skip(answer.reason)
    got, wanted = gemm(a, b, torch.bfloat16, "torch"), gemm(a, b, torch.float32, "emulated")
    torch.testing.assert_close(got.float(), wanted, rtol=2**-7, atol=wanted.abs().max().item() * 2**-9)
    if policy.wgrad.a is None or policy.wgrad.a.block == (1, 0):
        return
    ga, gb = quantise(x, policy.wgrad.a, along=0, pad=PAD), quantise(torch.randn_like(x), policy.wgrad.b, along=0, pad=PAD)
    got, wanted = gemm(ga, gb, torch.bfloat16, "torch"), gemm(ga, gb, torch.float32, "emulated")
    torch.testing.assert_close(got.float(), wanted, rtol=2**-7, atol=wanted.abs().max().item() * 2**-9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["bf16", "fp8-rowwise", "fp8-block", "mxfp8"])
def test_bias(name, device):
    """Added to the product, and its gradient: in the type of the result, whatever the back end does; any token count."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(0)
    for tokens in (512, 513):
        x, w, b = (torch.randn(size, generator=generator).to(device) for size in ((tokens, 640), (384, 640), (384,)))
        policy = POLICIES["fp8-block"].all_bf16() if name == "bf16" else POLICIES[name]
        site = Site("s", "linear", [("p", policy)])
        w, b = w.requires_grad_(), b.requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            plain, y = low_precision_linear(x, w, None, site), low_precision_linear(x, w, b, site)
        assert y.dtype == torch.bfloat16
        # both sides were rounded to bf16, and where product and bias cancel the product's rounding is what is left
        wanted = plain.float() + b.bfloat16().float()
        assert ((y.float() - wanted).abs() <= 2**-8 * (plain.float().abs() + y.float().abs()) + 2**-8).all()
        g = torch.randn(tokens, 384, generator=generator).to(device, torch.bfloat16)
        (db,) = torch.autograd.grad(y, b, g)
        assert db.dtype == torch.float32
        torch.testing.assert_close(db, g.float().sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 300), pytest.param("cuda", 40_013, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["bf16", "fp8-block", "mxfp8"])
def test_what_is_added_beside_the_product(name, device, tokens):
    """`added_linear` by the linear itself: the sum that the two make one after the other, but for roundings, and the same gradients."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(0)
    policy = POLICIES["fp8-block"].all_bf16() if name == "bf16" else POLICIES[name]
    layer = convert_linear(nn.Linear(384, 512).to(device), Site("s", "linear", [("p", policy)]))
    x, residual, g = (
        torch.randn(size, generator=generator).to(device, torch.bfloat16) for size in ((tokens, 384), (tokens, 512), (tokens, 512))
    )
    x.requires_grad_()
    residual.requires_grad_()
    inputs = (x, residual, layer.weight, layer.bias)
    with torch.autocast(device, torch.bfloat16):
        y = added_linear(layer, x, residual)
        product = layer(x)
        apart = residual + product
        wide = added_linear(layer, x, residual.float())
    assert y.dtype == torch.bfloat16
    assert wide.dtype == torch.float32
    wanted = residual.float() + product.float()
    assert ((y.float() - wanted).abs() <= 2**-8 * (product.float().abs() + y.float().abs()) + 2**-8).all()
    for got, other in zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(apart, inputs, g)):
        assert torch.equal(got, other)


@pytest.mark.parametrize(
    ("m", "n", "k", "parts"),
    [(262_144, 3072, 1024, 1), (1024, 1024, 262_144, 4), (3072, 1024, 262_144, 4), (2048, 1024, 131_072, 2), (512, 384, 640, 0)],
)
def test_k_is_cut_where_tiles_do_not_fill_the_gpu(m, n, k, parts, monkeypatch):
    monkeypatch.setattr("gem_precision.kernels.block_gemm.multiprocessors", lambda device: 132)
    a, b = (
        FP8(
            torch.empty(rows, k, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty(-(-rows // r), k // 128, device="meta"),
            "e4m3",
            (r, 128),
        )
        for rows, r in ((m, 1), (n, 128))
    )
    assert parts_of(a, b) == parts


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("tokens", "n", "k", "parts"),
    [(40_000, 384, 640, 4), (39_871, 384, 640, 4), (20_011, 1000, 992, 2), (200_000, 100, 80, 16), (8_000, 384, 640, 0)],
)
def test_wgrad_of_many_tokens_is_made_in_parts(tokens, n, k, parts):
    """Against float64 of the decoded operands; twice the same bits, also as a graph. NaN stays in its row."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    policy = POLICIES["fp8-block"]
    g, x = (torch.randn(tokens, width, generator=generator, device="cuda", dtype=torch.bfloat16) for width in (n, k))
    g[5, 3] = torch.nan
    a, b = quantise(g, policy.wgrad.a, along=0, pad=PAD), quantise(x, policy.wgrad.b, along=0, pad=PAD)
    if not (answer := supports("torch", a, b)):
        pytest.skip(answer.reason)
    assert parts_of(a, b) == parts
    got = gemm(a, b, torch.float32)
    wanted = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    rest = torch.arange(n, device="cuda") != 3
    assert got[3].isnan().all()
    assert 20 * torch.log10(wanted[rest].norm() / (got - wanted)[rest].norm()) > 50
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = gemm(a, b, torch.float32)
    for _ in range(3):
        again.zero_()
        graph.replay()
        assert torch.equal(again[rest], got[rest])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("tokens", "n", "k"), [(40_000, 384, 640), (39_871, 992, 80), (70_001, 144, 1024), (33_333, 2048, 144)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_many_rows_leave_in_sixteen_bits(tokens, n, k, dtype):
    """Against float64 of the decoded operands, to half an ulp of the sum of product and bias; twice the same bits, also as a graph."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    policy = POLICIES["fp8-block"]
    x, w = (torch.randn(size, generator=generator, device="cuda") for size in ((tokens, k), (n, k)))
    x[5, 3] = torch.nan
    x[tokens - 1] *= 30
    bias = torch.randn(n, generator=generator, device="cuda").to(dtype)
    a, b = quantise(x, policy.fprop.a), quantise(w, policy.fprop.b)
    if not (answer := supports("torch", a, b)):
        pytest.skip(answer.reason)
    assert serves(a, b)
    assert parts_of(a, b) == 1
    wanted = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    rest = torch.arange(tokens, device="cuda") != 5
    residual = torch.randn(tokens, n, generator=generator, device="cuda").to(dtype)
    for shift, plus in ((None, None), (bias, None), (None, residual), (bias, residual)):
        got = gemm(a, b, dtype, bias=shift, plus=plus)
        exact = wanted + sum(t.double() for t in (shift, plus) if t is not None)
        assert got.dtype == dtype
        assert got[5].isnan().all()
        ulp = torch.finfo(dtype).eps
        # the tensor cores keep some 14 bits of a block's products
        slack = wanted[rest].abs().amax(1, keepdim=True) * 2.0**-9
        assert ((got[rest].double() - exact[rest]).abs() <= exact[rest].abs() * ulp / 2 + slack).all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = gemm(a, b, dtype, bias=shift, plus=plus)
        for _ in range(3):
            again.zero_()
            graph.replay()
            assert torch.equal(again[rest], got[rest])
