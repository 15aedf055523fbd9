"""Gradients of whole copies of the dense part, averaged over all processes beside the backward pass of a captured step."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.errors import RunError
from gem_core.train.runtime import Runtime

BUCKET = 64 << 20
"""Bytes of gradients that travel together between hosts. Inside a host all of them travel behind the backward pass, beside what the tables
do there: in it kernels that want every SM would wait for those that move gradients."""

ALIGNED = 64
"""Elements; every gradient begins at a multiple, so that vectorised kernels take all of them alike."""


class SharedGradients:
    """The gradients of ``parameters``, leaves, in a few tensors of their dtype, each on its way as soon as the backward pass has filled it.

    A step calls `take` after its backward pass (recorded with it), `begin`, `go_on`, and `finish` before its optimizer. The averages are
    never part of a recording: a recorded backward pass marks events that the exchange waits for, so that a process may replay while another
    computes. Parameters without a gradient on any process in the first step keep none.
    """

    def __init__(self, parameters: Mapping[str, Tensor], runtime: Runtime) -> None:
        self.parameters, self.runtime = parameters, runtime
        self._buckets: list[_Bucket] = []
        self._of: dict[str, _Bucket] = {}
        self._order: list[str] | None = []
        self._side = torch.cuda.Stream(runtime.device) if runtime.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._works: list[Any] = []
        self._early = 0
        # NCCL divides on the way, by a number of the gradients' dtype, so it must be exact there.
        exact = runtime.world & (runtime.world - 1) == 0
        self._averages = self._side is not None and exact and "nccl" in dist.get_backend_config()
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._there, name))

    def _there(self, name: str, _parameter: Tensor) -> None:
        if self._order is not None:
            self._order.append(name)
            return
        bucket = self._of.get(name)
        if bucket is None:
            raise RunError(
                f"{name} has no gradient in the first step of any process, and one in a later step",
                where="train.capture",
                fix="set train.capture = false, and find_unused = true of the dense strategy",
            )
        bucket.found.append(name)
        if len(bucket.found) == len(bucket.places):
            bucket.close(self.parameters, self._divisor)

    def take(self) -> None:
        """Let the parameters' gradients be views of tensors that hold them. The first call exchanges on the host which parameters have
        some, and in which order."""
        if self._order is not None:
            self._lay_out(self._order)
        for bucket in self._buckets:
            if not bucket.closed:
                bucket.close(self.parameters, self._divisor)
            bucket.closed = False

    def begin(self) -> None:
        """Send every bucket that the backward pass fills on its way off once it is filled."""
        self._send(self._buckets[: self._early])

    def go_on(self) -> None:
        """Send the buckets off that are filled at the end: what is exchanged in between need not wait for them."""
        self._send(self._buckets[self._early :])

    @property
    def _divisor(self) -> int:
        """Of what is sent."""
        return 1 if self._averages else self.runtime.world

    def _send(self, buckets: list[_Bucket]) -> None:
        how = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
        if self._side is None:
            self._works += [dist.all_reduce(bucket.flat, how, async_op=True) for bucket in buckets]
            return
        with torch.cuda.stream(self._side):
            for bucket in buckets:
                self._side.wait_event(bucket.filled)
                self._works.append(dist.all_reduce(bucket.flat, how, async_op=True))

    def finish(self) -> None:
        """Let the current stream wait for the averages."""
        for work in self._works:
            work.wait()
        self._works = []

    def _lay_out(self, own: list[str]) -> None:
        """All ranks take the order of rank 0, then what only others have."""
        ranks = self.runtime.gather_objects(own)
        names = dict.fromkeys(name for order in ranks for name in order)
        parts: list[list[str]] = []
        open_parts: dict[torch.dtype, tuple[list[str], float]] = {}  # weights' copies and other parameters come in turn
        limit = BUCKET if int(os.environ.get("LOCAL_WORLD_SIZE", self.runtime.world)) < self.runtime.world else math.inf
        for name in names:
            p = self.parameters[name]
            part, size = open_parts.get(p.dtype, ([], limit))
            if size >= limit:
                part, size = [], 0
                parts.append(part)
            part.append(name)
            open_parts[p.dtype] = part, size + p.numel() * p.element_size()
        last = {name: i for i, name in enumerate(names)}
        self._early = len(parts) - len(open_parts)
        open_ends = {part[-1] for part, _ in open_parts.values()}
        for part in sorted(parts, key=lambda part: (part[-1] in open_ends, last[part[-1]])):  # they are sent in this order
            bucket = _Bucket.of({name: self.parameters[name] for name in part}, self._side is not None)
            self._buckets.append(bucket)
            self._of |= dict.fromkeys(part, bucket)
        for name in own:
            self._of[name].found.append(name)
        self._order = None


@dataclass
class _Bucket:
    flat: Tensor
    places: dict[str, Tensor]
    filled: Any
    found: list[str] = field(default_factory=list)
    closed: bool = False

    @classmethod
    def of(cls, parameters: Mapping[str, Tensor], on_cuda: bool) -> _Bucket:
        starts, end = [], 0
        for p in parameters.values():
            starts.append(end)
            end += -(-p.numel() // ALIGNED) * ALIGNED
        flat = next(iter(parameters.values())).detach().new_zeros(end)
        places = {name: flat[a : a + p.numel()].view(p.shape) for (name, p), a in zip(parameters.items(), starts)}
        # External: in a recording it is something that streams outside of it may wait for.
        event = torch.cuda.Event(external=True) if on_cuda else None  # type: ignore[no-untyped-call]
        return cls(flat, places, event)

    @torch.no_grad()
    def close(self, parameters: Mapping[str, Tensor], divisor: int) -> None:
        """Take in what gradients there are, over ``divisor``; zeros for the others."""
        for name in self.places.keys() - set(self.found):
            self.places[name].zero_()
        if self.found:
            given = [parameters[name].grad for name in self.found]
            torch._foreach_copy_([self.places[name] for name in self.found], given)  # type: ignore[arg-type]
        if divisor != 1:
            self.flat.mul_(1 / divisor)
        for name, place in self.places.items():
            parameters[name].grad = place
        if self.filled is not None:
            self.filled.record()
        self.found, self.closed = [], True
