"""Where the time goes and how much of the device is used: phase times, throughput, model FLOPs utilisation.

``MFU = model FLOPs / (time x dense peak of the device in the run's precision)``: FLOPs of attended pairs and real tokens, without
recomputation, embeddings excluded.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gem_core.errors import RunError

PHASES = ("data", "forward", "backward", "optimizer")

PEAKS: dict[str, dict[str, float]] = {
    "A100": {"bf16": 312.0},
    "H100": {"bf16": 989.0},
    "H200": {"bf16": 989.0},
    "GH200": {"bf16": 989.0},
    "B200": {"bf16": 2250.0},
    "GB200": {"bf16": 2500.0},
}
"""Dense TFLOP/s by device and precision, from the vendor's data sheets (SXM modules)."""

_OTHER_BOARDS = ("PCIe", "NVL", "MIG")


@dataclass(frozen=True)
class Peak:
    """The named peak in FLOP/s, or why there is none to divide by."""

    name: str
    flops: float | None
    reason: str | None = None


def peak(device_name: str, precisions: set[str]) -> Peak:
    """The dense peak of ``device_name`` (as the driver names it) for a run whose sites have these precisions.

    A run with bf16 sites is held against the bf16 peak, all its sites together; a quantised one against none.
    """
    precision = "bf16" if "bf16" in precisions else "fp32"
    name = f"{device_name}, {precision} dense"
    other = sorted(precisions - {"bf16", "fp32"})
    if other:
        return Peak(name, None, f"the run is quantised ({', '.join(other)}): one peak would be a lie")
    words = device_name.replace("-", " ").split()
    known = next((PEAKS[w] for w in words if w in PEAKS), None)
    if known is None or any(board in device_name for board in _OTHER_BOARDS):
        return Peak(name, None, f"the peak of {device_name!r} is not known")
    if precision not in known:
        return Peak(name, None, f"the {precision} peak of {device_name!r} is not in the table")
    return Peak(name, known[precision] * 1e12)


def peak_memory(device: torch.device) -> int:
    """Most bytes used so far: allocated on a CUDA device, resident in main memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident()


def peak_resident() -> int:
    """Most bytes of main memory that this process has held.

    Linux's ``ru_maxrss`` starts at what the process held that started this one, which a test or a benchmark often is.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Meter:
    """Adds up a log window. `mark` ends a phase; on CUDA it records an event and nothing waits until `window` is asked for."""

    def __init__(self, device: torch.device, peak: Peak) -> None:
        self.peak = peak
        self._cuda = device.type == "cuda"
        self._free: list[torch.cuda.Event] = []
        self._marks: list[tuple[str | None, Any]] = []
        self._clear()

    def _clear(self) -> None:
        self.steps = self.samples = self.tokens = 0
        self._flops: float | None = 0.0
        self._imbalance: list[float] = []

    def mark(self, phase: str | None) -> None:
        """The time since the last mark was spent in ``phase``; None: in none (before the first step, an evaluation, a checkpoint)."""
        if self._cuda:
            now: Any = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            now.record()
        else:
            now = time.perf_counter()
        self._marks.append((phase, now))

    def count(self, samples: int, tokens: int, flops: float | None, imbalance: float | None = None) -> None:
        """One batch of this rank; ``imbalance``: the work of the busiest rank over the mean of the ranks."""
        if imbalance is not None:
            self._imbalance.append(imbalance)
        self.samples += samples
        self.tokens += tokens
        self._flops = None if flops is None or self._flops is None else self._flops + flops

    def window(self, world: int = 1) -> dict[str, float | None]:
        """Numbers of the window since the last call, for the log; begins the next window. Waits for the device.

        ``samples_per_s`` and ``tokens_per_s`` of all ``world`` ranks (taken to be alike), ``mfu`` in [0, 1] and ``tflops`` of one device,
        ``data_wait`` as share of the time, and ``data_s``, ``forward_s``, ``backward_s``, ``optimizer_s`` a step; ``captured_s`` is that of
        a captured step, whose phases have no times of their own. With several ranks ``imbalance``, the work of the busiest rank over their
        mean, as mean of the steps, and ``imbalance_max``.

        :raises RunError: an MFU above 1, which only a wrong FLOP count, peak or clock can give.
        """
        spent = dict.fromkeys(PHASES, 0.0)
        if self._cuda and self._marks:
            self._marks[-1][1].synchronize()
        for (_, begin), (phase, end) in zip(self._marks, self._marks[1:]):
            if phase is not None:
                spent[phase] = spent.get(phase, 0.0) + (begin.elapsed_time(end) / 1e3 if self._cuda else end - begin)
        if self._cuda:
            self._free += [event for _, event in self._marks[:-1]]
        del self._marks[:-1]
        total = sum(spent.values())
        rate = (lambda x: x / total) if total > 0 else lambda x: None
        flops = self._flops if total > 0 else None
        mfu = flops / total / self.peak.flops if flops is not None and self.peak.flops else None
        if mfu is not None and mfu > 1:
            raise RunError(
                f"a model FLOPs utilisation of {mfu:.0%} is impossible: {flops:.4g} FLOPs in {total:.4g} s against {self.peak.name} "
                f"({self.peak.flops:.4g} FLOP/s)",
                fix="the FLOP count of the model or the peak in gem_core.train.measure.PEAKS is wrong; please report it",
            )
        record: dict[str, float | None] = {
            "samples_per_s": rate(self.samples * world),
            "tokens_per_s": rate(self.tokens * world),
            "mfu": mfu,
            "tflops": None if flops is None else flops / total / 1e12,
            "data_wait": rate(spent["data"]),
            **(
                {"imbalance": sum(self._imbalance) / len(self._imbalance), "imbalance_max": max(self._imbalance)} if self._imbalance else {}
            ),
            **{f"{phase}_s": seconds / max(1, self.steps) for phase, seconds in spent.items()},
        }
        self._clear()
        return record
