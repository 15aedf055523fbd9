"""What is prepared once a call for the relative bias, so that a pair costs few instructions (`bias`).

- Position: the table in fp32 with its end values repeated PAD times on both sides. A tile that touches the inside of the table then looks
  every pair up without clamping.
- Times: each row's time as int32, relative to the first key of its sample (or request), cut off at ±FAR. A tile without cut times computes
  its differences in 32 bits.
- Buckets: a difference d has a cell, which is the exponent and four bits of the mantissa of float(d), rounded to nearest; both steps keep
  the order. At most one edge lies in a cell (else the edges are "crowded" and pairs are searched), so that one comparison with it decides
  between the bucket at the cell's beginning and the one at the next cell's:

      cells   |    c     |   c+1    |        value of d in cell c:  start[c]      if d < edge[c]
      edges        ^                                                start[c + 1]  otherwise

Tables: ``position [H, PAD + 2R+1 + PAD]``; ``up`` and ``down``, the same over the scale of the scores, with each entry's successor or
predecessor beside it; ``time [H, T + CELLS + 1]``, a head's row of the table and then the values at the cells' beginnings; ``index
[T-1 + CELLS + 1 + CELLS + 1]`` int32, the edges within 32 bits, the cells' edges, whether edges are crowded, and the buckets at the cells'
beginnings.
"""

# ruff: noqa: SIM102 - a constexpr condition stands alone, so that what it guards is not compiled when it is false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels.triton.common.launch import launch

PAD = 512
"""More than the rows and columns of a tile together."""
_BLOCK = 1024

CELLS = tl.constexpr(512)
FAR = tl.constexpr(1 << 29)
# Sign, exponent and four bits of the mantissa of 0.5.
FIRST_CELL = tl.constexpr(0x3F000000 >> 19)


@triton.jit
def cell_of(difference):
    """Cell of a difference (int32, 0 <= difference < 2 * FAR), below CELLS; below 1 all lie in cell 0."""
    return (tl.maximum(difference.to(tl.float32), 0.5).to(tl.int32, bitcast=True) >> 19) - FIRST_CELL


@triton.jit(do_not_specialize=["radius", "edges", "chunks"])
def bias_tables_kernel(
    position, time, time_edges, position_out, up_out, down_out, time_out, index_out, stride_p, stride_t, stride_po, stride_to,
    radius, edges, chunks, gain, PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(position + head * stride_p + tl.minimum(tl.maximum(at - PAD, 0), 2 * radius)).to(tl.float32)
    inside = at < 2 * (radius + PAD) + 1
    tl.store(position_out + head * stride_po + at, value, inside)
    following = tl.load(position + head * stride_p + tl.minimum(tl.maximum(at - PAD + 1, 0), 2 * radius)).to(tl.float32)
    before = tl.load(position + head * stride_p + tl.minimum(tl.maximum(at - PAD - 1, 0), 2 * radius)).to(tl.float32)
    to = 2 * (head * stride_po + at)
    tl.store(up_out + to, value * gain, inside)
    tl.store(up_out + to + 1, following * gain, inside)
    tl.store(down_out + to, value * gain, inside)
    tl.store(down_out + to + 1, before * gain, inside)
    if time is not None:
        if chunk == 0:
            beyond: tl.constexpr = 2 * FAR
            c = tl.arange(0, 2 * CELLS)
            start = tl.zeros([2 * CELLS], tl.int32)
            lowest = start + beyond
            highest = start - 1
            for b in range(edges):
                edge = tl.minimum(tl.maximum(tl.load(time_edges + b), 0), beyond).to(tl.int32)
                cell = tl.where(edge < beyond, cell_of(edge), CELLS)
                start += tl.where(cell < c, 1, 0)
                lowest = tl.where(cell == c, tl.minimum(lowest, edge), lowest)
                highest = tl.where(cell == c, tl.maximum(highest, edge), highest)
                tl.store(index_out + b, edge)
                tl.store(time_out + head * stride_to + b, tl.load(time + head * stride_t + b).to(tl.float32))
            tl.store(time_out + head * stride_to + edges, tl.load(time + head * stride_t + edges).to(tl.float32))
            tl.store(index_out + edges + c, lowest, c < CELLS)
            crowded = tl.max(tl.where((c < CELLS) & (highest > lowest), 1, 0), 0)
            tl.store(index_out + edges + CELLS, crowded)
            tl.store(index_out + edges + CELLS + 1 + c, start, c <= CELLS)
            values = tl.load(time + head * stride_t + start, c <= CELLS, 0.0).to(tl.float32)
            tl.store(time_out + head * stride_to + edges + 1 + c, values, c <= CELLS)


@triton.jit(do_not_specialize=["base_rows"])
def relative_times_kernel(times, offsets, base_times, base_offsets, base_map, out, base_rows: tl.int64, BLOCK: tl.constexpr):
    sample = tl.program_id(0)
    keys = sample
    if base_map is not None:
        keys = tl.load(base_map + sample).to(tl.int32)
    first = tl.load(base_offsets + keys).to(tl.int64)
    base = tl.load(base_times + first, first < base_rows, 0).to(tl.int64)
    end = tl.load(offsets + sample + 1).to(tl.int64)
    for start in range(tl.load(offsets + sample).to(tl.int64), end, BLOCK):
        row = start + tl.arange(0, BLOCK)
        difference = tl.load(times + row, row < end, 0).to(tl.int64) - base
        tl.store(out + row, tl.minimum(tl.maximum(difference, -FAR), FAR).to(tl.int32), row < end)


@dataclass(frozen=True)
class BiasTables:
    """See the module's docstring. ``position`` begins at the table's first entry; time tensors are None without a time bias."""

    position: Tensor
    up: Tensor
    down: Tensor
    time: Tensor | None
    index: Tensor | None
    q_times: Tensor | None
    k_times: Tensor | None


def bias_tables(
    position: Tensor, time: Tensor | None, time_edges: Tensor | None, q_times: Tensor | None, k_times: Tensor | None,
    q_offsets: Tensor, k_offsets: Tensor, kv_index: Tensor | None, samples: int, scale: float,
) -> BiasTables:  # fmt: skip
    """Tables of one call, built on the device. ``samples`` counts those of the query side; ``scale`` is that of the scores."""
    device, heads = position.device, position.shape[0]
    radius = (position.shape[1] - 1) // 2
    position, time = _rows(position), _rows(time)
    width = 2 * (radius + PAD) + 1
    padded = torch.empty(heads, width, dtype=torch.float32, device=device)
    up = torch.empty(heads, width, 2, dtype=torch.float32, device=device)
    down = torch.empty_like(up)
    values = index = q_relative = k_relative = None
    edges = 0
    if time is not None:
        edges = time.shape[1] - 1
        values = torch.empty(heads, edges + 2 + CELLS.value, dtype=torch.float32, device=device)
        index = torch.empty(edges + 2 * CELLS.value + 2, dtype=torch.int32, device=device)
        k_relative = _relative(k_times, k_offsets, k_times, k_offsets, None, k_offsets.shape[0] - 1)
        same = q_times is k_times and q_offsets is k_offsets and kv_index is None
        q_relative = k_relative if same else _relative(q_times, q_offsets, k_times, k_offsets, kv_index, samples)
    chunks = -(-width // _BLOCK)
    launch(
        bias_tables_kernel, (heads * chunks,), device,
        position, time, time_edges, padded, up, down, values, index, position.stride(0), 0 if time is None else time.stride(0),
        padded.stride(0), 0 if values is None else values.stride(0), radius, edges, chunks,
        1 / scale if scale else 0.0, PAD=PAD, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return BiasTables(padded[:, PAD:], up[:, PAD:], down[:, PAD:], values, index, q_relative, k_relative)


def _rows(table: Tensor | None) -> Tensor | None:
    return table if table is None or table.stride(1) == 1 else table.contiguous()


def _relative(
    times: Tensor, offsets: Tensor, base_times: Tensor, base_offsets: Tensor, base_map: Tensor | None, samples: int
) -> Tensor:  # fmt: skip
    out = torch.empty(times.shape, dtype=torch.int32, device=times.device)
    launch(
        relative_times_kernel, (samples,), times.device,
        times, offsets, base_times, base_offsets, base_map, out, base_times.shape[0], BLOCK=256, num_warps=4,
    )  # fmt: skip
    return out
