"""Loading and storing tiles of packed rows, and zeroing the rows that belong to no sample.

A tile is ROWS rows of one sample by one head's columns, COLS of them padded to the power of two COLS_PAD. Rows outside the sample and
padding columns read as zero, so that a neighbour's NaN never meets a product. With TMA the source is a ragged descriptor over
``[N, heads * COLS]`` (`descriptor`), whose bounds check does the same in hardware; otherwise rows are addressed with int64 products.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import load_ragged, to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

_MAX_TMA_ROWS = 2**30
_ENDLESS = 0x7FFF0000


def tma_fits(x: Tensor) -> bool:
    """Whether rows of ``x [N, heads, D]`` can be read through a descriptor: dense heads, 16-byte steps, D a power of two, 0 < N <= 2³⁰."""
    n, heads, d = x.shape
    size = x.element_size()
    return (
        0 < n <= _MAX_TMA_ROWS
        and d & (d - 1) == 0
        and d * size >= 16
        and x.stride(2) == 1
        and (heads == 1 or x.stride(1) == d)
        and x.stride(0) * size % 16 == 0
        and x.data_ptr() % 16 == 0
    )


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """A ragged descriptor of ``rows`` x D boxes over the rows of ``x [N, heads, D]`` (see `tma_fits`, which is not checked again).

    The layout of `triton.tools.ragged_tma.create_ragged_descriptor`, whose `load_ragged` reads it: two leading dimensions with steps that
    cancel by 64-bit wrap-around let a coordinate put the end of a sample at the descriptor's bound.
    """
    heads, d = x.shape[1:]
    step = x.stride(0)
    made = object.__new__(TensorDescriptor)
    made.base, made.padding = x, "zero"
    made.shape, made.strides = [_ENDLESS, _ENDLESS, _MAX_TMA_ROWS, heads * d], [2**34 - step, step, step, 1]
    made.block_shape = [1, 1, rows, d]
    return made


@triton.jit
def load_rows(
    src, row0, start, rows, head, stride_n, stride_h,
    ROWS: tl.constexpr, COLS: tl.constexpr, COLS_PAD: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + ROWS of a sample that has ``rows`` rows from ``row0`` on: ``[ROWS, COLS_PAD]``."""
    if TMA:
        return load_ragged(src, row0.to(tl.int32), rows, [start, head * COLS])
    else:
        r = start + tl.arange(0, ROWS)
        c = tl.arange(0, COLS_PAD)
        mask = (r < rows)[:, None]
        if COLS != COLS_PAD:
            mask = mask & (c < COLS)[None, :]
        at = src + head.to(tl.int64) * stride_h + (row0 + r)[:, None] * stride_n + c[None, :]
        return tl.load(at, mask, 0.0)


@triton.jit
def load_own(src, row0, i, live, head, stride_n, stride_h, COLS: tl.constexpr, COLS_PAD: tl.constexpr):
    """Row ``row0 + i`` for every row i that is live, zero for the others: the candidates' own keys and values."""
    c = tl.arange(0, COLS_PAD)
    at = src + head.to(tl.int64) * stride_h + (row0 + i)[:, None] * stride_n + c[None, :]
    return tl.load(at, live[:, None] & (c < COLS)[None, :], 0.0)


@triton.jit
def store_rows(
    dst, row0, start, rows, head, stride_n, stride_h, tile,
    ROWS: tl.constexpr, COLS: tl.constexpr, COLS_PAD: tl.constexpr,
):  # fmt: skip
    """The converse of `load_rows`: writes the rows that belong to the sample, in the destination's dtype."""
    r = start + tl.arange(0, ROWS)
    c = tl.arange(0, COLS_PAD)
    mask = (r < rows)[:, None]
    if COLS != COLS_PAD:
        mask = mask & (c < COLS)[None, :]
    at = dst + head.to(tl.int64) * stride_h + (row0 + r)[:, None] * stride_n + c[None, :]
    tl.store(at, tile.to(dst.dtype.element_ty), mask)


@triton.jit
def store_box(box, row0, start, rows, head, tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    """`store_rows` through a ragged descriptor, which leaves rows outside the sample alone."""
    c0, c1, c2 = to_ragged_indices(row0.to(tl.int32), rows, start)
    box.store([c0, c1, c2, head * COLS], tl.reshape(tile.to(box.dtype), [1, 1, ROWS, COLS]))


@triton.jit
def zero_slack(
    dst, offsets, batch, rows, stride_n, stride_h,
    HEADS: tl.constexpr, COLS: tl.constexpr, COLS_PAD: tl.constexpr,
):  # fmt: skip
    """Rows offsets[batch] .. rows of ``dst [rows, HEADS, COLS]`` become zero; the grid's programs share them."""
    BLOCK: tl.constexpr = 16
    used = tl.load(offsets + batch).to(tl.int64)
    c = tl.arange(0, COLS_PAD)
    for start in range(used + tl.program_id(0) * BLOCK, rows, tl.num_programs(0) * BLOCK):
        r = start + tl.arange(0, BLOCK)
        mask = (r < rows)[:, None] & (c < COLS)[None, :]
        for head in range(HEADS):
            at = dst + tl.full([], head, tl.int64) * stride_h + r.to(tl.int64)[:, None] * stride_n + c[None, :]
            tl.store(at, tl.zeros([BLOCK, COLS_PAD], dst.dtype.element_ty), mask)
