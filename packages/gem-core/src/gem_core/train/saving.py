"""Writing checkpoints from all ranks, while training stands still or behind its back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.errors import CheckpointError, GemError
from gem_core.model.contract import Shards
from gem_core.train.checkpoint import SHARDED, CheckpointStore
from gem_core.train.runtime import Runtime
from gem_core.train.shards import State, shards_of, spread

Parts = Mapping[str, Mapping[str, State]]

LOOK_S = 1.0
"""How often a process that waits for the end of its background save looks whether that gets on."""


class Saver:
    """Saves through a `CheckpointStore`. All methods are called by all ranks alike.

    ``background``: a save copies the state to host memory that is kept from save to save (pinned for a CUDA device) and returns; the
    writing goes on in a thread, and the next save waits for it.

    However long a save takes, the watchdog hears of progress while something is written and the main thread waits for it.
    """

    def __init__(self, store: CheckpointStore, runtime: Runtime, *, background: bool = False) -> None:
        self.store, self.runtime, self.background = store, runtime, background
        self._running: threading.Thread | None = None
        self._result: Path | BaseException | None = None
        self._copies: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}
        self._preparing: threading.Thread | None = None
        self._pieces = 0
        # The thread's collectives must not mix with those of training. They wait for the slowest disk: the watchdog tells a hang from that.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=7)) if runtime.world > 1 else None

    def save(self, step: int, *, meta: Mapping[str, Any], parts: Parts, shared: Any, ranks: Sequence[Any]) -> Path | None:
        """Write the checkpoint of ``step``; returns its path, or None if it is still being written (`finished` gives it later).

        :raises CheckpointError: it, or the one before it, could not be written.
        """
        self.wait()
        sharded, held = self._held(parts)
        if self.background:
            held = self._on_host(held)
        record = {"meta": meta, "shared": shared, "ranks": ranks}

        def write() -> Path:
            return self._sharded(step, held, record) if sharded else self._whole(step, held, record)

        if not self.background:
            return write()
        self._running = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._running.start()
        return None

    def prepare(self, parts: Parts) -> None:
        """With ``background``: get the memory for the copies of ``parts`` in a thread. Pinning it takes seconds, which the first save
        would otherwise keep training waiting for."""
        if self.background and self.runtime.device.type == "cuda":
            _, held = self._held(parts)
            self._preparing = threading.Thread(target=self._allocate, args=(held, self._preparing), name="checkpoint memory", daemon=True)
            self._preparing.start()

    def settle(self, patience_s: float | None = None) -> bool:
        """Let a background save end, whatever comes of it: for a run that fails while its last checkpoint is being written. False: it has
        not after ``patience_s``, as when it waits for a process that is lost."""
        if self._running is None:
            return True
        self._running.join(patience_s)
        return not self._running.is_alive()

    def afterwards(self, action: Callable[[], None]) -> None:
        """Do something when the background save under way has ended, in a thread; if this process ends before, it is not done."""
        running = self._running
        assert running is not None

        def wait() -> None:
            running.join()
            action()

        threading.Thread(target=wait, name="after the checkpoint", daemon=True).start()

    def finished(self) -> Path | None:
        """The path of a background save that has ended since the last call, once.

        :raises CheckpointError: it failed.
        """
        if self._running is None or self._running.is_alive():
            return None
        self._running = None
        result, self._result = self._result, None
        if isinstance(result, Path):
            return result
        assert result is not None
        if isinstance(result, GemError):
            raise result
        what = f"a checkpoint could not be written in the background: {type(result).__name__}: {result}"
        raise CheckpointError(what, fix="resume from the one before; train.checkpoint_async = false writes in the foreground") from result

    def wait(self) -> Path | None:
        """`finished`, after waiting for the end."""
        seen = -1
        while self._running is not None and self._running.is_alive():
            if self._pieces != seen:
                seen = self._pieces
                self.runtime.progress()
            self._running.join(LOOK_S)
        return self.finished()

    def _wrote(self) -> None:
        """A piece was written: by the main thread, or by one of whose progress only those hear who wait for it."""
        self._pieces += 1
        if not self.background:
            self.runtime.progress()

    def _held(self, parts: Parts) -> tuple[bool, dict[str, dict[str, Shards]]]:
        """Whether the state is spread over the ranks, and what this rank writes of it."""
        sharded = self.runtime.world > 1 and any(spread(state) for states in parts.values() for state in states.values())
        mine = parts if sharded or self.runtime.main else {}
        return sharded, {part: {n: shards_of(s) for n, s in states.items()} for part, states in mine.items()}

    def _allocate(self, held: Mapping[str, Mapping[str, Shards]], after: threading.Thread | None = None) -> None:
        if after is not None:
            after.join()
        for part, states in held.items():
            for name, shards in states.items():
                for at, tensor in shards.parts:
                    known = self._copies.get((part, name, at))
                    if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
                        self._copies[part, name, at] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def _on_host(self, held: Mapping[str, Mapping[str, Shards]]) -> dict[str, dict[str, Shards]]:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        self._allocate(held)

        def copied(part: str, name: str, shards: Shards) -> Shards:
            pairs = [(at, self._copies[part, name, at].copy_(tensor.detach(), non_blocking=True)) for at, tensor in shards.parts]
            return replace(shards, parts=tuple(pairs))

        there = {part: {n: copied(part, n, s) for n, s in states.items()} for part, states in held.items()}
        if self.runtime.device.type == "cuda":
            torch.cuda.current_stream(self.runtime.device).synchronize()
        return there

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self._result = write()
        except BaseException as error:
            self._result = error

    def _whole(self, step: int, held: Mapping[str, Mapping[str, Shards]], record: Mapping[str, Any]) -> Path:
        whole = {part: {n: s.parts[0][1] for n, s in states.items()} for part, states in held.items()}
        return self._on_main(lambda: self.store.save(step, parts=whole, progress=self._wrote, **record))

    def _sharded(self, step: int, held: Mapping[str, Mapping[str, Shards]], record: Mapping[str, Any]) -> Path:
        from gem_core.train import storage

        folder = self._on_main(lambda: self.store.begin(step))
        files = storage.write(folder, held, self.runtime.rank, self._group, self._wrote)
        meta = {**record["meta"], "format": SHARDED}
        return self._on_main(lambda: self.store.publish(step, folder, files=files, **{**record, "meta": meta}))

    def _on_main(self, action: Callable[[], Path]) -> Path:
        return self.runtime.on_main(action, self._group)
