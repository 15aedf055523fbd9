"""Process groups of the sparse axes, each kind of traffic with a communicator and a stream of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.errors import DeviceError
from gem_core.train.mesh import Mesh

REQUESTS = 2
"""Thread blocks (NCCL) that ids take between replicas: they are few, and travel beside the dense part, whose kernels want every SM."""

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Lane:
    """A group with a stream of its own on CUDA; elsewhere, or with one member, everything happens at once in the caller's order."""

    def __init__(self, group: Any, size: int, device: torch.device) -> None:
        self.group, self.size, self.device = group, size, device
        # High priority: what it launches beside products gets an SM as soon as one of their blocks ends.
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def behind(self, *events: Any) -> Iterator[None]:
        """Run what follows on the lane's stream, after everything queued on the current one and after ``events``."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for event in events:
            if event is not None:
                self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> Any:
        """An event after what the lane holds now, or None without a stream."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def wait(self, event: Any) -> None:
        """Let the current stream go on only after ``event``."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def all_to_all(self, data: Tensor, received: Sequence[int], sent: Sequence[int]) -> Tensor:
        """``received[p]`` rows from and ``sent[p]`` rows of ``data`` to every member p."""
        if self.size == 1:
            return data
        out = data.new_empty(sum(received), *data.shape[1:])
        dist.all_to_all_single(out, data.contiguous(), list(received), list(sent), group=self.group)
        return out

    def all_gather(self, out: Tensor, data: Tensor) -> None:
        """``out [size * n, ...]`` from every member's ``data [n, ...]``."""
        if self.size == 1:
            out.copy_(data)
        else:
            _all_gather(out, data, group=self.group)

    def reduce_mean(self, out: Tensor, data: Tensor) -> None:
        """``out [n, ...]``: this member's part of the mean of all ``data [size * n, ...]``."""
        if self.size == 1:
            out.copy_(data)
        elif self.stream is not None:
            _reduce_scatter(out, data, op=dist.ReduceOp.AVG, group=self.group)
        else:
            _reduce_scatter(out, data, group=self.group)
            out.div_(self.size)


@dataclass(frozen=True)
class Axes:
    """This rank's place on the two sparse axes and its lanes."""

    device: torch.device
    model: int
    replica: int
    model_rank: int
    replica_rank: int
    inputs: Lane
    outputs: Lane
    requests: Lane
    gather: Lane
    scatter: Lane


def axes(mesh: Mesh, device: torch.device, *, ctas: int | None = None) -> Axes:
    """Create the groups; every rank must call this at the same point.

    :param ctas: most thread blocks that a gather or reduce-scatter between replicas may take (NCCL); None: NCCL decides.
    :raises DeviceError: several processes without a process group.
    """
    if mesh.world > 1 and not dist.is_initialized():
        raise DeviceError(
            "there is no process group", fix="start the processes with torchrun, or call torch.distributed.init_process_group"
        )
    at = (mesh.coordinate("model"), mesh.coordinate("replica"))
    lanes = _lanes(dist.group.WORLD if mesh.world > 1 else None, mesh.world, mesh.model, mesh.replica, mesh.rank, device, ctas)
    return Axes(device, mesh.model, mesh.replica, *at, *lanes)


@lru_cache(maxsize=32)
def _lanes(world: Any, size: int, model: int, replica: int, rank: int, device: torch.device, ctas: int | None) -> tuple[Lane, ...]:
    """Shared by all tables of one arrangement: every further group costs a communicator and device memory."""
    mesh = Mesh(size, model=model, replica=replica, rank=rank)
    by_model, by_replica = mesh.groups("model"), mesh.groups("replica")
    kinds = [(by_model, None), (by_model, None), (by_replica, REQUESTS), (by_replica, ctas), (by_replica, ctas)]
    return tuple(Lane(_group(groups, rank, world, limit), len(groups[0]), device) for groups, limit in kinds)


def _group(groups: list[list[int]], rank: int, world: Any, ctas: int | None) -> Any:
    if len(groups[0]) == 1:
        return None
    on_cuda = "nccl" in dist.get_backend_config()
    timeout = world._get_backend(torch.device("cuda" if on_cuda else "cpu")).options._timeout
    options = None
    if ctas is not None and on_cuda:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.min_ctas, options.config.max_ctas = 1, ctas
    backend = "nccl" if options is not None else None
    made = [dist.new_group(ranks, timeout=timeout, backend=backend, pg_options=options) for ranks in groups]
    return next(group for group, ranks in zip(made, groups) if rank in ranks)
