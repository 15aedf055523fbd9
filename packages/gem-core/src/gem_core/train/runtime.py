"""The process among its peers: rank, device, and the few collectives that the trainer itself needs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gem_core.config.schema import Config
from gem_core.errors import DeviceError, GemError, PeerError, RunError
from gem_core.train.watchdog import keep_flight_record

T = TypeVar("T")


class OnItsWay:
    """A tensor on its way to the host, which goes on meanwhile."""

    def __init__(self, sent: Tensor) -> None:
        self._tensor, self._event = sent, None
        if sent.is_cuda:
            self._tensor = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=True)
            self._tensor.copy_(sent, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def received(self) -> Tensor:
        """The tensor in the host's memory, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


@dataclass(frozen=True)
class Runtime:
    """This process. All collectives are no-ops in a world of one."""

    device: torch.device
    rank: int = 0
    world: int = 1
    progress: Callable[[], None] = lambda: None
    """Tells the watchdog of the run that this process gets on."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        """Largest over ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def count(self, flags: Sequence[bool]) -> list[int]:
        """How many ranks have each flag set. A host exchange, which no device waits for."""
        counts = torch.tensor(flags, dtype=torch.int32)
        if self.world > 1:
            dist.all_reduce(counts)
        return [int(n) for n in counts]

    def numbers(self, own: float) -> list[float]:
        """Every rank's number. A host exchange, which no device waits for."""
        found = torch.zeros(self.world, dtype=torch.float64)
        found[self.rank] = own
        if self.world > 1:
            dist.all_reduce(found)
        return [float(x) for x in found]

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor in rank order; the first dimension may differ between ranks. Reads the sizes on the host."""
        if self.world == 1:
            return [tensor]
        size = torch.tensor([tensor.shape[0]], device=tensor.device)
        sizes = [torch.empty_like(size) for _ in range(self.world)]
        dist.all_gather(sizes, size)
        counts = [int(n) for n in torch.cat(sizes).tolist()]
        padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
        padded[: tensor.shape[0]] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(parts, padded)
        return [part[:n] for part, n in zip(parts, counts)]

    def gather_others(self, tensor: Tensor) -> list[Tensor]:
        """`all_gather` without this rank's own tensor."""
        return [part for rank, part in enumerate(self.all_gather(tensor)) if rank != self.rank]

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's value in rank order; values travel pickled between the processes of this run."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def on_main(self, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
        """Rank 0's result on every rank; if ``action`` fails there with a GemError, every rank raises it. ``group``: of all ranks, to
        use instead of the default one."""
        if self.world == 1:
            return action()
        shared: list[Any] = [None]
        if self.main:
            try:
                shared = [(action(), None)]
            except GemError as error:
                shared = [(None, error)]
        dist.broadcast_object_list(shared, 0, group=group)
        result, failure = shared[0]
        if failure is not None:
            raise failure
        done: T = result
        return done


@contextmanager
def runtime(config: Config) -> Iterator[Runtime]:
    """Choose the device and, under torchrun, join the process group; leaves it again unless the caller had joined before.

    :raises DeviceError: a CUDA device was asked for where there is none for this process.
    :raises RunError: the environment tells of several processes and not how they meet, or they cannot.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = choose_device(config.run.device, local)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joined = not dist.is_initialized() and _join(device, config.parallel.timeout_s)
    try:
        if dist.is_initialized():
            yield Runtime(device, dist.get_rank(), dist.get_world_size())
        else:
            yield Runtime(device)
    except PeerError:
        joined = False  # leaving needs the others
        raise
    finally:
        if joined:
            leave_group()


def _join(device: torch.device, timeout_s: float) -> bool:
    """Join the group of which the launcher's environment tells; False where it tells of none. A single process joins too: there are
    strategies that need a group, of whatever size."""
    missing = [name for name in ("RANK", "MASTER_ADDR") if name not in os.environ]
    world = os.environ.get("WORLD_SIZE", "1")
    fix = "start all processes by torchrun, as in: torchrun --no-python --nproc-per-node 4 gemrec train my.toml"
    if missing:
        if world != "1":  # each would train alone, and all write to one folder
            raise RunError(f"WORLD_SIZE is {world}, and {', '.join(missing)} is not set", where="the environment", fix=fix)
        return False
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    keep_flight_record()
    try:
        # Later than the watchdog, which has more to say.
        dist.init_process_group(backend, timeout=timedelta(seconds=1.5 * timeout_s + 10), **_own_store())
    except (ValueError, RuntimeError) as error:
        where = f"rank {os.environ['RANK']} of {world}, MASTER_ADDR {os.environ['MASTER_ADDR']}"
        raise RunError(f"the processes cannot meet: {str(error).splitlines()[0]}", where=where, fix=fix) from error
    return True


def _own_store() -> dict[str, Any]:
    """Under torchrun: a part of its store for this attempt alone. Its launcher keeps one store over all attempts, so that a process would
    find the addresses that those of the attempt before have left there."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    attempt = f"gem-attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-of-{world}"
    return {"store": PrefixStore(attempt, store), "rank": rank, "world_size": world}


def leave_group() -> None:
    """Leave the process group. Gloo's worker threads need the interpreter's lock to drop the tensors of the last collective, and the
    destructor of a group joins them while it holds that lock: they are given time to end first."""
    time.sleep(0.05)
    dist.destroy_process_group()


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    """ "auto": the local rank's CUDA device where there is one, else the CPU."""
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return torch.device("cpu")
    if local_rank >= count:
        raise DeviceError(
            f"this process is the {local_rank + 1}. on this machine, which has {count} usable CUDA devices"
            if count
            else "this machine has no usable CUDA device",
            where="run.device",
            fix=f'{"start fewer processes, or " if count else ""}set run.device = "cpu"; `gemrec doctor` tells why a device is not usable',
        )
    return torch.device("cuda", local_rank)
