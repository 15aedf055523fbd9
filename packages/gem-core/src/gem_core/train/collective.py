"""What an all-gather back end promises those who use it (`gem_core.hookspecs.CollectiveSpec`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class Topology:
    """Members of a group in its order: ``hosts[i]`` numbers the host of member i; ``device`` is "cuda" or "cpu"."""

    device: str
    hosts: tuple[int, ...]

    @property
    def mates(self) -> int | None:
        """Members a host where every host has equally many that follow one another in the group; else None."""
        runs: list[list[int]] = []
        for host in self.hosts:
            if runs and runs[-1][0] == host:
                runs[-1].append(host)
            else:
                runs.append([host])
        sizes = {len(run) for run in runs}
        return len(runs[0]) if len(sizes) == 1 and len(runs) == len(set(self.hosts)) else None


@dataclass(frozen=True)
class GatherOptions:
    """Given to ``CollectiveSpec.build(group, options)``. ``slots``: results that live at once; ``ctas``: most SMs of a kernel that gathers;
    ``timeout_s``: how long a process on a CPU waits for another one."""

    device: torch.device
    topology: Topology
    slots: int = 3
    ctas: int = 8
    timeout_s: float = 60.0


@runtime_checkable
class Source(Protocol):
    """Memory of this process that the members gather from again and again.

    ``memory`` (uint8) may be written after `reclaim`, in the order of the current stream.
    """

    memory: Tensor

    def reclaim(self) -> None:
        """Let the current stream wait until every member has what it gathered from here."""

    def gather(self, moves: Sequence[tuple[Tensor, int]]) -> None:
        """For every ``(out, at)``: member p's ``memory[at : at + n]`` to bytes p n to (p + 1) n of the contiguous ``out``.

        Collective, in the order of the current stream; the same moves on all members.
        """


@runtime_checkable
class Gatherer(Protocol):
    """What ``build`` returns: all-gathers over one group, called by its members in one order."""

    def allocate(self, size: int, dtype: torch.dtype) -> Tensor:
        """``[size]``, uninitialised: the next result. At most ``slots`` of them may be alive. Collective."""

    def gather(self, out: Tensor) -> None:
        """Fill ``out`` from `allocate`, of which this process has written its own of ``group.size()`` equal parts. In the order of the
        current stream."""

    def source(self, size: int) -> Source:
        """``size`` bytes that members gather from. Collective, like `allocate`."""

    def mean(self, out: Tensor, whole: Tensor) -> None:
        """``out [n]``: this member's part of the mean of all members' ``whole [group.size() * n]``, contiguous fp32. In the order of the
        current stream."""

    def describe(self) -> str:
        """One line for the head of a run."""


Group = Any
"""A ``torch.distributed.ProcessGroup``."""
