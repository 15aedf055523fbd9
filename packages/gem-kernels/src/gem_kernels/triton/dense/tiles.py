"""Tiles of row-major matrices, by tensor descriptor (TMA) where the hardware and the strides allow, else by masked pointers.

A matrix is passed as ``source`` and ``stride``: with TMA the source is a descriptor and the stride is not used. Both ways read zeros
outside the matrix and write nothing there. Row numbers times strides are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(source, stride, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """``[ROWS, COLUMNS]`` at (row, column) of a ``[rows, columns]`` matrix."""
    if TMA:
        tile = source.load([tl.cast(row, tl.int32), column])
    else:
        i = tl.arange(0, ROWS)
        j = tl.arange(0, COLUMNS)
        mask = (i < rows - row)[:, None] & (j < columns - column)[None, :]
        tile = tl.load(source + (tl.cast(row, tl.int64) * stride + column) + (i[:, None] * stride + j[None, :]), mask=mask, other=0.0)
    return tile


@triton.jit
def store_tile(target, stride, tile, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """Write a tile, cast to the matrix's dtype."""
    if TMA:
        target.store([tl.cast(row, tl.int32), column], tile.to(target.dtype))
    else:
        i = tl.arange(0, ROWS)
        j = tl.arange(0, COLUMNS)
        mask = (i < rows - row)[:, None] & (j < columns - column)[None, :]
        at = target + (tl.cast(row, tl.int64) * stride + column) + (i[:, None] * stride + j[None, :])
        tl.store(at, tile.to(target.dtype.element_ty), mask=mask)
