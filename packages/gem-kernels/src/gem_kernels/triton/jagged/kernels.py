"""Triton kernels that move or reduce packed rows; memory-bound, no host sync.

Moving: a packed side, described by offsets, and another side where sample b begins at row ``base[b]``. Concatenation scatters every part
into the whole, a split gathers every part from it, expansion reads one row a sample. The sample of a packed row is found by a binary search
over the offsets, for ROWS rows at once. Rows past the last offset are moved as zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "batch", "steps"])
def move_rows_kernel(
    packed, other, offsets, base, rows, batch, steps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATHER: tl.constexpr, ADVANCE: tl.constexpr,
):  # fmt: skip
    """GATHER: packed[i] = other[base[b] + position of i]; else the other way round. Without ADVANCE the position is 0."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    low = tl.zeros([ROWS], tl.int64)
    high = low + batch
    for _step in range(steps):
        middle = (low + high + 1) // 2
        inside = tl.load(offsets + middle).to(tl.int64) <= i
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle - 1)
    there = tl.load(base + low).to(tl.int64)
    if ADVANCE:
        there += i - tl.load(offsets + low).to(tl.int64)
    mine = i < rows
    live = mine & (low < batch)
    for c in range(0, WIDTH, COLUMNS):
        j = c + tl.arange(0, COLUMNS)
        column = (j < WIDTH)[None, :]
        at = i[:, None] * WIDTH + j[None, :]
        away = there[:, None] * WIDTH + j[None, :]
        if GATHER:
            tl.store(packed + at, tl.load(other + away, mask=live[:, None] & column, other=0), mask=mine[:, None] & column)
        else:
            tl.store(other + away, tl.load(packed + at, mask=live[:, None] & column, other=0), mask=mine[:, None] & column)


@triton.jit(do_not_specialize=["rows", "length"])
def to_padded_kernel(values, padded, offsets, fill, rows, length, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """padded [B, length, WIDTH] from packed values; ``fill`` points to what rows past a sample's end hold. ``rows`` is B · length."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mine = i < rows
    sample = i // length
    begin = tl.load(offsets + sample, mask=mine, other=0).to(tl.int64)
    end = tl.load(offsets + sample + 1, mask=mine, other=0).to(tl.int64)
    source = begin + i % length
    live = mine & (source < end)
    empty = tl.load(fill)
    for c in range(0, WIDTH, COLUMNS):
        j = c + tl.arange(0, COLUMNS)
        column = (j < WIDTH)[None, :]
        x = tl.load(values + source[:, None] * WIDTH + j[None, :], mask=live[:, None] & column, other=0)
        tl.store(padded + i[:, None] * WIDTH + j[None, :], tl.where(live[:, None], x, empty), mask=mine[:, None] & column)


@triton.jit
def reduce_rows_kernel(
    values, out, offsets, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, MEAN: tl.constexpr, TYPE: tl.constexpr
):
    """out[b] = sum or mean of the rows of sample b, added up in TYPE in one order; 0 for an empty sample."""
    sample = tl.program_id(0).to(tl.int64)
    begin = tl.load(offsets + sample).to(tl.int64)
    end = tl.load(offsets + sample + 1).to(tl.int64)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column = (j < WIDTH)[None, :]
    total = tl.zeros([ROWS, COLUMNS], TYPE)
    for first in range(begin, end, ROWS):
        i = first + tl.arange(0, ROWS)
        total += tl.load(values + i[:, None] * WIDTH + j[None, :], mask=(i < end)[:, None] & column, other=0).to(TYPE)
    result = tl.sum(total, 0)
    if MEAN:
        result = result / tl.maximum(end - begin, 1).to(TYPE)
    tl.store(out + sample * WIDTH + j, result.to(out.dtype.element_ty), mask=j < WIDTH)
