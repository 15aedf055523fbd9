"""Rows, or both directions in one read, for GPUs with FP8 conversions (sm_89 on), in Gluon: layouts are chosen by hand.

For both directions one program owns a tile of 128 x 128. It loads and writes rows, leaves the tile in shared memory, and takes it from
there a second time with whole runs of a column in each thread: amax and codes of the columns need no exchange of single bytes, which is
what bounds the portable kernel. Bit for bit what that one and the codec compute.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_precision.kernels import device

_activation = gluon.jit(device.activation.fn)
_fp8_scale = gluon.jit(device.fp8_scale.fn)
_inverse_of_byte = gluon.jit(device.inverse_of_byte.fn)
_scale_byte = gluon.jit(device.scale_byte.fn)
_scale_offset = gluon.jit(device.scale_offset.fn)

TILE = gl.constexpr(128)


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def _codes(y, E5M2: gl.constexpr):
    """uint8 codes of fp32: the conversion rounds to nearest even, saturates, keeps the sign and makes NaN 0x7F."""
    if E5M2:
        return gl.inline_asm_elementwise(
            "{.reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, $2, $1; cvt.rn.satfinite.e5m2x2.f32 b, $4, $3; mov.b32 $0, {a, b};}",
            "=r,f,f,f,f", [y], dtype=gl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b};}",
            "=r,f,f,f,f", [y], dtype=gl.uint8, is_pure=True, pack=4,
        )  # fmt: skip


@gluon.jit
def _along_last(
    y, LAYOUT: gl.constexpr, N: gl.constexpr, WIDTH: gl.constexpr, FP8: gl.constexpr, RULE: gl.constexpr, MBITS: gl.constexpr,
    EMAX: gl.constexpr, LARGEST: gl.constexpr, TOP_MANTISSA: gl.constexpr, E5M2: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """(codes ``[N, WIDTH]``, what is stored of the scales and bits of amax, both ``[N, WIDTH / B]``) of fp32 ``y``, blocks along the last
    dim."""
    blocks = gl.reshape(gl.abs(y), (N, WIDTH // B, B))
    amax = gl.reduce(blocks, 2, _larger).to(gl.int32, bitcast=True)
    if FP8:
        stored, inverse = _fp8_scale(amax, LARGEST)
    else:
        byte = _scale_byte(amax, RULE, EMAX, MBITS, TOP_MANTISSA)
        stored = byte.to(gl.uint8)
        inverse = _inverse_of_byte(byte)
    whole, _ = gl.broadcast(gl.expand_dims(inverse, 2), blocks)
    spread = gl.convert_layout(gl.reshape(whole, (N, WIDTH)), LAYOUT, assert_trivial=True)
    return _codes(y * spread, E5M2), stored, amax


@gluon.jit
def _store_scales(
    target, stored, line, strip, lines, strips, FULL: gl.constexpr, SWIZZLE: gl.constexpr, FP8: gl.constexpr, ROWS: gl.constexpr,
    N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """``stored [ROWS, N]`` to (line, strip) of ``[lines, strips]``, strip after strip in memory: what a tile has of a strip fills whole
    sectors of 32 bytes, which four bytes a line would not. ``SWIZZLE``: in tiles of 128 x 4, a line's four as one word."""
    LANES: gl.constexpr = ROWS // 4
    words: gl.constexpr = (
        gl.BlockedLayout([1, N], [32, 1], [WARPS, 1], [1, 0])
        if FP8 or SWIZZLE
        else gl.BlockedLayout([4, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    )
    lines_here = line + gl.arange(0, ROWS, layout=gl.SliceLayout(1, words))
    strips_here = strip + gl.arange(0, N, layout=gl.SliceLayout(0, words))
    if SWIZZLE:
        at = _scale_offset(lines_here[:, None], strips_here[None, :], strips, SWIZZLE)
    else:
        at = strips_here.to(gl.int64)[None, :] * lines + lines_here[:, None]
    stored = gl.convert_layout(stored, words)
    if FULL:
        gl.store(target + at, stored)
    else:
        gl.store(target + at, stored, mask=(lines_here < lines)[:, None] & (strips_here < strips)[None, :])


@gluon.jit
def _vector(at, inside, FULL: gl.constexpr):
    if FULL:
        return gl.load(at)
    else:
        return gl.load(at, mask=inside, other=0.0)


@gluon.jit
def _one_tile(
    tile, x, weight, bias, y_out, stats, sums, row_data, row_scales, col_data, col_scales, row0, col0, R, C, stride, col_stride, strips_r,
    strips_c, FULL: gl.constexpr, ACT: gl.constexpr, NORM: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr, WRITE_Y: gl.constexpr,
    SQUARE: gl.constexpr, SUMS: gl.constexpr, SWIZZLE: gl.constexpr, FP8: gl.constexpr, RULE: gl.constexpr, MBITS: gl.constexpr,
    EMAX: gl.constexpr, LARGEST: gl.constexpr, TOP_MANTISSA: gl.constexpr, E5M2: gl.constexpr, B: gl.constexpr, WARPS: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    by_rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    # two columns a thread are one word in shared memory
    runs: gl.constexpr = gl.BlockedLayout([2 if PARTS * WARPS <= 8 else 1, 32], [32, 1], [WARPS // 4, 4], [1, 0])
    N: gl.constexpr = TILE // PARTS
    r = gl.arange(0, N, layout=gl.SliceLayout(1, by_rows))
    c = gl.arange(0, TILE, layout=gl.SliceLayout(0, by_rows))
    whole: gl.constexpr = FULL
    largest = 0
    for part in gl.static_range(PARTS):
        top = row0 + part * N
        inside = (top + r < R)[:, None] & (col0 + c < C)[None, :]
        at = x + top * stride + col0 + r[:, None] * stride + c[None, :]
        if whole:
            y = gl.load(at)
        else:
            y = gl.load(at, mask=inside, other=0.0)
        if ACT != 0:
            y = _activation(y.to(gl.float32), ACT)
        if NORM:
            y = y.to(gl.float32)
            y = (y - _vector(stats + top + r, top + r < R, FULL)[:, None]) * _vector(stats + R + top + r, top + r < R, FULL)[:, None]
            if WEIGHT:
                y *= _vector(weight + col0 + c, col0 + c < C, FULL).to(gl.float32)[None, :]
            if BIAS:
                y += _vector(bias + col0 + c, col0 + c < C, FULL).to(gl.float32)[None, :]
            if not whole:
                y = gl.where(inside, y, 0.0)
        y = y.to(y_out.dtype.element_ty)
        out = top * C + col0 + r[:, None] * C + c[None, :]
        if WRITE_Y:
            if whole:
                gl.store(y_out + out, y)
            else:
                gl.store(y_out + out, y, mask=inside)
        tile.slice(part * N, N).store(y)
        codes, stored, amax = _along_last(y.to(gl.float32), by_rows, N, TILE, FP8, RULE, MBITS, EMAX, LARGEST, TOP_MANTISSA, E5M2, B)
        if SQUARE:
            largest = gl.maximum(largest, gl.reduce(gl.reduce(amax, 1, _larger), 0, _larger))
        if whole:
            gl.store(row_data + out, codes)
        else:
            gl.store(row_data + out, codes, mask=inside)
        _store_scales(row_scales, stored, top, col0 // B, R, strips_c, FULL, SWIZZLE, FP8, N, TILE // B, WARPS)

    if SQUARE:
        stored, inverse = _fp8_scale(largest, LARGEST)
        gl.store(col_scales + col0 // TILE * strips_r + row0 // TILE, stored)
    for part in gl.static_range(PARTS):
        left = col0 + part * N
        turned = tile.permute((1, 0)).slice(part * N, N).load(runs).to(gl.float32)
        if SUMS:
            mine = left + gl.arange(0, N, layout=gl.SliceLayout(1, runs))
            gl.store(sums + row0 // TILE * C + mine, gl.sum(turned, 1), mask=mine < C)
        if SQUARE:
            codes = _codes(turned * inverse, E5M2)
        else:
            codes, stored, _ = _along_last(turned, runs, N, TILE, FP8, RULE, MBITS, EMAX, LARGEST, TOP_MANTISSA, E5M2, B)
            _store_scales(col_scales, stored, left, row0 // B, C, strips_r, FULL, SWIZZLE, FP8, N, TILE // B, WARPS)
        codes = gl.convert_layout(codes, by_rows)
        # by_rows again, its first dim now the columns of x
        target = col_data + left * col_stride + row0 + r[:, None] * col_stride + c[None, :]
        if whole:
            gl.store(target, codes)
        else:
            gl.store(target, codes, mask=(left + r < C)[:, None] & (row0 + c < R)[None, :])


@gluon.jit
def quantize_both_kernel(
    x, weight, bias, y_out, stats, sums, row_data, row_scales, col_data, col_scales, R, C, stride, col_stride, strips_r, strips_c,
    ACT: gl.constexpr, NORM: gl.constexpr, WEIGHT: gl.constexpr, BIAS: gl.constexpr, WRITE_Y: gl.constexpr, SQUARE: gl.constexpr,
    SUMS: gl.constexpr, SWIZZLE: gl.constexpr, FP8: gl.constexpr, RULE: gl.constexpr, MBITS: gl.constexpr, EMAX: gl.constexpr,
    LARGEST: gl.constexpr, TOP_MANTISSA: gl.constexpr, E5M2: gl.constexpr, B: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Optional activation, or norm from its statistics, rounded to y_out's dtype (16 bits) as the unfused op does, then quantise.

    ``SQUARE``: the columns' blocks are squares of 128, the rows' are strips. ``strips_r``, ``strips_c``: blocks along R and C. ``SUMS``:
    also ``sums [ceil(R / 128), C]``, those of the columns. ``PARTS``: a tile is worked on in so many parts, of rows and then of columns,
    which need fewer registers: more programs fit on a multiprocessor.
    """
    tile = gl.allocate_shared_memory(y_out.dtype.element_ty, (TILE, TILE), gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    across = gl.cdiv(C, TILE)
    row0 = (gl.program_id(0) // across).to(gl.int64) * TILE
    col0 = (gl.program_id(0) % across).to(gl.int64) * TILE
    if (row0 + TILE <= R) & (col0 + TILE <= C):
        _one_tile(
            tile, x, weight, bias, y_out, stats, sums, row_data, row_scales, col_data, col_scales, row0, col0, R, C, stride, col_stride,
            strips_r, strips_c, True, ACT, NORM, WEIGHT, BIAS, WRITE_Y, SQUARE, SUMS, SWIZZLE, FP8, RULE, MBITS, EMAX, LARGEST,
            TOP_MANTISSA, E5M2, B, WARPS, PARTS,
        )  # fmt: skip
    else:
        _one_tile(
            tile, x, weight, bias, y_out, stats, sums, row_data, row_scales, col_data, col_scales, row0, col0, R, C, stride, col_stride,
            strips_r, strips_c, False, ACT, NORM, WEIGHT, BIAS, WRITE_Y, SQUARE, SUMS, SWIZZLE, FP8, RULE, MBITS, EMAX, LARGEST,
            TOP_MANTISSA, E5M2, B, WARPS, PARTS,
        )  # fmt: skip


@gluon.jit
def _one_strip(
    x, y_out, row_data, row_scales, row0, col0, R, C, stride, strips_c, FULL: gl.constexpr, ACT: gl.constexpr, WRITE_Y: gl.constexpr,
    SWIZZLE: gl.constexpr, FP8: gl.constexpr, RULE: gl.constexpr, MBITS: gl.constexpr, EMAX: gl.constexpr, LARGEST: gl.constexpr,
    TOP_MANTISSA: gl.constexpr, E5M2: gl.constexpr, B: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    at = x + row0 * stride + col0 + r[:, None] * stride + c[None, :]
    out = row0 * C + col0 + r[:, None] * C + c[None, :]
    whole: gl.constexpr = FULL
    if whole:
        y = gl.load(at)
    else:
        inside = (row0 + r < R)[:, None] & (col0 + c < C)[None, :]
        y = gl.load(at, mask=inside, other=0.0)
    if ACT != 0:
        y = _activation(y.to(gl.float32), ACT)
    y = y.to(y_out.dtype.element_ty)
    codes, stored, _ = _along_last(y.to(gl.float32), layout, ROWS, WIDTH, FP8, RULE, MBITS, EMAX, LARGEST, TOP_MANTISSA, E5M2, B)
    if whole:
        gl.store(row_data + out, codes)
        if WRITE_Y:
            gl.store(y_out + out, y)
    else:
        inside = (row0 + r < R)[:, None] & (col0 + c < C)[None, :]
        gl.store(row_data + out, codes, mask=inside)
        if WRITE_Y:
            gl.store(y_out + out, y, mask=inside)
    _store_scales(row_scales, stored, row0, col0 // B, R, strips_c, FULL, SWIZZLE, FP8, ROWS, WIDTH // B, WARPS)


@gluon.jit
def quantize_rows_kernel(
    x, y_out, row_data, row_scales, R, C, stride, strips_c, ACT: gl.constexpr, WRITE_Y: gl.constexpr, SWIZZLE: gl.constexpr,
    FP8: gl.constexpr, RULE: gl.constexpr, MBITS: gl.constexpr, EMAX: gl.constexpr, LARGEST: gl.constexpr, TOP_MANTISSA: gl.constexpr,
    E5M2: gl.constexpr, B: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """The rows' direction alone, ``ROWS`` x ``WIDTH`` a program."""
    across = gl.cdiv(C, WIDTH)
    row0 = (gl.program_id(0) // across).to(gl.int64) * ROWS
    col0 = (gl.program_id(0) % across).to(gl.int64) * WIDTH
    if (row0 + ROWS <= R) & (col0 + WIDTH <= C):
        _one_strip(
            x, y_out, row_data, row_scales, row0, col0, R, C, stride, strips_c, True, ACT, WRITE_Y, SWIZZLE, FP8, RULE, MBITS, EMAX,
            LARGEST, TOP_MANTISSA, E5M2, B, WARPS, ROWS, WIDTH,
        )  # fmt: skip
    else:
        _one_strip(
            x, y_out, row_data, row_scales, row0, col0, R, C, stride, strips_c, False, ACT, WRITE_Y, SWIZZLE, FP8, RULE, MBITS, EMAX,
            LARGEST, TOP_MANTISSA, E5M2, B, WARPS, ROWS, WIDTH,
        )  # fmt: skip
