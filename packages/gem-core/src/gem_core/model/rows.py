"""Where the packed rows of a history are, computed once a batch and shared by all parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class Rows:
    """Row layout of one packed history ``[N, d]`` of B samples.

    A sample's rows are its ``cls`` prepended tokens, its events, oldest first, and, with ``candidate``, the candidate's row.
    ``offsets [B+1]`` count all of them. ``count`` is N and ``max_length`` bounds a sample's rows; both are host integers, so nothing here
    waits for the device. ``ages [N]`` is the log age ``log(1 + age / scale)`` of each row, 0 for the candidate and CLS rows.
    """

    offsets: Tensor
    count: int
    max_length: int | None
    cls: int = 0
    candidate: bool = False
    ages: Tensor | None = None

    @property
    def batch_size(self) -> int:
        return self.offsets.numel() - 1

    @cached_property
    def sample(self) -> Tensor:
        """``[N]`` int64: the sample that each row belongs to."""
        places = torch.arange(self.count, device=self.offsets.device, dtype=self.offsets.dtype)
        return torch.searchsorted(self.offsets[1:], places, right=True)

    @cached_property
    def position(self) -> Tensor:
        """``[N]``: place within the sample, from 0."""
        return torch.arange(self.count, device=self.offsets.device) - self.offsets[self.sample]

    @cached_property
    def recency(self) -> Tensor:
        """``[N]``: 0 for the last row of the sample, then 1, 2, ..."""
        return self.offsets[self.sample + 1] - 1 - torch.arange(self.count, device=self.offsets.device)

    @cached_property
    def num_targets(self) -> Tensor | None:
        """``[B]`` int32 ones where the candidate is appended, as the attention ops want it."""
        return torch.ones(self.batch_size, dtype=torch.int32, device=self.offsets.device) if self.candidate else None

    @cached_property
    def context_len(self) -> Tensor | None:
        """``[B]`` int32: the CLS rows of each sample, or None."""
        return torch.full((self.batch_size,), self.cls, dtype=torch.int32, device=self.offsets.device) if self.cls else None

    def uniform(self, rows: int) -> Tensor:
        """Offsets ``[B+1]`` of a layout with ``rows`` rows in every sample."""
        return torch.arange(self.batch_size + 1, device=self.offsets.device, dtype=self.offsets.dtype) * rows

    def extended(self, cls: int, candidate: bool) -> Rows:
        """The layout after ``cls`` rows are put before, and the candidate after, the rows of each sample (ages are not carried over)."""
        more = cls + int(candidate)
        longest = None if self.max_length is None else self.max_length + more
        return Rows(self.offsets + self.uniform(more), self.count + more * self.batch_size, longest, cls, candidate)

    def newest(self, values: Tensor, k: int) -> Tensor:
        """The last ``k`` events of each sample, ``[N, d] -> [B, k, d]``, oldest first; zeros where there are fewer."""
        if not values.shape[0]:
            return values.new_zeros(self.batch_size, k, values.shape[1])
        end = self.offsets[1:] - int(self.candidate)
        place = end.unsqueeze(1) - torch.arange(k, 0, -1, device=values.device)
        real = place >= (self.offsets[:-1] + self.cls).unsqueeze(1)
        return values[place.clamp(min=0)] * real.unsqueeze(-1).to(values.dtype)

    def first(self, values: Tensor, k: int) -> Tensor:
        """The first ``k`` rows of each sample (the CLS rows), ``[N, d] -> [B, k, d]``."""
        return values[self.offsets[:-1].unsqueeze(1) + torch.arange(k, device=values.device)]

    def last(self, values: Tensor) -> Tensor:
        """The last row of each sample (the candidate's), ``[N, d] -> [B, 1, d]``; every sample must have one."""
        return values[self.offsets[1:] - 1].unsqueeze(1)
