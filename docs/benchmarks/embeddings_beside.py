"""What moving bytes inside a GPU costs products that run beside: sums and copies by a few SMs, copies by a copy engine.

    python docs/benchmarks/embeddings_beside.py --out OUT

The products are those of the tower in `gem_parallel.bench.embeddings` (72 of 4096 x 8192 by 8192 in bf16), the bytes those of one GPU
of two in a step of ``exchange = "whole"``: means of 4 GiB with 4 GiB that were sent, and copies of 4 GiB. ``slower ms``: how much later
the last product ends; the rows without SMs show what bytes alone cost. Products of equal numbers do the same work with less power, since
fewer bits change: what bytes cost there is not the power's doing. ``W``: mean, from the counter of energy; ``capped``: share of readings
at which power held the clock down.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gem_core.bench.page import table
from gem_core.train.runfolder import environment
from gem_parallel.collectives import few_sms

PRODUCTS, LAYERS, PIECES = 72, 24, 24
PART = (4 << 30) // PIECES // 4 // 16384 * 16384


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


def engine_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """By a copy engine: a batch of one with the driver's flag to prefer overlap. A plain copy on one device is a kernel."""
    library = ctypes.CDLL("libcuda.so.1")
    attributes = _Attributes(order=1, flags=1)
    one, size = ctypes.c_size_t(0), ctypes.c_size_t(source.numel() * source.element_size())
    given, taken, failed = ctypes.c_uint64(source.data_ptr()), ctypes.c_uint64(target.data_ptr()), ctypes.c_size_t(0)
    code = library.cuMemcpyBatchAsync(
        ctypes.byref(taken), ctypes.byref(given), ctypes.byref(size), ctypes.c_size_t(1), ctypes.byref(attributes), ctypes.byref(one),
        ctypes.c_size_t(1), ctypes.byref(failed), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )  # fmt: skip
    if code:
        raise RuntimeError(f"cuMemcpyBatchAsync: error {code}")


Work = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


def sums(sms: int) -> Work:
    return lambda own, sent, out: few_sms.mean(own, sent, 1, own.numel(), out, sms)


def copies(sms: int) -> Work:
    return lambda own, sent, _out: few_sms.copy(own.view(torch.uint8), sent.view(torch.uint8), sms)


def rows() -> list[tuple[str, Work]]:
    found: list[tuple[str, Work]] = [("copy by a copy engine", lambda own, sent, out: engine_copy(own, sent))]
    for sms in (16, 4):
        found += [(f"mean, {sms} SMs", sums(sms)), (f"copy, {sms} SMs", copies(sms))]
    return found


class Clock:
    """Of the GPU's SMs and its power, from the driver's management library."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.library.nvmlInit_v2()
        self.device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self.library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self.device))

    def read(self) -> tuple[int, bool]:
        """MHz, and whether the limit of power holds them down."""
        mhz, reasons = ctypes.c_uint(0), ctypes.c_ulonglong(0)
        self.library.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(mhz))
        self.library.nvmlDeviceGetCurrentClocksThrottleReasons(self.device, ctypes.byref(reasons))
        return mhz.value, bool(reasons.value & 0x4)

    def joules(self) -> float:
        """Since the driver was loaded."""
        millijoules = ctypes.c_ulonglong(0)
        self.library.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(millijoules))
        return millijoules.value / 1e3


class Beside:
    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.x = torch.empty(4096, 8192, device=device, dtype=torch.bfloat16)
        self.weights = [torch.empty(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(LAYERS)]
        self.parts = [[torch.rand(PART, device=device) for _ in range(3)] for _ in range(6)]
        self.side = torch.cuda.Stream(priority=-1)
        self.clock = Clock()

    def fill(self, *, equal: bool) -> None:
        for factor in (self.x, *self.weights):
            factor.fill_(2.0**-6) if equal else factor.normal_(std=0.01)

    def step(self, work: Work | None) -> tuple[Any, Any]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if work is not None:
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                for i in range(PIECES):
                    work(*self.parts[i % len(self.parts)])
        for i in range(PRODUCTS):
            torch.mm(self.x, self.weights[i % LAYERS])
        end.record()
        torch.cuda.current_stream().wait_stream(self.side)
        return begin, end

    def products(self, work: Work | None, steps: int) -> dict[str, float]:
        """Milliseconds of all products; clock, power and whether it was at its limit meanwhile."""
        self.step(work)
        torch.cuda.synchronize()
        used, begin = self.clock.joules(), time.perf_counter()
        marks = [self.step(work) for _ in range(steps)]
        seen = [self.clock.read()]
        while not marks[-1][1].query():
            seen.append(self.clock.read())
            time.sleep(2e-3)
        torch.cuda.synchronize()
        watts = (self.clock.joules() - used) / (time.perf_counter() - begin)
        mhz, capped = zip(*seen[len(seen) // 3 :])
        times = [a.elapsed_time(b) for a, b in marks]
        return {"ms": statistics.median(times), "MHz": statistics.median(mhz), "W": watts, "capped": statistics.mean(capped)}

    def alone(self, work: Work) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.side):
            for i in range(3):
                work(*self.parts[i])
            begin.record()
            for i in range(PIECES):
                work(*self.parts[i % len(self.parts)])
            end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end))


def check(bench: Beside, name: str, work: Work) -> None:
    """:raises RuntimeError: a result is wrong."""
    own, sent, out = (t[: 3 * 16384 + 4].clone() for t in bench.parts[0])
    want = own if name.startswith("copy") else (own + sent) * 0.5
    with torch.cuda.stream(bench.side):  # the driver takes no batch on the default stream
        bench.side.wait_stream(torch.cuda.default_stream())
        work(own, sent, out)
    torch.cuda.synchronize()
    if not torch.equal(sent if name.startswith("copy") else out, want):
        raise RuntimeError("the result is wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds after which nothing more is begun")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Beside()
    found: list[dict[str, Any]] = []
    for equal in (False, True):
        bench.fill(equal=equal)
        before = bench.products(None, args.steps)
        for name, work in rows():
            if time.monotonic() - began > args.budget:
                break
            check(bench, name, work)
            alone, beside = bench.alone(work), bench.products(work, args.steps)
            after = bench.products(None, args.steps)
            rate = (2 if name.startswith("copy") else 3) * 4 * PART * PIECES / alone * 1e-6
            without = {f"{key} without": (before[key] + after[key]) / 2 for key in before}
            row = {"products of": "equal numbers" if equal else "random numbers", "beside": name, "alone ms": alone, "GB/s": round(rate)}
            found.append({**row, "slower ms": beside["ms"] - without["ms without"], **beside, **without})
            print(f"{time.monotonic() - began:5.1f} s  {found[-1]}", flush=True)
            before = after
            where = {**environment(bench.x.device), "command": "python docs/benchmarks/embeddings_beside.py"}
            (args.out / "embeddings-beside.json").write_text(json.dumps({"environment": where, "rows": found}, indent=1) + "\n")
    (args.out / "embeddings-beside.md").write_text(f"# Products beside sums and copies\n\n{table(found)}\n")


if __name__ == "__main__":
    main()
