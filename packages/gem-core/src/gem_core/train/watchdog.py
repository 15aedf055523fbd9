"""Turns a hang, or the loss of a process, into a message: which rank, in which collective, after which step, with the stacks.

Every process tells the others once a second, through the store of the process group, that it lives and what its main thread is doing. One
that makes no progress for ``timeout_s``, one whose neighbour falls silent and one that fails raise an alarm; whoever hears an alarm prints
it with its own stacks and ends, because a main thread that waits in a collective cannot be woken otherwise. Stacks, and what the flight
recorder of torch.distributed knows of the last collectives, are left in the run folder. While one process gets on, those that are at the
same thing may wait for it: a checkpoint takes as long as its slowest writer.

A process that is alone tells nobody and is never ended: after ``timeout_s`` without progress it prints its stacks, once a standstill.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gem_core.errors import GemError, PeerError

SILENT_S = 60.0
"""A process that gives no sign for so long (or for the timeout, if that is shorter) is lost."""

GRACE_S = 5.0
"""How long a main thread has to end by itself after an alarm."""

_RUNS = itertools.count()
"""All processes go through the same runs in the same order; an alarm belongs to one of them."""


class Watchdog:
    """Context manager around a run of several processes.

    :param timeout_s: seconds without progress that count as a hang.
    :param folder: the run folder; stacks are written there too.
    """

    def __init__(self, rank: int, world: int, timeout_s: float, folder: Path) -> None:
        self.rank, self.world, self.timeout_s, self.folder = rank, world, timeout_s, folder
        self.interval = min(1.0, timeout_s / 10)
        self.silent_s = min(SILENT_S, timeout_s)
        self.step, self.phase = 0, "start"
        self._moved = time.monotonic()
        self._beats, self._state = 0, "runs"
        self._main = threading.main_thread().ident
        self._seen: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self.world > 1 and "MASTER_ADDR" in os.environ:
            # Connections of its own: those of the process group may be held by a call that waits.
            runs = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), next(_RUNS)
            self._store = PrefixStore("gem-watchdog-{}-{}".format(*runs), self._connect())
            self._beat()
        elif self.world > 1:
            return self
        self._thread = threading.Thread(target=self._watch if self.world > 1 else self._look, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is None:
            return
        self._state = "done" if error is None else "failed"
        self._ended.set()  # this process ends by itself; only those that wait in a collective must be ended
        if self.world == 1:
            self._thread.join()
            return
        if error is not None and not isinstance(error, PeerError):
            what = error.what if isinstance(error, GemError) else f"{type(error).__name__}: {error}"
            self._quietly(self._alarm, f"rank {self.rank} failed in step {self.step} ({self.phase}): {what}")
        self._quietly(self._beat)
        self._thread.join()

    def note(self, step: int, phase: str) -> None:
        """What the main thread is about to do."""
        self.step, self.phase = step, phase
        self.progress()

    def progress(self) -> None:
        """The main thread has got on."""
        self._moved = time.monotonic()

    def explain(self, error: BaseException) -> PeerError:
        """What a collective that failed here means: waits a few seconds for the others to say, or for one to be silent."""
        where = f"rank {self.rank} of {self.world}, step {self.step} ({self.phase}), in {doing(error.__traceback__)}"
        cause = ""
        until = time.monotonic() + min(max(4 * self.interval, 1.0), self.timeout_s)
        before = self._scan()
        while self._thread is not None and not cause and time.monotonic() < until:
            time.sleep(self.interval / 2)
            with contextlib.suppress(dist.DistError, RuntimeError):  # the store may have gone with the process that is lost
                cause = self._alarmed() or ""
        if not cause and self._thread is not None:
            now = self._scan()
            lost = [r for r in range(self.world) if r != self.rank and now.get(r, {}).get("beats") == before.get(r, {}).get("beats")]
            lost = [r for r in lost if now.get(r, {}).get("state", "runs") == "runs"]
            cause = "; ".join(_silent(r, now.get(r)) for r in lost)
            if cause:
                self._quietly(self._alarm, cause)
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return PeerError(
            (cause or "the connection to another process is lost") + f"; here: {first}",
            where=where,
            fix="look at what the rank named above said last; then resume from the last checkpoint (--resume), on any number of processes",
        )

    # In the thread

    def _look(self) -> None:
        told = -1.0
        while not self._ended.wait(self.interval):
            moved = self._moved
            stuck = time.monotonic() - moved
            if stuck > self.timeout_s and moved != told:
                told = moved
                frame = sys._current_frames().get(self._main or 0)
                at = f"in step {self.step} ({self.phase}), in {doing(frame)}"
                self._tell(f"no progress for {stuck:.0f} s (parallel.timeout_s = {self.timeout_s:g}) {at}; the run goes on")

    def _watch(self) -> None:
        watched = (self.rank + 1) % self.world
        while not self._ended.wait(self.interval):
            try:
                self._beat()
                alarm = self._alarmed()
                stuck = time.monotonic() - self._moved
                if alarm is None and stuck > self.timeout_s and self._state == "runs":
                    beats = self._scan()
                    alarm = None if self._others_move(beats) else self._alarm(self._hang(stuck, beats))
                if alarm is None and (lost := self._lost(watched)):
                    alarm = self._alarm(lost)
            except (dist.DistError, RuntimeError) as error:
                if self._ended.is_set():
                    return
                alarm = f"the store of the process group is gone ({str(error).splitlines()[0]}): rank 0 or the launcher has ended"
            if alarm is not None:
                self._end(alarm)

    def _end(self, alarm: str) -> None:
        if self._ended.wait(GRACE_S):
            return
        self._tell(f"rank {self.rank} of {self.world} ends: {alarm}")
        # In a thread, since what hangs may hold the locks that the record needs.
        writer = threading.Thread(target=self._keep_record, daemon=True)
        writer.start()
        writer.join(GRACE_S)
        os._exit(1)

    def _keep_record(self) -> None:
        record = flight_record()
        if record and self.folder.is_dir():
            with contextlib.suppress(OSError):
                (self.folder / f"flight-rank-{self.rank}.json").write_bytes(record)

    def _tell(self, what: str) -> None:
        """Print and keep ``what`` and the stacks of all threads."""
        head = f"\n{what}\nstacks of rank {self.rank}:\n"
        out = sys.__stderr__ or sys.stderr
        with contextlib.suppress(OSError):
            out.write(head)
            out.flush()
            faulthandler.dump_traceback(out, all_threads=True)
        if self.folder.is_dir():
            with contextlib.suppress(OSError), open(self.folder / f"hang-rank-{self.rank}.txt", "w") as file:
                file.write(head)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

    def _beat(self) -> None:
        self._beats += 1
        frame = sys._current_frames().get(self._main or 0)
        record = {
            "beats": self._beats, "state": self._state, "step": self.step, "phase": self.phase, "doing": doing(frame),
            "for_s": round(time.monotonic() - self._moved, 1),
        }  # fmt: skip
        self._store.set(f"beat-{self.rank}", json.dumps(record))

    def _lost(self, rank: int) -> str | None:
        record, now = self._read(rank), time.monotonic()
        beats = -1 if record is None else record["beats"]
        seen, since = self._seen.get(rank, (-2, now))
        if beats != seen:
            self._seen[rank] = beats, now
            return None
        if now - since < self.silent_s or (record is not None and record["state"] != "runs"):
            return None
        return _silent(rank, record, now - since)

    def _others_move(self, beats: Mapping[int, Mapping[str, Any]]) -> bool:
        """Whether a process that is at what this one is at has got on within the timeout."""
        here = "runs", self.step, self.phase
        there = (b for rank, b in beats.items() if rank != self.rank and (b["state"], b["step"], b["phase"]) == here)
        return any(b["for_s"] <= self.timeout_s for b in there)

    def _hang(self, stuck: float, beats: Mapping[int, Mapping[str, Any]]) -> str:
        lines = [f"no progress for {stuck:.0f} s on rank {self.rank} (parallel.timeout_s = {self.timeout_s:g}); the ranks:"]
        steps = [b["step"] for b in beats.values()]
        for rank in range(self.world):
            b = beats.get(rank)
            if b is None:
                lines.append(f"  rank {rank}: has never given a sign")
                continue
            behind = "  <- behind the others" if steps and b["step"] < max(steps) else ""
            lines.append(f"  rank {rank}: step {b['step']} ({b['phase']}), for {b['for_s']:.0f} s in {b['doing']}{behind}")
        return "\n".join(lines)

    # The store

    def _connect(self) -> Any:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=max(5.0, self.silent_s)))

    def _alarm(self, text: str) -> str:
        """Raise an alarm unless there is one; returns the one that counts."""
        return str(self._store.compare_set("alarm", "", text).decode())

    def _alarmed(self) -> str | None:
        return str(self._store.get("alarm").decode()) if self._store.check(["alarm"]) else None

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = f"beat-{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _scan(self) -> dict[int, dict[str, Any]]:
        try:
            found = {rank: self._read(rank) for rank in range(self.world)} if self._thread is not None else {}
        except (dist.DistError, RuntimeError):
            return {}
        return {rank: record for rank, record in found.items() if record is not None}

    def _quietly(self, action: Any, *arguments: Any) -> None:
        """For signs that are given while the store may be gone already."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            action(*arguments)


def keep_flight_record() -> None:
    """Have torch.distributed remember its last collectives, unless the environment says how many; call before joining a group."""
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"


def flight_record() -> bytes | None:
    """The last collectives of this process as JSON: kind, sizes, state, times. None where torch.distributed keeps no record."""
    native = getattr(torch._C, "_distributed_c10d", None)
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with contextlib.suppress(RuntimeError):
            found = getattr(native, name)() if hasattr(native, name) else None
            if found and json.loads(found).get("entries"):
                return bytes(found) if isinstance(found, bytes) else str(found).encode()
    return None


def lost_contact(error: BaseException) -> bool:
    """Whether an exception is a collective's failure and not this process's own."""
    if isinstance(error, dist.DistError):
        return True
    signs = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and not isinstance(error, GemError) and any(sign in str(error) for sign in signs)


def doing(stack: FrameType | TracebackType | None) -> str:
    """The collective in which a stack ends, and the line that called it; elsewhere the innermost function."""
    frames: list[FrameType] = []
    if isinstance(stack, TracebackType):
        trace: TracebackType | None = stack
        while trace is not None:
            frames.insert(0, trace.tb_frame)
            trace = trace.tb_next
    else:
        frame = stack
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    if not frames:
        return "unknown code"
    collectives = [i for i, f in enumerate(frames) if f.f_code.co_filename.endswith("distributed_c10d.py")]
    if not collectives:
        return _line(frames[0])
    names = [frames[i].f_code.co_name for i in collectives if frames[i].f_code.co_name != "wrapper"]
    outside = next((f for f in frames[collectives[-1] + 1 :] if f"{os.sep}torch{os.sep}" not in f.f_code.co_filename), frames[-1])
    return f"{names[-1] if names else 'a collective'}, called at {_line(outside)}"


def _line(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({path.parent.name}/{path.name}:{frame.f_lineno})"


def _silent(rank: int, record: dict[str, Any] | None, seconds: float | None = None) -> str:
    last = "" if record is None else f"; its last sign was of step {record['step']} ({record['phase']}), in {record['doing']}"
    for_s = "" if seconds is None else f" for {seconds:.0f} s"
    return f"rank {rank} gives no sign of life{for_s}: its process has ended or stands still{last}"
