"""All-gathers by the collectives of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.train.collective import GatherOptions
from gem_parallel.collectives.copy_engine import PlainWindow, Ring, flat, group_mean
from gem_parallel.collectives.members import timeout_of

# Newer releases of torch have renamed it.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GroupGather:
    """``limited``: by a communicator of its own whose kernels take at most ``options.ctas`` SMs (NCCL)."""

    def __init__(self, group: Any, options: GatherOptions, limited: bool = False) -> None:
        self.options, self.size, self.limited = options, group.size(), limited
        self.group = few_ctas(group, options.ctas) if limited else group

    def allocate(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.options.device)

    def gather(self, out: Tensor) -> None:
        all_gather(out, out.view(self.size, -1)[self.group.rank()], group=self.group)

    def source(self, size: int) -> GroupSource:
        return GroupSource(self, size)

    def mean(self, out: Tensor, whole: Tensor) -> None:
        group_mean(out, whole, self.group)

    def describe(self) -> str:
        return f"{self.size} members by {dist.get_backend(self.group)}" + (f", at most {self.options.ctas} SMs" if self.limited else "")


class GroupSource:
    """Memory that a process group's collectives read."""

    def __init__(self, gatherer: GroupGather | ZeroCtaGather, size: int) -> None:
        self.gatherer = gatherer
        self.memory = torch.zeros(size, dtype=torch.uint8, device=gatherer.options.device)

    def reclaim(self) -> None:
        """A gather has read it when it ends."""

    def gather(self, moves: Sequence[tuple[Tensor, int]]) -> None:
        for out, at in moves:
            whole = flat(out)
            all_gather(whole, self.memory[at : at + whole.numel() // self.gatherer.size], group=self.gatherer.group)


def few_ctas(group: Any, ctas: int) -> Any:
    """The same members with an NCCL communicator whose kernels take at most ``ctas`` SMs. Collective over the group."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout_of(group)
    options.config.min_ctas, options.config.max_ctas = 1, ctas
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, timeout=options._timeout, backend="nccl", pg_options=options, use_local_synchronization=True)


class ZeroCtaGather:
    """By NCCL's copy-engine collectives: a communicator with the zero-CTA policy, results in memory registered as symmetric windows.

    NCCL falls back to kernels by itself where a window is not symmetric; so the windows are asked for here, and a refusal is raised.
    """

    def __init__(self, group: Any, options: GatherOptions) -> None:
        self.options, self.size = options, group.size()
        config = dist.ProcessGroupNCCL.Options()
        config._timeout = timeout_of(group)
        config.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
        ranks = dist.get_process_group_ranks(group)
        self.group = dist.new_group(ranks, timeout=config._timeout, backend="nccl", pg_options=config, use_local_synchronization=True)
        dist.barrier(self.group, device_ids=[options.device.index])  # windows cannot be the first thing of a communicator
        self.ring = Ring(_Pool(self.group, options.device), options)

    def allocate(self, size: int, dtype: torch.dtype) -> Tensor:
        return self.ring.take(size, dtype)

    def gather(self, out: Tensor) -> None:
        work = all_gather(out, out.view(self.size, -1)[self.group.rank()], group=self.group, async_op=True)
        work.wait()

    def source(self, size: int) -> GroupSource:
        return GroupSource(self, size)

    def mean(self, out: Tensor, whole: Tensor) -> None:
        """By kernels: the copy engines do not add."""
        group_mean(out, whole, self.group)

    def describe(self) -> str:
        return f"NCCL's copy-engine collectives, {self.size} members, {self.options.slots} results in turn"


class _Pool:
    """Memory from NCCL's allocator, registered as symmetric windows of a group."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._backend = group._get_backend(device)
        self._pools: list[Any] = []
        self.device = device

    def window(self, size: int) -> PlainWindow:
        pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool, self.device):
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._backend.register_mem_pool(pool, symm=True)
        self._pools.append(pool)
        return PlainWindow(memory)
