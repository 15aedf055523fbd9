"""Where the packed rows of a history are, computed once a batch and shared by all parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Rows:
    """Row layout of one packed history ``[N, d]`` of B samples.

    A sample's rows are its ``cls`` prepended tokens, its events, oldest first, and, with ``candidate``, the candidate's row.
    ``offsets [B+1]`` count all of them. ``count`` is N and ``max_length`` bounds a sample's rows; both are host integers, so nothing here
    waits for the device. ``ages [N]`` is the log age ``log(1 + age / scale)`` of each row, 0 for the candidate and CLS rows. Slack rows,
    past the last offset, have places within the tables that others are looked up in; no result depends on them.
    """

    offsets: Tensor
    count: int
    max_length: int | None
    cls: int = 0
    candidate: bool = False
    ages: Tensor | None = None
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False)

    # Each tensor is made once and is the same object ever after: implementations of ops keep their plans by it. Not functools'
    # cached_property, whose lock torch.compile cannot trace.
    def _keep(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    @property
    def batch_size(self) -> int:
        return self.offsets.numel() - 1

    def _places(self) -> Tensor:
        return torch.arange(self.count, device=self.offsets.device, dtype=self.offsets.dtype)

    @property
    def sample(self) -> Tensor:
        """``[N]`` int64: the sample that each row belongs to; for slack rows the last one."""
        return self._keep("sample", lambda: samples_of(self.offsets, self._places()))

    @property
    def position(self) -> Tensor:
        """``[N]``: place within the sample, from 0."""
        last = (self.count if self.max_length is None else self.max_length) - 1
        return self._keep("position", lambda: (self._places() - self.offsets[self.sample]).clamp(max=last))

    @property
    def recency(self) -> Tensor:
        """``[N]``: 0 for the last row of the sample, then 1, 2, ..."""
        return self._keep("recency", lambda: (self.offsets[self.sample + 1] - 1 - self._places()).clamp(min=0))

    @property
    def num_targets(self) -> Tensor | None:
        """``[B]`` int32 ones where the candidate is appended, as the attention ops want it."""
        return self._keep("num_targets", lambda: self._filled(1)) if self.candidate else None

    @property
    def context_len(self) -> Tensor | None:
        """``[B]`` int32: the CLS rows of each sample, or None."""
        return self._keep("context_len", lambda: self._filled(self.cls)) if self.cls else None

    def _filled(self, value: int) -> Tensor:
        return torch.full((self.batch_size,), value, dtype=torch.int32, device=self.offsets.device)

    def uniform(self, rows: int) -> Tensor:
        """Offsets ``[B+1]`` of a layout with ``rows`` rows in every sample."""
        device, dtype = self.offsets.device, self.offsets.dtype
        return self._keep(f"uniform {rows}", lambda: torch.arange(self.batch_size + 1, device=device, dtype=dtype) * rows)

    def prepare(self, uniform: Iterable[int], *, position: bool = False) -> None:
        """Make what attention asks for now: the first of several layers alike would be compiled apart from the others for making it."""
        for rows in uniform:
            self.uniform(rows)
        _ = self.num_targets, self.context_len, self.position if position else None

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

    def events(self, values: Tensor) -> Tensor:
        """The events' rows without CLS and candidate rows, ``[N, d] -> [N - B * (cls + candidate), d]``."""
        extra = self.cls + int(self.candidate)
        if not extra:
            return values
        place = torch.arange(self.count - extra * self.batch_size, device=values.device)
        ends = self.offsets[1:] - self.uniform(extra)[1:]
        sample = torch.searchsorted(ends, place.to(ends.dtype), right=True).clamp(max=self.batch_size - 1)
        return values[place + sample * extra + self.cls]

    def first(self, values: Tensor, k: int) -> Tensor:
        """The first ``k`` rows of each sample (the CLS rows), ``[N, d] -> [B, k, d]``."""
        return values[self.offsets[:-1].unsqueeze(1) + torch.arange(k, device=values.device)]

    def last(self, values: Tensor) -> Tensor:
        """The last row of each sample (the candidate's), ``[N, d] -> [B, 1, d]``; every sample must have one."""
        return values[self.offsets[1:] - 1].unsqueeze(1)


def samples_of(offsets: Tensor, places: Tensor) -> Tensor:
    """int64: the sample that each of ``places`` belongs to, by ``offsets [B+1]``; past the last offset it is the last sample."""
    return torch.searchsorted(offsets[1:], places, right=True).clamp(max=offsets.numel() - 2)
