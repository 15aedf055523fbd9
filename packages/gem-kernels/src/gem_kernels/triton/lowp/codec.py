"""E4M3 and E8M0 in registers. ``HARDWARE`` False is for the interpreter, whose FP8 conversions do not round as the chip does: codes are
uint8 there and fp32 stands for bf16.

A block's scale is 2^(byte - 127) with the exponent ``ceil(log2(amax / 448))``; byte 255 is NaN, for blocks that hold NaN or Inf. Largest
magnitudes are taken of the bits: as integers they are ordered as the floats are, with Inf and NaN on top.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INF_BITS = tl.constexpr(0x7F800000)
# mantissa bits of 448 = 1.75 * 2^8
_TOP_MANTISSA = tl.constexpr(0x600000)


@triton.jit
def magnitude_bits(x):
    """int32 bits of |x|, x fp32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_byte(amax):
    """E8M0 byte (int32) from the bits of a block's largest magnitude."""
    byte = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > _TOP_MANTISSA).to(tl.int32)
    return tl.where(amax >= _INF_BITS, 255, tl.maximum(byte, 0))


@triton.jit
def scale_value(byte):
    """2^(byte - 127) in fp32, NaN for 255; byte of any integer type."""
    e = byte.to(tl.int32)
    bits = tl.where(e == 255, 0x7FC00000, tl.where(e == 0, 0x00400000, e << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def inverse_value(byte):
    """2^(127 - byte) in fp32, NaN for 255; byte int32."""
    bits = tl.where(byte == 255, 0x7FC00000, (254 - byte) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode(y, HARDWARE: tl.constexpr):
    """E4M3 of fp32 y, nearest, ties to even, saturating."""
    if HARDWARE:
        return y.to(tl.float8e4nv)
    else:
        bits = y.to(tl.int32, bitcast=True)
        magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
        exponent = tl.minimum(tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, -6), 8)
        steps = magnitude * ((130 - exponent) << 23).to(tl.float32, bitcast=True)
        low = tl.floor(steps)
        rest = steps - low
        up = (rest > 0.5) | ((rest == 0.5) & ((low.to(tl.int32) & 1) == 1))
        codes = ((exponent + 6) << 3) + low.to(tl.int32) + up.to(tl.int32)
        codes |= tl.where(bits < 0, 0x80, 0)
        return tl.where((bits & 0x7FFFFFFF) > _INF_BITS, 0x7F, codes).to(tl.uint8)


@triton.jit
def decode(codes, HARDWARE: tl.constexpr):
    """The codes' values, in bf16 (exact)."""
    if HARDWARE:
        return codes.to(tl.bfloat16)
    else:
        c = codes.to(tl.int32)
        # the fields of E4M3 at the place of fp32's; the exponents differ by 127 - 7
        bits = ((c & 0x7F) << 20) | ((c & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def strips(p, WIDTH: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``p [ROWS, COLS]`` fp32 -> codes, and E8M0 bytes ``[ROWS, COLS / WIDTH]`` int32: one a strip of WIDTH columns."""
    amax = tl.max(tl.reshape(magnitude_bits(p), (ROWS, COLS // WIDTH, WIDTH)), axis=2)
    byte = scale_byte(amax)
    return encode(p * spread(inverse_value(byte), WIDTH, ROWS, COLS), HARDWARE), byte


@triton.jit
def spread(values, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``values [ROWS, COLS / WIDTH]`` repeated WIDTH times along the columns."""
    return tl.reshape(tl.broadcast_to(values[:, :, None], (ROWS, COLS // WIDTH, WIDTH)), (ROWS, COLS))
