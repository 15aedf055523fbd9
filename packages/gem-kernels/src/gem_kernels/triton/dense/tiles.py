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


@triton.jit
def prefetch_tile(source, stride, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Ask for a tile to be brought into the L2 cache (NVIDIA), one request every 64 elements."""
    r = row + tl.arange(0, ROWS)
    c = column + tl.arange(0, (COLUMNS + 63) // 64) * 64
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    address = source + tl.where(mask, r.to(tl.int64)[:, None] * stride + c[None, :], 0)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile; moves nothing between threads for accumulators of tensor cores."""
    return tl.split(tl.permute(tl.reshape(tile, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


@triton.jit
def program_barrier(NVIDIA: tl.constexpr):
    """What this program stored is visible to all its threads. In inline assembly on NVIDIA: a loop with Triton's own is not pipelined."""
    if NVIDIA:
        tl.inline_asm_elementwise(
            "bar.sync 0; mov.u32 $0, $1;", "=r,r,~{memory}", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()
