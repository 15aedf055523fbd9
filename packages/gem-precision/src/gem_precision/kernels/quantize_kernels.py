"""Kernels that read a matrix once and write it quantised along its rows, its columns, or both.

One program owns a tile; B is 32 (MX) or 128 (FP8), and no block crosses a tile::

            C
      +-----+-----+     rows:     data [R, C],  scales [R, C/B]        a strip of B columns of one row
    R | tile|     |     columns:  data [C, R],  scales [C, R/B]        transposed, K innermost, as the MMA wants both operands
      +-----+-----+     squares:  data [R, C],  scales [R/B, C/B]      and the transposed payload from the same scale

Rows of the transposed payload are ``col_stride`` apart (R, or R padded for the MMA). ``SWIZZLE`` writes scales in 128x4 tiles instead.
Addresses are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gem_precision.kernels.device import (
    activation,
    encode,
    fp8_scale,
    inverse_of_byte,
    magnitude_bits,
    random_bits,
    scale_byte,
    scale_offset,
)


@triton.jit
def block_scales(
    amax, FP8: tl.constexpr, RULE: tl.constexpr, EMAX: tl.constexpr, MBITS: tl.constexpr, TOP_MANTISSA: tl.constexpr, LARGEST: tl.constexpr
):  # fmt: skip
    """(what is stored, inverse) from the bits of amax."""
    if FP8:
        return fp8_scale(amax, LARGEST)
    else:
        byte = scale_byte(amax, RULE, EMAX, MBITS, TOP_MANTISSA)
        return byte.to(tl.uint8), inverse_of_byte(byte)


@triton.jit
def store_tile(
    y, rows, cols, R, C, col_stride, row_data, row_scales, col_data, col_scales, seeds,
    ROWS: tl.constexpr, COLS: tl.constexpr, SQUARE: tl.constexpr, STOCHASTIC_ROWS: tl.constexpr, STOCHASTIC_COLS: tl.constexpr,
    SWIZZLE: tl.constexpr, FP8: tl.constexpr, RULE: tl.constexpr, MBITS: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr,
    LARGEST: tl.constexpr, TOP_MANTISSA: tl.constexpr, SIGN: tl.constexpr, NAN: tl.constexpr, CAST: tl.constexpr,
    B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Quantise the fp32 tile ``y`` (0 outside the matrix) and write what is asked for."""
    inside = (rows < R)[:, None] & (cols < C)[None, :]
    index = rows[:, None] * C + cols[None, :]
    bits = magnitude_bits(y)
    if SQUARE:
        grid = tl.reshape(bits, (BLOCK_R // B, B, BLOCK_C // B, B))
        amax = tl.max(tl.max(grid, axis=3), axis=1)
        stored, inverse = block_scales(amax, FP8, RULE, EMAX, MBITS, TOP_MANTISSA, LARGEST)
        spread = tl.reshape(tl.broadcast_to(inverse[:, None, :, None], (BLOCK_R // B, B, BLOCK_C // B, B)), (BLOCK_R, BLOCK_C))
        random = index
        if STOCHASTIC_ROWS:
            random = random_bits(tl.load(seeds), tl.load(seeds + 1), index)
        cast: tl.constexpr = 0 if STOCHASTIC_ROWS else CAST
        codes = encode(y * spread, random, MBITS, EMIN, EMAX, LARGEST, SIGN, NAN, STOCHASTIC_ROWS, cast)
        block_r = tl.max(tl.reshape(rows, (BLOCK_R // B, B)), axis=1) // B
        block_c = tl.max(tl.reshape(cols, (BLOCK_C // B, B)), axis=1) // B
        blocks_r, blocks_c = (R + B - 1) // B, (C + B - 1) // B
        keep = (block_r < blocks_r)[:, None] & (block_c < blocks_c)[None, :]
        tl.store(row_scales + block_r[:, None] * blocks_c + block_c[None, :], stored, mask=keep)
        if ROWS:
            tl.store(row_data + index, codes, mask=inside)
        if COLS:
            tl.store(col_data + cols[:, None] * col_stride + rows[None, :], tl.trans(codes), mask=(cols < C)[:, None] & (rows < R)[None, :])
    else:
        if ROWS:
            amax = tl.max(tl.reshape(bits, (BLOCK_R, BLOCK_C // B, B)), axis=2)
            stored, inverse = block_scales(amax, FP8, RULE, EMAX, MBITS, TOP_MANTISSA, LARGEST)
            spread = tl.reshape(tl.broadcast_to(inverse[:, :, None], (BLOCK_R, BLOCK_C // B, B)), (BLOCK_R, BLOCK_C))
            random = index
            if STOCHASTIC_ROWS:
                random = random_bits(tl.load(seeds), tl.load(seeds + 1), index)
            cast_rows: tl.constexpr = 0 if STOCHASTIC_ROWS else CAST
            codes = encode(y * spread, random, MBITS, EMIN, EMAX, LARGEST, SIGN, NAN, STOCHASTIC_ROWS, cast_rows)
            tl.store(row_data + index, codes, mask=inside)
            strip = tl.max(tl.reshape(cols, (BLOCK_C // B, B)), axis=1) // B
            strips = (C + B - 1) // B
            at = scale_offset(rows[:, None], strip[None, :], strips, SWIZZLE)
            tl.store(row_scales + at, stored, mask=(rows < R)[:, None] & (strip < strips)[None, :])
        if COLS:
            amax = tl.max(tl.reshape(bits, (BLOCK_R // B, B, BLOCK_C)), axis=1)
            stored, inverse = block_scales(amax, FP8, RULE, EMAX, MBITS, TOP_MANTISSA, LARGEST)
            spread = tl.reshape(tl.broadcast_to(inverse[:, None, :], (BLOCK_R // B, B, BLOCK_C)), (BLOCK_R, BLOCK_C))
            random = index
            if STOCHASTIC_COLS:
                random = random_bits(tl.load(seeds + 2), tl.load(seeds + 3), index)
            cast_cols: tl.constexpr = 0 if STOCHASTIC_COLS else CAST
            codes = encode(y * spread, random, MBITS, EMIN, EMAX, LARGEST, SIGN, NAN, STOCHASTIC_COLS, cast_cols)
            tl.store(col_data + cols[:, None] * col_stride + rows[None, :], tl.trans(codes), mask=(cols < C)[:, None] & (rows < R)[None, :])
            strip = tl.max(tl.reshape(rows, (BLOCK_R // B, B)), axis=1) // B
            strips = (R + B - 1) // B
            at = scale_offset(cols[None, :], strip[:, None], strips, SWIZZLE)
            tl.store(col_scales + at, stored, mask=(cols < C)[None, :] & (strip < strips)[:, None])


@triton.jit
def quantize_kernel(
    x, y_out, row_data, row_scales, col_data, col_scales, seeds, R, C, stride, col_stride,
    ACT: tl.constexpr, WRITE_Y: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SQUARE: tl.constexpr, STOCHASTIC_ROWS: tl.constexpr, STOCHASTIC_COLS: tl.constexpr,
    SWIZZLE: tl.constexpr, FP8: tl.constexpr, RULE: tl.constexpr, MBITS: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr,
    LARGEST: tl.constexpr, TOP_MANTISSA: tl.constexpr, SIGN: tl.constexpr, NAN: tl.constexpr, CAST: tl.constexpr,
    B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Optional activation, rounded to y_out's dtype as the unfused op does, then quantise."""
    program = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(C, BLOCK_C)
    rows = program // across * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    cols = program % across * BLOCK_C + tl.arange(0, BLOCK_C).to(tl.int64)
    inside = (rows < R)[:, None] & (cols < C)[None, :]
    y = tl.load(x + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0)
    if ACT != 0:
        y = activation(y.to(tl.float32), ACT)
    y = y.to(y_out.dtype.element_ty)
    if WRITE_Y:
        tl.store(y_out + rows[:, None] * C + cols[None, :], y, mask=inside)
    store_tile(
        y.to(tl.float32), rows, cols, R, C, col_stride, row_data, row_scales, col_data, col_scales, seeds,
        ROWS, COLS, SQUARE, STOCHASTIC_ROWS, STOCHASTIC_COLS, SWIZZLE, FP8, RULE, MBITS, EMIN, EMAX, LARGEST, TOP_MANTISSA, SIGN, NAN,
        CAST, B, BLOCK_R, BLOCK_C,
    )  # fmt: skip


@triton.jit
def norm_stats_kernel(x, stats, R, C, stride, eps, LAYER: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """``stats [2, R]``: mean (RMS: zero) and 1/deviation of the rows; a program owns BLOCK_R."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    mean = tl.zeros((BLOCK_R,), tl.float32)
    if LAYER:
        total = tl.zeros((BLOCK_R,), tl.float32)
        for start in tl.range(0, C, BLOCK_C):
            cols = start + tl.arange(0, BLOCK_C).to(tl.int64)
            inside = (rows < R)[:, None] & (cols < C)[None, :]
            total += tl.sum(tl.load(x + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32), axis=1)
        mean = total / C
    squares = tl.zeros((BLOCK_R,), tl.float32)
    for start in tl.range(0, C, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C).to(tl.int64)
        inside = (rows < R)[:, None] & (cols < C)[None, :]
        v = tl.load(x + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, v - mean[:, None], 0.0)
        squares += tl.sum(centred * centred, axis=1)
    tl.store(stats + rows, mean, mask=rows < R)
    tl.store(stats + R + rows, 1.0 / tl.sqrt_rn(squares / C + eps), mask=rows < R)


@triton.jit
def norm_quantize_kernel(
    x, weight, bias, y_out, stats, row_data, row_scales, col_data, col_scales, seeds, R, C, stride, col_stride,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, WRITE_Y: tl.constexpr, QUANTIZE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SQUARE: tl.constexpr, STOCHASTIC_ROWS: tl.constexpr, STOCHASTIC_COLS: tl.constexpr,
    SWIZZLE: tl.constexpr, FP8: tl.constexpr, RULE: tl.constexpr, MBITS: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr,
    LARGEST: tl.constexpr, TOP_MANTISSA: tl.constexpr, SIGN: tl.constexpr, NAN: tl.constexpr, CAST: tl.constexpr,
    B: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Norm over C from the ``stats`` of `norm_stats_kernel`, rounded to y_out's dtype as the unfused op does, then quantise. A program
    walks over BLOCK_R whole rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    mean = tl.load(stats + rows, mask=rows < R, other=0.0)
    rstd = tl.load(stats + R + rows, mask=rows < R, other=0.0)
    for start in tl.range(0, C, BLOCK_C):
        cols = start + tl.arange(0, BLOCK_C).to(tl.int64)
        inside = (rows < R)[:, None] & (cols < C)[None, :]
        v = tl.load(x + rows[:, None] * stride + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        y = (v - mean[:, None]) * rstd[:, None]
        if WEIGHT:
            y *= tl.load(weight + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
        if BIAS:
            y += tl.load(bias + cols, mask=cols < C, other=0.0).to(tl.float32)[None, :]
        y = tl.where(inside, y, 0.0).to(y_out.dtype.element_ty)
        if WRITE_Y:
            tl.store(y_out + rows[:, None] * C + cols[None, :], y, mask=inside)
        if QUANTIZE:
            store_tile(
                y.to(tl.float32), rows, cols, R, C, col_stride, row_data, row_scales, col_data, col_scales, seeds,
                ROWS, COLS, SQUARE, STOCHASTIC_ROWS, STOCHASTIC_COLS, SWIZZLE, FP8, RULE, MBITS, EMIN, EMAX, LARGEST, TOP_MANTISSA,
                SIGN, NAN, CAST, B, BLOCK_R, BLOCK_C,
            )  # fmt: skip


@triton.jit
def norm_backward_kernel(
    x, g, plus, stats, dx, R, C, LAYER: tl.constexpr, PLUS: tl.constexpr, ONE: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Gradient of the affine-free norm, one row a program: ``rstd (g - mean(g)[layer] - n mean(g n))`` with n the normalised row, and
    ``plus`` added. ``ONE``: BLOCK_C holds a row, which is then read once."""
    row = tl.program_id(0).to(tl.int64)
    mean, rstd = tl.load(stats + row), tl.load(stats + R + row)
    cols = tl.arange(0, BLOCK_C)
    if ONE:
        upstream = tl.load(g + row * C + cols, mask=cols < C, other=0.0).to(tl.float32)
        n = (tl.load(x + row * C + cols, mask=cols < C, other=0.0).to(tl.float32) - mean) * rstd
        centre = tl.sum(upstream) / C if LAYER else 0.0
        result = rstd * (upstream - centre - n * (tl.sum(upstream * n) / C))
        if PLUS:
            result += tl.load(plus + row * C + cols, mask=cols < C, other=0.0).to(tl.float32)
        tl.store(dx + row * C + cols, result.to(dx.dtype.element_ty), mask=cols < C)
    else:
        along = tl.zeros((BLOCK_C,), tl.float32)
        total = tl.zeros((BLOCK_C,), tl.float32)
        for start in tl.range(0, C, BLOCK_C):
            at = start + cols
            upstream = tl.load(g + row * C + at, mask=at < C, other=0.0).to(tl.float32)
            n = (tl.load(x + row * C + at, mask=at < C, other=0.0).to(tl.float32) - mean) * rstd
            along += upstream * n
            total += upstream
        projection = tl.sum(along) / C
        centre = tl.sum(total) / C if LAYER else 0.0
        for start in tl.range(0, C, BLOCK_C):
            at = start + cols
            upstream = tl.load(g + row * C + at, mask=at < C, other=0.0).to(tl.float32)
            n = (tl.load(x + row * C + at, mask=at < C, other=0.0).to(tl.float32) - mean) * rstd
            result = rstd * (upstream - centre - n * projection)
            if PLUS:
                result += tl.load(plus + row * C + at, mask=at < C, other=0.0).to(tl.float32)
            tl.store(dx + row * C + at, result.to(dx.dtype.element_ty), mask=at < C)
