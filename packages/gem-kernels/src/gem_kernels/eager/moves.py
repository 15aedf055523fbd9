"""Eager data movement: gathers and sums by row indices, without a loop over samples and without a device sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_core.ops.contract import Problem

Result = tuple[Tensor, tuple[()]]


class Rows:
    """``rows`` packed rows: the ``sample`` of each (0 for slack) and its ``place`` within the sample."""

    def __init__(self, offsets: Tensor, rows: int) -> None:
        self.offsets, self.rows = offsets, rows
        self.samples = offsets.numel() - 1
        at = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
        self.live = at < offsets[-1]
        self.sample = (torch.searchsorted(offsets, at, right=True) - 1).clamp_(0, max(0, self.samples - 1))
        self.place = at - offsets[self.sample]
        self.full = offsets.device.type == "cpu" and int(offsets[-1]) == rows

    def gather(self, source: Tensor, index: Tensor) -> Tensor:
        """``source[index]`` with zeros in slack rows; ``index`` may hold anything there."""
        if source.shape[0] == 0 or self.samples == 0:
            return source.new_zeros((self.rows, *source.shape[1:]))
        if self.full:
            return source.index_select(0, index)
        out = source.index_select(0, torch.where(self.live, index, 0))
        return out.masked_fill_(~self.live.view(-1, *(1,) * (out.dim() - 1)), 0)


def concat(problem: Problem, *tensors: Tensor) -> Result:
    n = problem.dim("parts")
    values, offsets = tensors[:n], tensors[n:]
    total = offsets[0]
    for bounds in offsets[1:]:
        total = total + bounds
    everything = torch.cat(values)
    rows = Rows(total, everything.shape[0])
    index, start = torch.zeros_like(rows.place), 0
    place = rows.place
    for part, bounds in zip(values, offsets):
        inside = (place >= 0) & (place < _lengths(bounds)[rows.sample])
        index = torch.where(inside, start + bounds[rows.sample] + place, index)
        place = place - _lengths(bounds)[rows.sample]
        start += part.shape[0]
    return rows.gather(everything, index), ()


def split(problem: Problem, values: Tensor, *offsets: Tensor, rows: Sequence[int]) -> tuple[list[Tensor], tuple[()]]:
    total = offsets[0]
    for bounds in offsets[1:]:
        total = total + bounds
    outs, before = [], total
    for bounds, n in zip(offsets, rows):
        part = Rows(bounds, n)
        outs.append(part.gather(values, before[part.sample] + part.place))
        before = before + torch.cat([_lengths(bounds)[: part.samples], bounds.new_zeros(1)])
    return outs, ()


def _lengths(offsets: Tensor) -> Tensor:
    """Lengths, and one 0 so that there is something to index in an empty batch."""
    return offsets.diff(append=offsets[-1:])


def total(problem: Problem, values: Tensor, offsets: Tensor) -> Result:
    return _sum(values, offsets).to(values.dtype), ()


def mean(problem: Problem, values: Tensor, offsets: Tensor) -> Result:
    sums = _sum(values, offsets)
    return (sums / offsets.diff().clamp(min=1).view(-1, *(1,) * (values.dim() - 1))).to(values.dtype), ()


def _sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sums ``[B, ...]`` in fp32 for 16-bit values; slack rows go to a row of their own."""
    dtype = torch.float32 if values.dtype in (torch.bfloat16, torch.float16) else values.dtype
    rows = Rows(offsets, values.shape[0])
    sums = values.new_zeros((rows.samples + 1, *values.shape[1:]), dtype=dtype)
    sums.index_add_(0, torch.where(rows.live, rows.sample, rows.samples), values.to(dtype))
    return sums[:-1]


def expand(problem: Problem, values: Tensor, offsets: Tensor, *, rows: int) -> Result:
    packed = Rows(offsets, rows)
    return packed.gather(values, packed.sample), ()


def to_padded(problem: Problem, values: Tensor, offsets: Tensor, *, max_len: int) -> Result:
    shape = (offsets.numel() - 1, max_len, *values.shape[1:])
    fill = problem.option("fill")
    if values.shape[0] == 0:
        return values.new_full(shape, fill), ()
    at = torch.arange(max_len, device=offsets.device, dtype=offsets.dtype)
    inside = at < offsets.diff()[:, None]
    index = torch.where(inside, offsets[:-1, None] + at, 0)
    out = values.index_select(0, index.flatten()).view(shape)
    return out.masked_fill_(~inside.view(*inside.shape, *(1,) * (values.dim() - 1)), fill), ()


def from_padded(problem: Problem, padded: Tensor, offsets: Tensor, *, rows: int) -> Result:
    packed = Rows(offsets, rows)
    return packed.gather(padded.flatten(0, 1), packed.sample * padded.shape[1] + packed.place), ()
