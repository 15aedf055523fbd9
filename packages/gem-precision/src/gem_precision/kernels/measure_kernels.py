"""What a guard samples of one quantised tensor, in two launches: programs look for the largest magnitude of all of it and for scales that
are not numbers, the first of them also sum over a window (see `gem_precision.site.SUMS`); one program adds up what they found.

::

    x      [rows, cols], by its memory:  program 0 | 1 | 2 | ... | 0 | 1 | ...    CHUNK elements at a time
    window [r0:r1, c0:c1], at most 128 x 2048:  program i sums over the columns c0 + 128 i ...
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_precision.kernels.device import INF_BITS, magnitude_bits

FOUND = tl.constexpr(16)
"""Numbers a program leaves: the bits of the largest magnitude of all and of the window, then those of `SUMS` that are sums."""


@triton.jit
def decoded(codes, E5M2: tl.constexpr):
    """fp32 of E4M3 or E5M2 bytes, exactly: both are the upper bits of fp16, E4M3 with an exponent that is 8 less."""
    byte = codes.to(tl.int32)
    if E5M2:
        return (byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
        value = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def scale_value(stored, MX: tl.constexpr):
    """fp32 of a stored scale: E8M0 bytes (255: NaN, 0: 2^-127), or itself."""
    if MX:
        byte = stored.to(tl.int32)
        bits = tl.where(byte == 255, 0x7FC00000, tl.where(byte == 0, 0x00400000, byte << 23))
        return bits.to(tl.float32, bitcast=True)
    else:
        return stored


@triton.jit(do_not_specialize=["rows", "cols", "count"])
def measure_kernel(
    x, data, scales, found, rows, cols, stride, count, sx0, sx1, sd0, sd1, ss0, ss1, r0, r1, c0, c1,
    QUANTISED: tl.constexpr, MX: tl.constexpr, E5M2: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, LARGEST: tl.constexpr,
    EDGE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """``x``, ``data``: strides s.0, s.1 in the orientation of ``data``; rows, cols, stride: x by its memory; ``scales``: ``count`` in all,
    strides ss. ``found [programs, FOUND]`` fp32."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lanes = tl.arange(0, CHUNK)
    top = tl.zeros((CHUNK,), tl.int32)
    per_row = tl.cdiv(cols, CHUNK)
    for i in tl.range(program.to(tl.int64), rows.to(tl.int64) * per_row, programs):
        at = i % per_row * CHUNK + lanes
        value = tl.load(x + i // per_row * stride + at, mask=at < cols, other=0.0).to(tl.float32)
        top = tl.maximum(top, magnitude_bits(value))
    spoiled = tl.zeros((CHUNK,), tl.int32)
    if QUANTISED:
        for i in tl.range(program.to(tl.int64), tl.cdiv(count, CHUNK).to(tl.int64), programs):
            at = i * CHUNK + lanes
            stored = tl.load(scales + at, mask=at < count, other=0)
            value = scale_value(stored, MX)
            spoiled += (value != value).to(tl.int32)
    out = found + program * FOUND
    tl.store(out, tl.max(top, 0).to(tl.float32, bitcast=True))
    tl.store(out + 11, tl.sum(spoiled, 0).to(tl.float32))

    left = c0 + program * 128
    if left < c1:
        c = left + tl.arange(0, 128)
        widest = tl.zeros((32, 128), tl.int32)
        cut = tl.zeros((32, 128), tl.float32)
        flushed, counted, signal, error, dot, coded2, relative = cut, cut, cut, cut, cut, cut, cut
        dead = 0.0
        block_x = tl.zeros((128 // BC,), tl.float32)
        block_q = tl.zeros((128 // BC,), tl.float32)
        for part in range(4):
            r = r0 + part * 32 + tl.arange(0, 32)
            inside = (r < r1)[:, None] & (c < c1)[None, :]
            r_64, c_64 = r.to(tl.int64)[:, None], c.to(tl.int64)[None, :]
            wide = tl.load(x + r_64 * sx0 + c_64 * sx1, mask=inside, other=0.0).to(tl.float32)
            coded, at_top = wide, tl.zeros((32, 128), tl.int1)
            if QUANTISED:
                plain = decoded(tl.load(data + r_64 * sd0 + c_64 * sd1, mask=inside, other=0), E5M2)
                scale = scale_value(tl.load(scales + r_64 // BR * ss0 + c_64 // BC * ss1, mask=inside, other=0), MX)
                coded = plain * scale
                if MX:
                    # as the codec: finite codes decode to finite values
                    coded = tl.where(coded > 3.4028234663852886e38, 3.4028234663852886e38, coded)
                    coded = tl.where(coded < -3.4028234663852886e38, -3.4028234663852886e38, coded)
                at_top = tl.abs(plain) == LARGEST
            good = inside & (magnitude_bits(wide) < INF_BITS) & (magnitude_bits(coded) < INF_BITS)
            wide, coded = tl.where(good, wide, 0.0), tl.where(good, coded, 0.0)
            size, miss = tl.abs(wide), tl.abs(wide - coded)
            widest = tl.maximum(widest, magnitude_bits(wide))
            cut += (at_top & (size > tl.abs(coded) * EDGE)).to(tl.float32)
            flushed += ((coded == 0.0) & (wide != 0.0)).to(tl.float32)
            counted += good.to(tl.float32)
            signal += wide * wide
            error += miss * miss
            dot += wide * coded
            coded2 += coded * coded
            relative += tl.where(size > 0.0, miss / size, 0.0)
            if QUANTISED:
                if BR == 128:
                    block_x = tl.maximum(block_x, tl.max(tl.max(tl.reshape(size, (32, 128 // BC, BC)), 2), 0))
                    block_q = tl.maximum(block_q, tl.max(tl.max(tl.reshape(tl.abs(coded), (32, 128 // BC, BC)), 2), 0))
                else:
                    by_x = tl.max(tl.max(tl.reshape(size, (32 // BR, BR, 128 // BC, BC)), 3), 1)
                    by_q = tl.max(tl.max(tl.reshape(tl.abs(coded), (32 // BR, BR, 128 // BC, BC)), 3), 1)
                    dead += tl.sum(((by_q == 0.0) & (by_x > 0.0)).to(tl.float32))
        if QUANTISED and BR == 128:
            dead += tl.sum(((block_q == 0.0) & (block_x > 0.0)).to(tl.float32))
        tl.store(out + 1, tl.max(widest).to(tl.float32, bitcast=True))
        tl.store(out + 2, tl.sum(cut))
        tl.store(out + 3, tl.sum(flushed))
        tl.store(out + 4, tl.sum(counted))
        tl.store(out + 5, tl.sum(signal))
        tl.store(out + 6, tl.sum(error))
        tl.store(out + 7, tl.sum(dot))
        tl.store(out + 8, tl.sum(coded2))
        tl.store(out + 9, tl.sum(relative))
        tl.store(out + 10, dead)


@triton.jit
def add_up_kernel(found, sums, programs, WINDOWS: tl.constexpr, MANY: tl.constexpr):
    """``sums [12]`` fp64 of ``found [programs, FOUND]``; only the first WINDOWS programs had columns of the window."""
    every = tl.arange(0, MANY)
    there = every < programs
    bits = tl.load(found + every * FOUND, mask=there, other=0.0).to(tl.int32, bitcast=True)
    top = tl.max(bits, 0)
    tl.store(sums + 10, tl.sum(tl.load(found + every * FOUND + 11, mask=there, other=0.0).to(tl.float64), 0))
    windows = tl.arange(0, WINDOWS)
    inside = tl.max(tl.load(found + windows * FOUND + 1).to(tl.int32, bitcast=True), 0)
    bad = top >= INF_BITS
    tl.store(sums, tl.where(bad, inside, top).to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(sums + 11, bad.to(tl.float64))
    for i in tl.static_range(1, 10):
        tl.store(sums + i, tl.sum(tl.load(found + windows * FOUND + i + 1).to(tl.float64), 0))
