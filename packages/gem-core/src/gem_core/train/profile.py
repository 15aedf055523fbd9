"""Profiles a few steps: a trace to open in a viewer, and a summary to read: top kernels, exposed communication, idle device."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from gem_core.train.contract import Callback, RunInfo

Interval = tuple[float, float]

COMMUNICATION = ("nccl", "gloo", "Memcpy PtoP")
"""Parts of the names of kernels, and of copies, that move data between ranks."""

KINDS = ("AllGather", "ReduceScatter", "AllReduce", "SendRecv", "Broadcast", "Memcpy PtoP")
"""Parts of names that tell one kind of communication from another; an all-to-all consists of sends and receives."""

ONE_SHAPE = 0.1
"""Kernels of one name count as the same work where their durations beside nothing differ by less than this share (standard deviation)."""


@dataclass(frozen=True)
class Event:
    """Something that ran from ``start`` to ``end`` (microseconds), on the device or on the host; ``own`` is its time without children."""

    name: str
    start: float
    end: float
    device: bool
    own: float


def summarise(events: Iterable[Event], steps: int, top: int = 40) -> dict[str, Any]:
    """What ``steps`` profiled steps of one rank spent their time on; all times in ms a step.

    ``busy_ms``: at least one kernel ran; ``idle_ms``: none did; ``communication_ms`` of kernels between ranks, ``exposed_ms`` of them while
    no other kernel ran; ``communication`` has both for every kind. ``contention``: how much longer other kernels take beside communication
    (see `contention`). ``top``: the kernels (on a CPU: the operators) with the most time of their own. Where nothing ran on a device the
    times of devices are None.
    """
    found = list(events)
    on_device = [e for e in found if e.device]
    ranked = on_device or found
    spent, calls = Counter[str](), Counter[str]()
    for e in ranked:
        spent[e.name] += e.end - e.start if e.device else e.own  # type: ignore[assignment]
        calls[e.name] += 1
    total = sum(spent.values()) or 1.0
    per = 1e3 * steps
    times = ("wall_ms", "busy_ms", "idle_ms", "communication_ms", "exposed_ms")
    result: dict[str, Any] = {"steps": steps, **dict.fromkeys(times)}
    if on_device:
        talking = union((e.start, e.end) for e in on_device if is_communication(e.name))
        working = union((e.start, e.end) for e in on_device if not is_communication(e.name))
        wall = max(e.end for e in found) - min(e.start for e in found)
        busy = length(union([*talking, *working]))
        result |= {
            "wall_ms": wall / per,
            "busy_ms": busy / per,
            "idle_ms": (wall - busy) / per,
            "communication_ms": length(talking) / per,
            "exposed_ms": (busy - length(working)) / per,
        }
        result["communication"] = [
            {"kind": kind, "ms": total / per, "exposed_ms": exposed / per} for kind, total, exposed in _kinds(on_device, working)
        ]
        result["contention"] = contention(on_device, talking, steps)
    result["top"] = [
        {"name": name, "calls": calls[name] / steps, "ms": time / per, "share": time / total} for name, time in spent.most_common(top)
    ]
    return result


def contention(on_device: Sequence[Event], talking: Sequence[Interval], steps: int) -> dict[str, float | None]:
    """What kernels lose to communication that runs beside them.

    ``beside_ms`` of other kernels that ran beside communication all the time; ``slowdown``: their time over what the same kernels took
    beside none, ``compared``: the share of ``beside_ms`` for which that is known: names that occur both ways and, beside none, always take
    about as long, so that they stand for one piece of work.
    """
    ends = [end for _, end in talking]
    beside: dict[str, list[float]] = {}
    alone: dict[str, list[float]] = {}
    for e in on_device:
        if is_communication(e.name) or e.end <= e.start:
            continue
        covered, i = 0.0, bisect_right(ends, e.start)
        while i < len(talking) and talking[i][0] < e.end:
            covered += min(e.end, talking[i][1]) - max(e.start, talking[i][0])
            i += 1
        share = covered / (e.end - e.start)
        if share > 0.95 or share < 0.05:
            (beside if share > 0.95 else alone).setdefault(e.name, []).append(e.end - e.start)
    total = sum(map(sum, beside.values()))
    slow = free = 0.0
    for name, times in beside.items():
        usual = alone.get(name, ())
        if len(usual) >= 2 and pstdev(usual) < ONE_SHAPE * fmean(usual):
            slow += sum(times)
            free += len(times) * fmean(usual)
    return {
        "beside_ms": total / (1e3 * steps),
        "slowdown": slow / free if free else None,
        "compared": slow / total if total else None,
    }


def _kinds(on_device: Sequence[Event], working: Sequence[Interval]) -> list[tuple[str, float, float]]:
    """(kind, time, time while nothing else than communication ran), the longest first."""
    kinds: dict[str, list[Interval]] = {}
    for e in on_device:
        if is_communication(e.name):
            kind = next((k for k in KINDS if k.lower() in e.name.lower()), "other")
            kinds.setdefault(kind, []).append((e.start, e.end))
    found = []
    for kind, intervals in kinds.items():
        own = union(intervals)
        found.append((kind, length(own), length(union([*own, *working])) - length(working)))
    return sorted(found, key=lambda row: -row[1])


def is_communication(name: str) -> bool:
    return any(word in name for word in COMMUNICATION)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def text(summary: Mapping[str, Any]) -> str:
    """The summary as aligned text."""
    lines = []
    if summary["busy_ms"] is not None:
        lines += [
            f"a step {summary['wall_ms']:.2f} ms: device busy {summary['busy_ms']:.2f}, idle {summary['idle_ms']:.2f}; "
            f"communication {summary['communication_ms']:.2f}, of it exposed {summary['exposed_ms']:.2f}",
        ]
        lines += [f"  {row['kind']}: {row['ms']:.2f}, exposed {row['exposed_ms']:.2f}" for row in summary["communication"]]
        lost = summary["contention"]
        if lost["slowdown"] is not None:
            lines.append(
                f"  kernels beside it take x{lost['slowdown']:.3f} ({lost['beside_ms']:.2f} ms of kernels, {lost['compared']:.0%} compared)"
            )
        lines.append("")
    lines.append(f"{'ms/step':>9} {'share':>6} {'calls':>7}  name")
    lines += [f"{row['ms']:9.3f} {row['share']:6.1%} {row['calls']:7.1f}  {row['name'][:110]}" for row in summary["top"]]
    if summary.get("origins"):
        lines += ["", f"{'ms/step':>9} {'':>6} {'launches':>8}  origin"]
        lines += [f"{row['ms']:9.3f} {'':>6} {row['launches']:8.1f}  {row['origin'][:110]}" for row in summary["origins"]]
    return "\n".join(lines) + "\n"


def events_of(recorded: profile) -> list[Event]:
    """Events of a finished profile."""
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return [
        Event(e.name, e.time_range.start, e.time_range.end, e.device_type == cuda, e.self_cpu_time_total)
        for e in recorded.events() or ()
        # ranges that the host names (record_function, NCCL's own) are told of the device as well, around the kernels in them
        if not e.name.startswith("ProfilerStep") and not (e.device_type == cuda and getattr(e, "is_user_annotation", False))
    ]


def origins(operators: Iterable[Any], steps: int, top: int = 40) -> list[dict[str, Any]]:
    """Where kernels are launched from, most launches first: ``launches`` and ``ms`` a step of each origin.

    An origin is the operator that launches, after the op of this package, optimizer or backward function that it is a part of.

    :param operators: the profiler's events, of which those with ``kernels`` count.
    """
    launches, spent = Counter[str](), Counter[str]()
    for operator in operators:
        kernels = getattr(operator, "kernels", None)
        if not kernels:
            continue
        name, inside, parent = operator.name, "", operator.cpu_parent
        while parent is not None:
            own = parent.name.removeprefix("autograd::engine::evaluate_function: ")
            if own != parent.name or own.startswith(("gem::", "Optimizer.")):
                inside = own
            parent = parent.cpu_parent
        origin = f"{inside} > {name}" if inside and inside != name else name
        launches[origin] += len(kernels)
        spent[origin] += sum(kernel.duration for kernel in kernels)
    return [{"origin": o, "launches": n / steps, "ms": spent[o] / (1e3 * steps)} for o, n in launches.most_common(top)]


def write(recorded: profile, folder: Path, steps: int, trace: bool = True) -> dict[str, Any]:
    """``summary.json``, ``summary.txt`` and ``trace.json.gz`` in ``folder``; returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarise(events_of(recorded), steps)
    summary["origins"] = origins(recorded.events() or (), steps)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / "summary.txt").write_text(text(summary))
    if trace:
        recorded.export_chrome_trace(str(folder / "trace.json.gz"))
    return summary


def activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


class Profiler(Callback):
    """Trainer callback: after ``skip`` steps profiles ``steps`` of them on every rank, into ``profile/rank-N`` of the run folder."""

    def __init__(self, skip: int = 10, steps: int = 5) -> None:
        self.skip, self.steps = skip, steps
        self.summary: dict[str, Any] | None = None
        self._profile: profile | None = None

    def on_start(self, run: RunInfo) -> None:
        def finished(recorded: profile) -> None:
            self.summary = write(recorded, run.directory / "profile" / f"rank-{run.rank}", self.steps)

        device = next(run.model.parameters()).device
        self._profile = profile(
            activities=activities(device),
            schedule=schedule(wait=max(0, self.skip - 1), warmup=1, active=self.steps, repeat=1),
            on_trace_ready=finished,
        )
        self._profile.start()

    def on_step(self, run: RunInfo, record: Mapping[str, Any] | None) -> None:
        if self._profile is not None:
            self._profile.step()
            if self.summary is not None:
                self._stop()

    def on_error(self, run: RunInfo, error: BaseException) -> None:
        self._stop()

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        self._stop()

    def told(self, directory: Path) -> str:
        """What the command prints at the end."""
        if self.summary is None:
            return f"nothing was profiled: the run had fewer than {self.skip + self.steps} steps"
        head = "\n".join(text(self.summary).splitlines()[:14])
        return f"{head}\ntrace and summary: {directory / 'profile'}"

    def _stop(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
