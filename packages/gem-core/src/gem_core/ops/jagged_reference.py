"""References of the jagged ops: one slice a sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gem_core.ops.contract import Problem


def _bounds(offsets: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(offsets.tolist()))


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def concat_reference(problem: Problem, *tensors: Tensor) -> tuple[Tensor, tuple[()]]:
    n = problem.dim("parts")
    values, bounds = tensors[:n], [_bounds(o) for o in tensors[n:]]
    pieces = [v[a:b] for sample in zip(*bounds) for v, (a, b) in zip(values, sample)]
    rows = sum(v.shape[0] for v in values)
    out = values[0].new_zeros((rows, *values[0].shape[1:]))
    if pieces:
        packed = torch.cat(pieces)
        out[: packed.shape[0]] = packed
    return out, ()


def split_reference(problem: Problem, values: Tensor, *offsets: Tensor, rows: Sequence[int]) -> tuple[list[Tensor], tuple[()]]:
    outs = [values.new_zeros((n, *values.shape[1:])) for n in rows]
    at = 0
    for sample in zip(*(_bounds(o) for o in offsets)):
        for out, (a, b) in zip(outs, sample):
            out[a:b] = values[at : at + b - a]
            at += b - a
    return outs, ()


def sum_reference(problem: Problem, values: Tensor, offsets: Tensor) -> tuple[Tensor, tuple[()]]:
    sums = [values[a:b].sum(0, dtype=_sum_dtype(values.dtype)) for a, b in _bounds(offsets)]
    out = torch.stack(sums) if sums else values.new_empty((0, *values.shape[1:]))
    return out.to(values.dtype), ()


def mean_reference(problem: Problem, values: Tensor, offsets: Tensor) -> tuple[Tensor, tuple[()]]:
    means = [values[a:b].sum(0, dtype=_sum_dtype(values.dtype)) / max(1, b - a) for a, b in _bounds(offsets)]
    out = torch.stack(means) if means else values.new_empty((0, *values.shape[1:]))
    return out.to(values.dtype), ()


def expand_reference(problem: Problem, values: Tensor, offsets: Tensor, *, rows: int) -> tuple[Tensor, tuple[()]]:
    out = values.new_zeros((rows, *values.shape[1:]))
    for value, (a, b) in zip(values, _bounds(offsets)):
        out[a:b] = value
    return out, ()


def to_padded_reference(problem: Problem, values: Tensor, offsets: Tensor, *, max_len: int) -> tuple[Tensor, tuple[()]]:
    out = values.new_full((offsets.shape[0] - 1, max_len, *values.shape[1:]), problem.option("fill"))
    for row, (a, b) in zip(out, _bounds(offsets)):
        row[: b - a] = values[a:b]
    return out, ()


def from_padded_reference(problem: Problem, padded: Tensor, offsets: Tensor, *, rows: int) -> tuple[Tensor, tuple[()]]:
    out = padded.new_zeros((rows, *padded.shape[2:]))
    for row, (a, b) in zip(padded, _bounds(offsets)):
        out[a:b] = row[: b - a]
    return out, ()
