"""All-gathers by copies out of peers' memory: no kernel but what the caller writes its own part with.

Every member writes its part where it belongs in its own result, publishes it, and pulls the other parts from the results of the others,
each on several lanes at once. Results take turns in ``slots`` windows, so that a member may fill the next one while others still read.

Across hosts (`HierarchicalGather`) the members of equal place in their hosts exchange their parts by point-to-point messages (NCCL), chunk
by chunk; a host's members pull each chunk from one another as soon as it is there, while the next one travels.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.errors import RunError
from gem_core.train.collective import GatherOptions, Source
from gem_parallel.collectives.members import CudaMembers, HostMembers, Members, Window, timeout_of
from gem_parallel.collectives.pushed_mean import PushedMean

PIECE = 1 << 20
"""Bytes below which a part is not cut for several lanes."""
CHUNK = 16 << 20
"""Bytes of a part that travel between hosts at a time."""
ALIGN = 512

_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def members_of(group: Any, options: GatherOptions) -> Members:
    return CudaMembers(group, options.device) if options.device.type == "cuda" else HostMembers(group, timeout_s=options.timeout_s)


class CopyEngineGather:
    """Over the members of one host."""

    def __init__(self, group: Any, options: GatherOptions) -> None:
        self.group, self.options, self.size = group, options, group.size()
        self.members = self._members()
        self.ring = Ring(self.members, options)
        self._mean: PushedMean | None = None

    def _members(self) -> Members:
        return members_of(self.group, self.options)

    def allocate(self, size: int, dtype: torch.dtype) -> Tensor:
        return self.ring.take(size, dtype)

    def gather(self, out: Tensor) -> None:
        window, whole = self.ring.window_of(out), flat(out)
        part = whole.numel() // self.size
        self.members.fork()
        window.publish()
        pull(self.members, window, [(p, whole[p * part : (p + 1) * part], p * part) for p in window.others()])
        self.members.join()
        window.done()

    def source(self, size: int) -> Source:
        return CopyEngineSource(self.members, size, self.options.ctas)

    def mean(self, out: Tensor, whole: Tensor) -> None:
        if self._mean is None:
            # lanes of its own: a gather and a mean may be under way at once
            self._mean = PushedMean(self._members(), sms=self.options.ctas)
        self._mean(out, whole)

    @property
    def outside_bytes(self) -> int:
        """Of device memory that CUDA's allocator does not count."""
        return self.members.bytes + (0 if self._mean is None else self._mean.members.bytes)

    def give_up(self) -> None:
        """See `Members.give_up`."""
        self.members.give_up()

    def describe(self) -> str:
        kind = "copy engine" if self.options.device.type == "cuda" else "shared memory"
        return f"{kind}, {self.size} members of one host, {self.options.slots} results in turn"


class CopyEngineSource:
    """Memory that the members of one host pull from. A member's own part is copied by at most ``sms`` SMs, beside what the lanes pull."""

    def __init__(self, members: Members, size: int, sms: int = 16) -> None:
        self.members, self.window, self.sms = members, members.window(size), sms
        self.memory = self.window.memory
        self.memory.zero_()

    def reclaim(self) -> None:
        self.window.reclaim()

    def gather(self, moves: Sequence[tuple[Tensor, int]]) -> None:
        window, rank, size = self.window, self.members.rank, self.members.size
        self.members.fork()
        window.publish()
        wanted, own = [], []
        for out, at in moves:
            whole = flat(out)
            part = whole.numel() // size
            own.append((whole[rank * part : (rank + 1) * part], self.memory[at : at + part]))
            wanted += [(p, whole[p * part : (p + 1) * part], at) for p in window.others()]
        pull(self.members, window, wanted)
        for target, stored in own:
            self.members.copy(stored, target, self.sms)
        self.members.join()
        window.done()


class HierarchicalGather(CopyEngineGather):
    """Over several hosts with equally many members, which follow one another in the group."""

    def __init__(self, group: Any, options: GatherOptions, chunk: int = CHUNK) -> None:
        mates, hosts = options.topology.mates, options.topology.hosts
        assert mates is not None
        self.mates, self.hosts, self.chunk = mates, len(set(hosts)), chunk
        ranks = dist.get_process_group_ranks(group)
        at = group.rank()
        self.host, self.place = at // mates, at % mates
        # Every process makes its own two groups only: the others of the world may not take part in this group.
        made = partial(dist.new_group, timeout=timeout_of(group), use_local_synchronization=True)
        self.inside = made(ranks[self.host * mates : (self.host + 1) * mates])
        self.between = made(ranks[self.place :: mates])
        self.peers = ranks[self.place :: mates]
        super().__init__(group, options)

    def _members(self) -> Members:
        return members_of(self.inside, self.options)

    def gather(self, out: Tensor) -> None:
        window, whole = self.ring.window_of(out), flat(out)
        part = whole.numel() // self.size
        self.members.fork()
        for a in range(0, part, self.chunk):
            b = min(part, a + self.chunk)
            starts = [(h * self.mates + self.place) * part for h in range(self.hosts)]
            self._exchange([whole[at + a : at + b] for at in starts])
            window.publish()
            places = [(mate, (h * self.mates + mate) * part) for h in range(self.hosts) for mate in window.others()]
            pull(self.members, window, [(mate, whole[at + a : at + b], at + a) for mate, at in places])
        self.members.join()
        window.done()

    def _exchange(self, parts: list[Tensor]) -> None:
        """This host's part to all others, theirs in exchange."""
        if self.hosts == 1:
            return
        mine = parts[self.host]
        ops = [dist.P2POp(dist.isend, mine, peer, group=self.between) for h, peer in enumerate(self.peers) if h != self.host]
        ops += [dist.P2POp(dist.irecv, parts[h], peer, group=self.between) for h, peer in enumerate(self.peers) if h != self.host]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def mean(self, out: Tensor, whole: Tensor) -> None:
        """By the process group: sums are not the copy engine's business, and between hosts they are best made on the way."""
        group_mean(out, whole, self.group)

    def source(self, size: int) -> Source:
        return HierarchicalSource(self, size)

    def describe(self) -> str:
        return f"{self.hosts} hosts of {self.mates}: copy engine inside, messages between, {self.chunk >> 20} MiB at a time"


class HierarchicalSource:
    """A plain buffer here; what the hosts send goes through a result of the gatherer, out of which the mates pull."""

    def __init__(self, gatherer: HierarchicalGather, size: int) -> None:
        self.gatherer, device = gatherer, gatherer.options.device
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)

    def reclaim(self) -> None:
        """Others read copies of it."""

    def gather(self, moves: Sequence[tuple[Tensor, int]]) -> None:
        g, at_rank = self.gatherer, self.gatherer.group.rank()
        for out, at in moves:
            part = out.numel() * out.itemsize // g.size
            result = g.allocate(part * g.size, torch.uint8)
            result[at_rank * part : (at_rank + 1) * part].copy_(self.memory[at : at + part])
            g.gather(result)
            flat(out).copy_(result)


class Turned(Protocol):
    """What results take turns in: ``memory`` (uint8), and to wait in the current stream until no other member reads it."""

    memory: Tensor

    def reclaim(self) -> None: ...


Kind = TypeVar("Kind", bound=Turned)
Made = TypeVar("Made", bound=Turned, covariant=True)


class _Makes(Protocol[Made]):
    def window(self, size: int) -> Made: ...


@dataclass
class PlainWindow:
    """Memory that no other member reads but in a collective."""

    memory: Tensor

    def reclaim(self) -> None:
        """Nobody does."""


class Ring(Generic[Kind]):
    """Windows that results take turns in."""

    def __init__(self, members: _Makes[Kind], options: GatherOptions) -> None:
        self.members, self.options = members, options
        self.windows: list[Kind] = []
        self._held: list[weakref.ref[Tensor] | None] = []
        self._freed: list[Any] = []
        self._turn, self._room = -1, 0

    def window_of(self, result: Tensor) -> Kind:
        """The window of the last result, which is the one that is to be gathered."""
        window = self.windows[self._turn]
        assert not result.numel() or result.data_ptr() == window.memory.data_ptr()
        return window

    def take(self, size: int, dtype: torch.dtype) -> Tensor:
        """The next result; the current stream waits until nobody reads its memory any more."""
        if size * dtype.itemsize > self._room or not self.windows:
            self._grow(size * dtype.itemsize)
        self._turn = turn = (self._turn + 1) % len(self.windows)
        held = self._held[turn]
        if held is not None and held() is not None:
            raise RunError(
                f"{len(self.windows)} gathered results are in use at once, and one more is asked for",
                fix="raise the number of slots of the copy engine, or let go of a result earlier",
            )
        event = self._freed[turn]
        if event is not None:
            torch.cuda.current_stream(self.options.device).wait_event(event)
        window = self.windows[turn]
        window.reclaim()
        result = window.memory[: size * dtype.itemsize].view(dtype)
        self._held[turn] = weakref.ref(result)
        weakref.finalize(result, self._free, turn, self._freed).atexit = False
        return result

    def _free(self, turn: int, freed: list[Any]) -> None:
        """Readers of a result have been queued on the stream on which it is let go of."""
        if self.options.device.type == "cuda":
            freed[turn] = torch.cuda.current_stream(self.options.device).record_event()

    def _grow(self, size: int) -> None:
        if self.options.device.type == "cuda":
            torch.cuda.synchronize(self.options.device)
        self._room = -(-max(size, self._room) // ALIGN) * ALIGN
        # `window` meets all members, each with nothing left to do, so that nobody reads the old ones any more.
        self.windows = [self.members.window(self._room) for _ in range(self.options.slots)]
        self._held, self._freed, self._turn = [None] * len(self.windows), [None] * len(self.windows), -1


def pull(members: Members, window: Window, wanted: Iterable[tuple[int, Tensor, int]]) -> None:
    """Queue copies of ``(member, target, offset)`` out of the members' memory on the lanes, behind what they have published as often as
    this one."""
    count, lane = window.published, 0
    spread = max(1, members.lanes // max(1, members.size - 1))
    for peer, target, at in wanted:
        size = target.numel()
        step = max(PIECE, -(-size // spread)) if size else 1
        for a in range(0, size, step):
            b = min(size, a + step)
            members.run(lane % members.lanes, partial(_copy, window, peer, count, target[a:b], at + a))
            lane += 1


def _copy(window: Window, peer: int, count: int, target: Tensor, at: int) -> None:
    window.ready(peer, count)
    target.copy_(window.peers[peer][at : at + target.numel()], non_blocking=True)


def group_mean(out: Tensor, whole: Tensor, group: Any) -> None:
    """Reduce-scatter of a mean by the process group."""
    if whole.is_cuda:
        _reduce_scatter(out, whole, op=dist.ReduceOp.AVG, group=group)
    else:
        _reduce_scatter(out, whole, group=group)
        out.div_(group.size())


def flat(tensor: Tensor) -> Tensor:
    """Its bytes."""
    return tensor.view(-1).view(torch.uint8)
