"""Device functions that the quantise kernels share: scales, rounding, random bits, scale addresses. Bit for bit what
`gem_precision.formats` computes.

Magnitudes are compared as integers: for the bits of non-negative floats, integer order is float order, and Inf and NaN come out above
every finite number, so that one maximum finds amax and tells whether the block is spoiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_precision.kernels import interpreting

RCEIL, FLOOR, CEIL, EVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
INF_BITS = tl.constexpr(0x7F800000)
SIGN_BIT = tl.constexpr(-0x80000000)
NATIVE = tl.constexpr(not interpreting())
"""Whether there are instructions; the interpreter has none."""


@triton.jit
def magnitude_bits(x):
    """int32 bits of |x|, x fp32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(amax, RULE: tl.constexpr, EMAX: tl.constexpr, MBITS: tl.constexpr, TOP_MANTISSA: tl.constexpr):
    """E8M0 byte (int32) from the bits of amax."""
    bits = amax
    if RULE == EVEN:
        bits = amax + (1 << (22 - MBITS))
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    if RULE == CEIL:
        exponent += (mantissa > 0).to(tl.int32)
    if RULE == RCEIL:
        exponent += (mantissa > TOP_MANTISSA).to(tl.int32)
    byte = tl.maximum(exponent - EMAX, 0)
    return tl.where(amax >= INF_BITS, 255, byte)


@triton.jit
def inverse_of_byte(byte):
    """2^(127 - byte) in fp32, NaN for 255."""
    bits = tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fp8_scale(amax, LARGEST: tl.constexpr):
    """(scale, inverse) of an FP8 block, fp32, from the bits of amax."""
    value = amax.to(tl.float32, bitcast=True)
    floored = tl.where(amax == 0, LARGEST, tl.maximum(value, LARGEST * 1.1754943508222875e-38))
    # a maximum may drop NaN
    floored = tl.where(amax >= INF_BITS, float("nan"), floored)
    # never negative: a tensor of LARGEST, made without naming a shape, so that Gluon takes this function too
    largest = tl.where(amax < 0, floored, LARGEST)
    return tl.div_rn(floored, largest), tl.div_rn(largest, floored)


@triton.jit
def mix(x):
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -2073254261
    x ^= (x >> 16) & 0xFFFF
    return x


@triton.jit
def random_bits(seed_0, seed_1, index):
    """24 random bits for an int64 element index."""
    bits = mix(index.to(tl.int32) ^ seed_0) + seed_1
    bits ^= (index >> 32).to(tl.int32)
    return (mix(bits) >> 8) & 0xFFFFFF


@triton.jit
def encode(
    y, random, MBITS: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr, LARGEST: tl.constexpr, SIGN: tl.constexpr,
    NAN: tl.constexpr, STOCHASTIC: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """uint8 codes of fp32 y, saturating. ``CAST`` 1: E4M3, 2: E5M2 by the hardware's conversion; 0: in integers."""
    bits = y.to(tl.int32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > INF_BITS
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), LARGEST)
    if CAST != 0:
        # the sign by its bit: Triton's minus is a difference from 0, which makes -0 of 0 a 0
        clamped = (magnitude.to(tl.int32, bitcast=True) | (bits & SIGN_BIT)).to(tl.float32, bitcast=True)
        if CAST == 1:
            codes = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            codes = clamped.to(tl.float8e5).to(tl.uint8, bitcast=True)
        return tl.where(is_nan, NAN, codes).to(tl.uint8)
    else:
        exponent = (magnitude.to(tl.int32, bitcast=True) >> 23) - 127
        exponent = tl.minimum(tl.maximum(exponent, EMIN), EMAX)
        steps = magnitude * ((MBITS + 127 - exponent) << 23).to(tl.float32, bitcast=True)
        low = tl.floor(steps)
        rest = steps - low
        if STOCHASTIC:
            # integers below 2^24 are exact in fp32; adding and taking away 2^23 rounds to an integer, half to even, up to 2^23
            scaled = rest * 16777216.0
            whole = tl.floor(scaled)
            tail = scaled - whole
            odd = (whole.to(tl.int32) & 1) == 1
            threshold = whole + tl.where((tail > 0.5) | ((tail == 0.5) & odd), 1.0, 0.0)
            up = random.to(tl.float32) < threshold
        else:
            odd = (low.to(tl.int32) & 1) == 1
            up = (rest > 0.5) | ((rest == 0.5) & odd)
        codes = ((exponent - EMIN) << MBITS) + low.to(tl.int32) + up.to(tl.int32)
        codes |= tl.where(bits < 0, SIGN, 0)
        return tl.where(is_nan, NAN, codes).to(tl.uint8)


@triton.jit
def scale_offset(row, strip, strips, SWIZZLE: tl.constexpr):
    """Address of the scale of (row, strip) in ``[rows, strips]`` or in the 128x4 tiles of block-scaled MMA; int64."""
    if SWIZZLE:
        tile = (row // 128) * ((strips + 3) // 4) + strip // 4
        return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + strip % 4
    else:
        return row * strips + strip


@triton.jit
def activation(x, ACT: tl.constexpr):
    """fp32 elementwise activation: 0 none, 1 relu, 2 gelu (of the normal distribution), 3 silu, 4 relu squared.

    GELU is ``x Phi(x)`` with ``Phi(-|x|) = exp(-x^2 / 2) P(t)``, ``t = 1 / (1 + 0.36 |x|)``, P of degree 5 fitted to the least relative
    error on [0, 8], 1.8e-5; the form is that of Hastings (Abramowitz and Stegun 7.1.26). Two approximate instructions each for GELU and
    SiLU, which cost a fifth of erf and a quarter of a division with full range. Denormal results may be 0.
    """
    y = x
    if ACT == 1:
        # written so that NaN passes, as it does in PyTorch
        y = tl.where(x < 0.0, 0.0, x)
    elif ACT == 2:
        base = 1.0 + 0.36 * tl.abs(x)
        power = x * x * -0.7213475204444817
        if NATIVE:
            t = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [base], dtype=tl.float32, is_pure=True, pack=1)
            e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1)
        else:
            t, e = 1.0 / base, tl.exp2(power)
        p = 0.24152161709392017 - t * 0.09413225491440287
        p = 0.14209561669606474 + t * (0.16096023199821605 + t * (0.04956350598548471 + t * p))
        below = e * (t * p)
        y = x * tl.where(x < 0.0, below, 1.0 - below)
    elif ACT == 3:
        power = x * -1.4426950408889634
        if NATIVE:
            e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1)
            y = x * tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1)
        else:
            y = x * (1.0 / (1.0 + tl.exp2(power)))
    elif ACT == 4:
        r = tl.where(x < 0.0, 0.0, x)
        y = r * r
    return y
