"""What a device does at most, measured in the run that it is compared with: G, the rate of a large matrix product, and C, of a large copy.

Both are medians over stretches of 30 ms, in which products, or copies, follow one another: as long as training steps take. One product
after a pause is faster (on an H200 806 TFLOP/s where stretches have 690), at a clock that power does not allow for a step's length; it is
told beside G as `Ceilings.best_gemm`, and floors are not made with it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

STRETCH_S, STRETCHES = 0.03, 7


@dataclass(frozen=True)
class Ceilings:
    """``gemm`` and ``best_gemm`` in TFLOP/s (bf16, 8192 cubed; on a CPU 512 cubed), ``copy`` in TB/s, read and written."""

    gemm: float
    best_gemm: float
    copy: float


def ceilings(device: torch.device) -> Ceilings:
    """Measure the ceilings of ``device``, in about half a second on random data."""
    n, size = (8192, 1 << 31) if device.type == "cuda" else (512, 1 << 24)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=c)

    best = min(seconds(product, device, 5))
    held = _held(product, device)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    # a kernel, since a device's copy engine need not be as fast as its multiprocessors
    copied = _held(lambda: torch.neg(source, out=target), device)
    return Ceilings(2 * n**3 / held / 1e12, 2 * n**3 / best / 1e12, 2 * size / copied / 1e12)


def _held(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a run, the median of stretches."""
    if device.type != "cuda":
        return statistics.median(seconds(run, device, 3))
    one = statistics.median(seconds(run, device, 3))
    times = max(1, int(STRETCH_S / one))

    def stretch() -> None:
        for _ in range(times):
            run()

    return statistics.median(seconds(stretch, device, STRETCHES, warmup=0)) / times


def seconds(run: Callable[[], Any], device: torch.device, repeats: int, *, warmup: int = 2) -> list[float]:
    """Seconds of single runs, after ``warmup`` that do not count."""
    for _ in range(warmup):
        run()
    if device.type != "cuda":
        spent = []
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            spent.append(time.perf_counter() - began)
        return spent
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:])]
