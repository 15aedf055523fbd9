"""Sums of the partial results that programs leave one below the other, in an order that is the same on every run."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.triton.common.launch import launch

COLUMNS = 32
"""Of a program: a line of 128 bytes of every row. PyTorch's reduction takes three times as long for results this small, and clears memory
for its programs to meet in before."""
MOST_ROWS = 512


@triton.jit(do_not_specialize=["rows", "columns"])
def sum_rows_kernel(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1).to(tl.int64)
    x += group * rows * columns
    r = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        i = start + r
        at = i.to(tl.int64)[:, None] * columns + c[None, :]
        total += tl.load(x + at, mask=(i < rows)[:, None] & (c < columns)[None, :], other=0.0)
    tl.store(out + group * columns + c, tl.sum(total, 0).to(out.dtype.element_ty), mask=c < columns)


def sum_rows(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """``x.sum(1)`` of contiguous ``x [groups, rows, columns]`` fp32, in ``dtype``."""
    groups, rows, columns = x.shape
    if not rows:
        return x.sum(1, dtype=dtype)
    out = torch.empty((groups, columns), dtype=dtype, device=x.device)
    held = min(MOST_ROWS, max(16, 1 << (rows - 1).bit_length()))
    sizes: dict[str, Any] = {"ROWS": held, "COLUMNS": COLUMNS, "num_warps": min(8, max(1, held * COLUMNS // 1024))}
    launch(sum_rows_kernel, (-(-columns // COLUMNS), groups), x.device, x, out, rows, columns, **sizes)
    return out
