"""Sums of bags of rows: many bags of one or two rows, and single ones of a great part of all reads (ids that most samples share).

A program adds up the short bags of a tile side by side. Bags of ``CHUNK`` reads or more are split over programs: chunk j of a bag that
begins at read f belongs to slot ``f // CHUNK + j``, and the last chunk takes what is left (less than two chunks), so that no slot is wanted
by two bags and none must be counted or sorted. Partial sums are added in the order of their slots by a second pass. The order depends on
the bag's own reads only; nothing is added atomically::

    reads   | a a | b b b b b b b b b b b b b b b b b | c |      CHUNK = 4, f = 2
    slots      0         1         2         3                   b: 0 (reads 2-5), 1 (6-9), 2 (10-13), 3 (14-18)

The passes over slots look at ``GROUP`` of them at a time, since with ids drawn alike none has an owner.

This module needs Triton; import it where a kernel starts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BAGS = 8
CHUNK = 128
GROUP = 8
PIECES, COLUMNS = 128, 32
"""Partial sums and columns that a program of the second pass adds at a time."""


@triton.jit
def bag_sums_kernel(
    values, rows, offsets, weights, out, bags, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BAGS: tl.constexpr, CHUNK: tl.constexpr, WEIGHTED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Short bags; long ones are left as if they were empty."""
    bag = tl.cast(tl.program_id(0), tl.int64) * BAGS + tl.arange(0, BAGS)
    column = tl.arange(0, WIDTH)
    here = bag < bags
    first = tl.load(offsets + bag, mask=here, other=0)
    last = tl.load(offsets + bag + 1, mask=here, other=0)
    if SPLIT:
        last = tl.where(last - first < CHUNK, last, first)
    total = tl.zeros([BAGS, WIDTH], dtype=tl.float32)
    for i in range(tl.max(last - first, 0)):
        inside = first + i < last
        row = tl.load(rows + first + i, mask=inside, other=0)
        read = inside[:, None] & (column < DIM)[None, :]
        value = tl.load(values + row[:, None] * DIM + column[None, :], mask=read, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + first + i, mask=inside, other=0.0)[:, None]
        total += value
    written = here[:, None] & (column < DIM)[None, :]
    tl.store(out + bag[:, None] * DIM + column[None, :], (total * scale).to(out.dtype.element_ty), mask=written)


@triton.jit
def bag_sums_slots_kernel(offsets, owners, heads, bags, BAGS: tl.constexpr, CHUNK: tl.constexpr):
    """Which long bag each slot belongs to, and whose first slot it is."""
    begin = tl.cast(tl.program_id(0), tl.int64) * BAGS
    place = tl.arange(0, BAGS)
    first = tl.load(offsets + begin + place, mask=begin + place < bags, other=0)
    last = tl.load(offsets + begin + place + 1, mask=begin + place < bags, other=0)
    if tl.max(last - first, 0) >= CHUNK:
        for bag in range(begin, tl.minimum(begin + BAGS, bags)):
            start = tl.load(offsets + bag)
            chunks = (tl.load(offsets + bag + 1) - start) // CHUNK
            if chunks > 0:
                tl.store(heads + start // CHUNK, bag)
                for i in range(0, chunks, BAGS):
                    tl.store(owners + start // CHUNK + i + place, tl.zeros_like(place) + bag, mask=i + place < chunks)


@triton.jit
def bag_sums_chunk_kernel(
    values, rows, offsets, weights, owners, partial,
    DIM: tl.constexpr, WIDTH: tl.constexpr, READS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    group = tl.cast(tl.program_id(0), tl.int64) * GROUP
    if tl.max(tl.load(owners + group + tl.arange(0, GROUP)), 0) >= 0:
        for slot in range(group, group + GROUP):
            bag = tl.load(owners + slot)
            if bag >= 0:
                first, last = tl.load(offsets + bag), tl.load(offsets + bag + 1)
                chunk = slot - first // CHUNK
                start = first + chunk * CHUNK
                stop = tl.where(chunk == (last - first) // CHUNK - 1, last, start + CHUNK)
                column = tl.arange(0, WIDTH)
                total = tl.zeros([READS, WIDTH], dtype=tl.float32)
                for i in range(start, stop, READS):
                    read = i + tl.arange(0, READS)
                    row = tl.load(rows + read, mask=read < stop, other=0)
                    inside = (read < stop)[:, None] & (column < DIM)[None, :]
                    value = tl.load(values + row[:, None] * DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
                    if WEIGHTED:
                        value *= tl.load(weights + read, mask=read < stop, other=0.0)[:, None]
                    total += value
                tl.store(partial + slot * DIM + column, tl.sum(total, 0), mask=column < DIM)


@triton.jit
def bag_sums_join_kernel(
    offsets, heads, partial, out, scale,
    DIM: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    group = tl.cast(tl.program_id(0), tl.int64) * GROUP
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.max(tl.load(heads + group + tl.arange(0, GROUP)), 0) >= 0:
        for slot in range(group, group + GROUP):
            bag = tl.load(heads + slot)
            if bag >= 0:
                chunks = (tl.load(offsets + bag + 1) - tl.load(offsets + bag)) // CHUNK
                total = tl.zeros([PIECES, COLUMNS], dtype=tl.float32)
                for i in range(0, chunks, PIECES):
                    piece = i + tl.arange(0, PIECES)
                    inside = (piece < chunks)[:, None] & (column < DIM)[None, :]
                    total += tl.load(partial + (slot + piece)[:, None] * DIM + column[None, :], mask=inside, other=0.0)
                tl.store(out + bag * DIM + column, (tl.sum(total, 0) * scale).to(out.dtype.element_ty), mask=column < DIM)


def bag_sums(values: Tensor, rows: Tensor, offsets: Tensor, weights: Tensor | None, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """``[S, D]`` of ``dtype``: ``scale`` times the sums, in fp32 and in an order that depends on the bag's length only, of ``weights[i] *
    values[rows[i]]`` over each segment.

    ``values [N, D]``, ``rows [V]`` int64, ``offsets [S+1]`` int64, ``weights [V]`` fp32.
    """
    bags, dim, groups = offsets.numel() - 1, values.shape[1], triton.cdiv(rows.numel() // CHUNK, GROUP)
    out = values.new_empty(bags, dim, dtype=dtype)
    width, values, weighted = triton.next_power_of_2(dim), values.contiguous(), weights is not None
    read = (values, rows, offsets, weights if weighted else values)
    sizes = {"DIM": dim, "WIDTH": width, "CHUNK": CHUNK, "WEIGHTED": weighted}
    with torch.cuda.device_of(values):
        bag_sums_kernel[(triton.cdiv(bags, BAGS),)](*read, out, bags, scale, BAGS=BAGS, SPLIT=groups > 0, **sizes)
        if groups:
            owners, heads = rows.new_full((2, groups * GROUP), -1)
            bag_sums_slots_kernel[(triton.cdiv(bags, 256),)](offsets, owners, heads, bags, BAGS=256, CHUNK=CHUNK)
            partial = values.new_empty(groups * GROUP, dim, dtype=torch.float32)
            bag_sums_chunk_kernel[(groups,)](*read, owners, partial, READS=max(1, min(32, 4096 // width)), GROUP=GROUP, **sizes)
            bag_sums_join_kernel[(groups, triton.cdiv(dim, COLUMNS))](
                offsets, heads, partial, out, scale, DIM=dim, PIECES=PIECES, COLUMNS=COLUMNS, CHUNK=CHUNK, GROUP=GROUP
            )
    return out
