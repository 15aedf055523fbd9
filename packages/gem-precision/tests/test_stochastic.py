"""Stochastic rounding: unbiased, independent between ranks and calls, repeatable; and the random Hadamard transform."""

from __future__ import annotations

import math

import pytest
import torch

from gem_core.errors import OpError
from gem_precision.formats import ELEMENTS, draw_seed, encode, quantize_mx, random_bits, rank_generator
from gem_precision.hadamard import hadamard_matrix, random_hadamard

BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def log_tail(n: int, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """log P(X >= k) of a binomial, bounded from above by the first term times a geometric series."""
    log_term = (
        math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1) + k * p.clamp(min=1e-300).log() + (n - k) * torch.log1p(-p)
    )
    ratio = (n - k) / (k + 1) * p / (1 - p)
    return torch.where(k <= n * p, 0.0, log_term - torch.log1p(-ratio.clamp(max=0.999)))


def test_statistics_of_all_bf16_inputs():
    """10^4 draws of every input at scale 1. Where n p (1 - p) >= 10: |z| <= 6 and mean z^2 = 1 +- 0.05; elsewhere the count of
    up-roundings lies inside the binomial 1 - 10^-9 interval; representable inputs never change."""
    elem, draws, chunk = ELEMENTS["e4m3"], 10_000, 8
    x = BF16.float()
    inside = x.abs() <= elem.largest
    x = x[inside]
    down = encode(x, elem, torch.full(x.shape, (1 << 24) - 1, dtype=torch.int32))
    up_codes = encode(x, elem, torch.zeros(x.shape, dtype=torch.int32))
    low, high = down.double().abs(), up_codes.double().abs()
    # the smallest numbers: threshold 0 after rounding to 2^-24, so the neighbour above is one step
    step = torch.exp2(torch.frexp(x.double().abs())[1].clamp(min=elem.emin + 1).double() - 1 - elem.mbits)
    high = torch.where((high == low) & (x.double().abs() > low), low + step, high)
    p = torch.where(high > low, (x.double().abs() - low) / (high - low).clamp(min=1e-30), 0.0)
    generator = rank_generator(seed=11, rank=0)
    count = torch.zeros(x.shape, dtype=torch.int32)
    wide = x.expand(chunk, -1)
    low_bits = down.view(torch.uint8).expand(chunk, -1)
    for _ in range(draws // chunk):
        bits = random_bits(draw_seed(generator, torch.device("cpu")), tuple(wide.shape))
        moved = encode(wide, elem, bits).view(torch.uint8) != low_bits
        count += moved.sum(0, dtype=torch.int32)
    n = draws
    assert (count[p == 0] == 0).all()
    variance = n * p * (1 - p)
    many = variance >= 10
    z = (count.double() - n * p)[many] / variance[many].sqrt()
    assert many.sum() > 3000
    assert z.abs().max() <= 6
    assert abs(z.square().mean() - 1) <= 0.05
    k = count.double()
    assert (log_tail(n, p, k)[~many] >= math.log(0.5e-9)).all()
    assert (log_tail(n, 1 - p, n - k)[~many] >= math.log(0.5e-9)).all()


@pytest.mark.parametrize("name", sorted(ELEMENTS))
def test_every_format_is_unbiased_and_rounds_to_neighbours(name):
    elem = ELEMENTS[name]
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    generator = rank_generator(5, 0)
    draws = torch.stack([quantize_mx(x, elem=name, rounding="stochastic", generator=generator).dequantize() for _ in range(400)])
    nearest = quantize_mx(x, elem=name).dequantize()
    step = x.abs().amax(1, keepdim=True) * 2.0**-elem.mbits
    # sigma of one draw is at most half a step, of the mean of 400 a twentieth of that
    assert ((draws.mean(0) - x).abs() <= 6 * step / 2 / 20).all()
    assert ((draws - x).abs() <= step).all()
    biased = (nearest - x).abs().mean()
    assert (draws.mean(0) - x).abs().mean() < 0.2 * biased


def test_representable_inputs_never_change():
    x = quantize_mx(torch.randn(40, 64, generator=torch.Generator().manual_seed(2))).dequantize()
    for seed in range(20):
        mx = quantize_mx(x, rounding="stochastic", generator=torch.Generator().manual_seed(seed))
        assert torch.equal(mx.dequantize(), x)


def test_seeds_repeat_and_ranks_differ():
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(3))

    def codes(seed: int, rank: int) -> torch.Tensor:
        return quantize_mx(x, rounding="stochastic", generator=rank_generator(seed, rank)).data.view(torch.uint8)

    assert torch.equal(codes(1, 0), codes(1, 0))
    assert not torch.equal(codes(1, 0), codes(2, 0))
    # the up/down choices of two ranks agree as often as independent coins with the same odds do
    down = quantize_mx(x, rounding="nearest").dequantize()
    a = (quantize_mx(x, rounding="stochastic", generator=rank_generator(1, 0)).dequantize() - down).abs() > 0
    b = (quantize_mx(x, rounding="stochastic", generator=rank_generator(1, 1)).dequantize() - down).abs() > 0
    correlation = torch.corrcoef(torch.stack([a.flatten().float(), b.flatten().float()]))[0, 1]
    # both depend on the distance to the grid, hence some correlation; the same bits would give 1
    assert correlation < 0.4


def test_bits_do_not_depend_on_tiling():
    seed = draw_seed(rank_generator(1, 2), torch.device("cpu"))
    whole = random_bits(seed, (1000,))
    assert torch.equal(whole[300:500], random_bits(seed, (200,), offset=300))
    assert whole.min() >= 0
    assert whole.max() < 1 << 24
    far = random_bits(seed, (1000,), offset=(1 << 32) - 500)
    assert torch.equal(far[500:], random_bits(seed, (500,), offset=1 << 32))
    assert not torch.equal(far[500:], whole[:500])
    bits = random_bits(seed, (1 << 20,))
    for b in range(24):
        assert abs(float(((bits >> b) & 1).double().mean()) - 0.5) < 6 * 0.5 / 1024
    lag = torch.corrcoef(torch.stack([bits[1:].double(), bits[:-1].double()]))[0, 1]
    assert abs(lag) < 6 / 1024


@pytest.mark.parametrize("d", [16, 32])
def test_hadamard_is_orthogonal_and_cancels(d):
    r = hadamard_matrix(d, seed=4, dtype=torch.float64)
    assert (r @ r.t() - torch.eye(d, dtype=torch.float64)).abs().max() < 1e-6
    assert (hadamard_matrix(d, 4) @ hadamard_matrix(d, 4).t() - torch.eye(d)).abs().max() < 1e-6
    generator = torch.Generator().manual_seed(d)
    a, b = torch.randn(40, 70, generator=generator), torch.randn(30, 70, generator=generator)
    product = random_hadamard(a, d, seed=9) @ random_hadamard(b, d, seed=9).t()
    torch.testing.assert_close(product, a @ b.t(), rtol=1e-5, atol=1e-4)
    assert not torch.equal(hadamard_matrix(d, 1), hadamard_matrix(d, 2))


@pytest.mark.parametrize(("d", "drop"), [(16, 3.0), (32, 4.0)])
def test_hadamard_spreads_an_outlier(d, drop):
    """One 100-sigma outlier a row in N(0, 1)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 128, generator=generator)
    x[torch.arange(500), torch.randint(0, 128, (500,), generator=generator)] = 100.0
    y = random_hadamard(x, d, seed=1)
    assert (x.abs().amax(1) / y.abs().amax(1)).min() >= drop

    def kurtosis(t: torch.Tensor) -> torch.Tensor:
        return (t - t.mean()).pow(4).mean() / t.var().square()

    assert kurtosis(y) < kurtosis(x) / 3


def test_hadamard_refuses_other_sizes():
    with pytest.raises(OpError, match="24"):
        random_hadamard(torch.ones(2, 48), 24)
