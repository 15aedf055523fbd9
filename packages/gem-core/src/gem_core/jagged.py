"""Packed rows of samples with different lengths: values one after another, and where each sample begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gem_core.errors import BatchError


@dataclass(frozen=True)
class Jagged:
    """``values [N, ...]`` with ``offsets [B+1]`` (int32 or int64, first 0, non-decreasing, last <= N).

    Rows past ``offsets[-1]`` are slack: they belong to no sample. ``max_length`` is an upper bound of the sample lengths known on the
    host without reading the device, or None.
    """

    values: Tensor
    offsets: Tensor
    max_length: int | None = None

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor, max_length: int | None = None) -> Jagged:
        """Build from ``lengths [B]``."""
        return cls(values, lengths_to_offsets(lengths), max_length)

    @classmethod
    def from_list(cls, rows: list[Tensor]) -> Jagged:
        """Pack a list of ``[L_b, ...]`` tensors."""
        lengths = torch.tensor([len(r) for r in rows], dtype=torch.int64)
        return cls.from_lengths(torch.cat(rows), lengths, int(lengths.max()) if len(rows) else 0)

    @property
    def batch_size(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """``[B]``, dtype of the offsets."""
        return self.offsets.diff()

    def to_list(self) -> list[Tensor]:
        """One ``[L_b, ...]`` view a sample. Reads the offsets on the host."""
        bounds = self.offsets.tolist()
        return [self.values[a:b] for a, b in zip(bounds, bounds[1:])]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Jagged:
        return Jagged(
            self.values.to(device, non_blocking=non_blocking), self.offsets.to(device, non_blocking=non_blocking), self.max_length
        )

    def pin_memory(self) -> Jagged:
        return Jagged(self.values.pin_memory(), self.offsets.pin_memory(), self.max_length)

    def slice(self, start: int, stop: int) -> Jagged:
        """Samples ``start:stop``, values as a view. Reads two offsets on the host."""
        a, b = int(self.offsets[start]), int(self.offsets[stop])
        return Jagged(self.values[a:b], self.offsets[start : stop + 1] - a, self.max_length)

    def validate(self, name: str) -> None:
        """Raise BatchError, naming ``name``, unless the offsets describe the values. Reads the offsets on the host."""
        check_offsets(self.offsets, self.values.shape[0], name)


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """``[B]`` lengths to ``[B+1]`` offsets of the same dtype (int64 for other integer types)."""
    dtype = lengths.dtype if lengths.dtype in (torch.int32, torch.int64) else torch.int64
    offsets = torch.zeros(lengths.numel() + 1, dtype=dtype, device=lengths.device)
    torch.cumsum(lengths, 0, dtype=dtype, out=offsets[1:])
    return offsets


def places(offsets: Tensor, rows: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """``rows`` (int64, in any order) packed one after another: their offsets, and where their values lie. ``total`` values: a host integer
    that saves waiting for the device."""
    lengths = offsets.diff()[rows]
    packed = lengths_to_offsets(lengths)
    total = int(packed[-1]) if total is None else total
    shift = torch.repeat_interleave(offsets[:-1][rows] - packed[:-1], lengths, output_size=total)
    return packed, shift + torch.arange(total, device=offsets.device)


def check_offsets(offsets: Tensor, rows: int, name: str) -> None:
    """Raise BatchError unless ``offsets`` is 1-D int32/int64, begins with 0, never decreases and ends at or before ``rows``."""
    if offsets.dim() != 1 or offsets.numel() < 1 or offsets.dtype not in (torch.int32, torch.int64):
        raise BatchError(
            f"offsets must be a 1-D int32 or int64 tensor of B+1 values, got {tuple(offsets.shape)} {offsets.dtype}",
            where=name,
            fix="build them with gem_core.jagged.lengths_to_offsets(lengths)",
        )
    host = offsets.cpu()
    if int(host[0]) != 0 or bool((host.diff() < 0).any()) or int(host[-1]) > rows:
        bad = "does not begin with 0" if int(host[0]) != 0 else "decreases" if bool((host.diff() < 0).any()) else "ends past the values"
        raise BatchError(
            f"the offsets array {bad} (last offset {int(host[-1])}, {rows} value rows)",
            where=name,
            fix="the offsets must be the running sum of the sample lengths, starting with 0",
        )
