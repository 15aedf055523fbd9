"""Sums of bags of rows, a tile of bags at a time, for many bags of one or two rows: PyTorch's kernel takes each bag by itself.

This module needs Triton; import it where a kernel starts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BAGS = 16


@triton.jit
def bag_sums_kernel(values, rows, offsets, out, bags, scale, DIM: tl.constexpr, WIDTH: tl.constexpr, BAGS: tl.constexpr):
    bag = tl.cast(tl.program_id(0), tl.int64) * BAGS + tl.arange(0, BAGS)
    column = tl.arange(0, WIDTH)
    here = bag < bags
    first = tl.load(offsets + bag, mask=here, other=0)
    last = tl.load(offsets + bag + 1, mask=here, other=0)
    total = tl.zeros([BAGS, WIDTH], dtype=tl.float32)
    for i in range(tl.max(last - first, 0)):
        inside = first + i < last
        row = tl.load(rows + first + i, mask=inside, other=0)
        read = inside[:, None] & (column < DIM)[None, :]
        total += tl.load(values + row[:, None] * DIM + column[None, :], mask=read, other=0.0).to(tl.float32)
    written = here[:, None] & (column < DIM)[None, :]
    tl.store(out + bag[:, None] * DIM + column[None, :], (total * scale).to(out.dtype.element_ty), mask=written)


def bag_sums(values: Tensor, rows: Tensor, offsets: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """``[S, D]`` of ``dtype``: ``scale`` times the sums, in fp32 and in the order of the reads, of ``values[rows[i]]`` over each segment.

    ``values [N, D]``, ``rows [V]`` int64, ``offsets [S+1]`` int64.
    """
    bags, dim = offsets.numel() - 1, values.shape[1]
    out = values.new_empty(bags, dim, dtype=dtype)
    with torch.cuda.device_of(values):
        bag_sums_kernel[(triton.cdiv(bags, BAGS),)](
            values.contiguous(), rows, offsets, out, bags, scale, DIM=dim, WIDTH=triton.next_power_of_2(dim), BAGS=BAGS
        )
    return out
