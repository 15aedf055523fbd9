"""The processes of one host: memory of each that all can read, flags beside it, and lanes on which copies run.

`CudaMembers` uses symmetric memory (peers' buffers mapped into this process), the driver's stream memory operations and streams, so that a
copy needs a copy engine and no SM. `HostMembers` has files in shared memory, flags that are polled, and threads: the same protocol on CPUs.
NVLink multicast is never used: it can put the GPUs of a shared host out of service.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.errors import DeviceError
from gem_parallel.collectives import driver

HEAD = 4096
"""Bytes of flags before the memory of a window: a word for each member that has published, that is done, and for each piece it sends."""


class Window(ABC):
    """``memory`` of this process (uint8) and ``peers``, that of every member, as this process reads it.

    A member publishes what it wrote, pulls from the others after they have published as often, and then says that it is done; before it
    writes again it waits until all others are done with everything that it published. Every member makes these calls in one order.
    """

    memory: Tensor
    peers: list[Tensor]

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.published = 0

    def others(self) -> list[int]:
        """From the next one on, so that not everybody reads from the same member."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def publish(self) -> None:
        """In the caller's order."""
        self.published += 1
        for peer in self.others():
            self._signal(peer, self.rank, self.published)

    def ready(self, peer: int, count: int) -> None:
        """In the caller's order: go on once ``peer`` has published ``count`` times."""
        self._wait(peer, count)

    def done(self) -> None:
        """In the caller's order: tell all others that what they published was read."""
        for peer in self.others():
            self._signal(peer, self.size + self.rank, self.published)

    def arrive(self, peer: int, part: int, count: int) -> None:
        """In the caller's order: tell ``peer`` that the ``part``-th piece of what this member writes into its memory is there."""
        self._signal(peer, self._arrivals(self.rank, part), count)

    def arrived(self, peer: int, part: int, count: int) -> None:
        """In the caller's order: go on once ``peer`` has told so ``count`` times."""
        self._wait(self._arrivals(peer, part), count)

    def _arrivals(self, sender: int, part: int) -> int:
        return (2 + part) * self.size + sender

    def reclaim(self) -> None:
        """In the caller's order: go on once all others are done."""
        if self.published:
            for peer in self.others():
                self._wait(self.size + peer, self.published)

    @abstractmethod
    def _signal(self, peer: int, flag: int, value: int) -> None: ...

    @abstractmethod
    def _wait(self, flag: int, value: int) -> None: ...


class Members(ABC):
    """``rank`` among ``size`` members of one host, with ``lanes`` that copies run on beside what the caller does."""

    def __init__(self, group: Any, lanes: int) -> None:
        self.group, self.rank, self.size, self.lanes = group, group.rank(), group.size(), lanes
        self._windows: weakref.WeakSet[Window] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Of the windows of this process; CUDA's allocator does not count them."""
        return sum(w.memory.numel() for w in self._windows)

    @abstractmethod
    def window(self, size: int) -> Window:
        """``size`` bytes a member. Collective; what the members do now ends first."""

    @abstractmethod
    def fork(self) -> None:
        """Lanes go on after what the caller has done."""

    @abstractmethod
    def run(self, lane: int, work: Callable[[], None]) -> None: ...

    @abstractmethod
    def join(self) -> None:
        """The caller goes on after what the lanes hold."""

    def copy(self, source: Tensor, target: Tensor, sms: int) -> None:
        """Bytes from one place of this process's memory to another, in the caller's order."""
        target.copy_(source)

    def mean(self, own: Tensor, sent: Tensor, peers: int, stride: int, out: Tensor, sms: int) -> None:
        """``out [n]``: the mean of ``own [n]`` and the ``peers`` parts ``sent[i * stride : i * stride + n]``, in the caller's order."""
        n = own.numel()
        torch.mul(torch.stack([own, *(sent[i * stride : i * stride + n] for i in range(peers))]).sum(0), 1.0 / (peers + 1), out=out)

    @abstractmethod
    def give_up(self) -> None:
        """Let go on what waits for flags that do not come; results are worthless from now on."""


class CudaMembers(Members):
    """Of one group of processes with a GPU each, all in one host."""

    def __init__(self, group: Any, device: torch.device) -> None:
        # One copy engine reads a peer at 356 GB/s on an H200, two at once are no faster, and every lane costs the host 10 us a gather.
        super().__init__(group, lanes=1 if group.size() <= 2 else 2)
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        self.device = device
        high = torch.cuda.Stream.priority_range()[1]  # type: ignore[call-arg]
        self._streams = [torch.cuda.Stream(device, priority=high) for _ in range(self.lanes)]  # type: ignore[no-untyped-call]

    def window(self, size: int) -> Window:
        made = _CudaWindow(self, size)
        self._windows.add(made)
        return made

    def fork(self) -> None:
        here = torch.cuda.current_stream(self.device).record_event()
        for stream in self._streams:
            stream.wait_event(here)

    def run(self, lane: int, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._streams[lane]):
            work()

    def join(self) -> None:
        current = torch.cuda.current_stream(self.device)
        for stream in self._streams:
            current.wait_stream(stream)

    def copy(self, source: Tensor, target: Tensor, sms: int) -> None:
        if source.numel() % 4:
            target.copy_(source)
        elif source.numel():
            with _in_turn(self.device):
                few_sms().copy(source, target, sms)

    def mean(self, own: Tensor, sent: Tensor, peers: int, stride: int, out: Tensor, sms: int) -> None:
        with _in_turn(self.device):
            few_sms().mean(own, sent, peers, stride, out, sms)

    def give_up(self) -> None:
        beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(beside):
            for window in self._windows:
                if isinstance(window, _CudaWindow) and window.head is not None:
                    window.head.fill_(0x7F)  # every flag above any count
        beside.synchronize()


@contextmanager
def _in_turn(device: torch.device) -> Iterator[None]:
    """In the current stream's order, and one after another with what others do so: together they take no more SMs than one of them."""
    current, shared = torch.cuda.current_stream(device), _shared_stream(device)
    shared.wait_stream(current)
    with torch.cuda.stream(shared):
        yield
    current.wait_stream(shared)


@lru_cache
def _shared_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device, priority=torch.cuda.Stream.priority_range()[1])  # type: ignore[no-untyped-call, call-arg]


def few_sms() -> Any:
    """The kernels that copy and add with few SMs.

    :raises DeviceError: Triton, which builds of torch for CUDA bring along, is not there.
    """
    try:
        from gem_parallel.collectives import few_sms as kernels
    except ImportError as fault:
        raise DeviceError(
            f"copies beside products need Triton, which cannot be imported: {fault}", fix='install triton, or use collective = "default"'
        ) from fault
    return kernels


class _CudaWindow(Window):
    head: Tensor | None = None

    def __init__(self, members: CudaMembers, size: int) -> None:
        super().__init__(members.rank, members.size)
        import torch.distributed._symmetric_memory as symmetric

        self.device = members.device
        if self.size == 1:
            self.memory = torch.empty(size, dtype=torch.uint8, device=members.device)
            self.peers = [self.memory]
            return
        whole = symmetric.empty(HEAD + size, dtype=torch.uint8, device=members.device)
        self._handle = symmetric.rendezvous(whole, members.group.group_name)
        if getattr(self._handle, "multicast_ptr", 0):
            raise DeviceError(
                "symmetric memory was set up with NVLink multicast, which can put the GPUs of a shared host out of service",
                fix="set TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before the processes start",
            )
        self.head = whole[:HEAD]
        self.head.zero_()
        buffers = [
            whole if p == self.rank else self._handle.get_buffer(p, (HEAD + size,), torch.uint8) for p in range(self.size)
        ]  # fmt: skip
        self.memory, self.peers = whole[HEAD:], [b[HEAD:] for b in buffers]
        self._flags = [b.data_ptr() for b in buffers]
        torch.cuda.synchronize(members.device)
        _meet(members.group, members.device)

    def _signal(self, peer: int, flag: int, value: int) -> None:
        driver.write(torch.cuda.current_stream(self.device).cuda_stream, self._flags[peer] + 4 * flag, value)

    def _wait(self, flag: int, value: int) -> None:
        driver.wait_at_least(torch.cuda.current_stream(self.device).cuda_stream, self._flags[self.rank] + 4 * flag, value)


class HostMembers(Members):
    """Of one group of processes on CPUs, all in one host. Lanes are threads."""

    def __init__(self, group: Any, lanes: int = 2, timeout_s: float = 60.0) -> None:
        super().__init__(group, lanes)
        self.timeout_s = timeout_s
        self._queues: list[queue.Queue[Callable[[], None]]] = [queue.Queue() for _ in range(lanes)]
        self._fault: BaseException | None = None
        for i in range(lanes):
            threading.Thread(target=self._serve, args=(i,), daemon=True, name=f"gather-{i}").start()

    def window(self, size: int) -> Window:
        made = _HostWindow(self, size)
        self._windows.add(made)
        return made

    def fork(self) -> None:
        """What the caller has done is done."""

    def run(self, lane: int, work: Callable[[], None]) -> None:
        self._queues[lane].put(work)

    def join(self) -> None:
        for waiting in self._queues:
            waiting.join()
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def give_up(self) -> None:
        """Lanes give up by themselves after ``timeout_s``."""

    def _serve(self, lane: int) -> None:
        while True:
            work = self._queues[lane].get()
            try:
                work()
            except BaseException as fault:  # raised where the caller joins
                self._fault = fault
            finally:
                self._queues[lane].task_done()


class _HostWindow(Window):
    def __init__(self, members: HostMembers, size: int) -> None:
        super().__init__(members.rank, members.size)
        self.timeout_s = members.timeout_s
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.NamedTemporaryFile(prefix="gem-gather-", dir=folder) as file:
            file.truncate(HEAD + size)
            names: list[str] = [""] * self.size
            dist.all_gather_object(names, file.name, group=members.group)
            buffers = [torch.from_file(name, shared=True, size=HEAD + size, dtype=torch.uint8) for name in names]
            _meet(members.group, torch.device("cpu"))  # before the file loses its name
        self.memory, self.peers = buffers[self.rank][HEAD:], [b[HEAD:] for b in buffers]
        self._flags = [b[:HEAD].view(torch.int32).numpy() for b in buffers]

    def _signal(self, peer: int, flag: int, value: int) -> None:
        self._flags[peer][flag] = value

    def _wait(self, flag: int, value: int) -> None:
        mine, until = self._flags[self.rank], time.monotonic() + self.timeout_s
        while mine[flag] < value:
            if time.monotonic() > until:
                what = ("publish its memory", "read from this one's memory")[flag // self.size] if flag < 2 * self.size else "send its part"
                raise DeviceError(f"member {flag % self.size} of the host did not {what} within {self.timeout_s:.0f} s")
            time.sleep(0)


def _meet(group: Any, device: torch.device) -> None:
    """A barrier; on CUDA the host waits as well."""
    word = torch.zeros(1, device=device)
    dist.all_reduce(word, group=group)
    word.item()


def timeout_of(group: Any) -> timedelta:
    """Of the group's collectives."""
    backend = "cuda" if "nccl" in dist.get_backend_config(group) else "cpu"
    found: timedelta = group._get_backend(torch.device(backend)).options._timeout
    return found
