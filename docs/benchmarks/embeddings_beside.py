"""What moving bytes inside a GPU costs products that run beside: sums and copies by a few SMs, copies by a copy engine.

    python docs/benchmarks/embeddings_beside.py --out OUT

The products are those of the tower in `gem_parallel.bench.embeddings` (72 of 4096 x 8192 by 8192 in bf16), the bytes those of one GPU
of two in a step of ``exchange = "whole"``: means of 4 GiB with 4 GiB that were sent, and copies of 4 GiB. ``slower ms``: how much later
the last product ends; the rows without SMs show what bytes alone cost.
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

from gem_core.train.runfolder import environment
from gem_parallel.bench.report import table
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
    for sms in (16, 8, 4, 2):
        found += [(f"mean, {sms} SMs", sums(sms)), (f"copy, {sms} SMs", copies(sms))]
    return [*found, ("copy, plain", lambda own, sent, out: sent.copy_(own)), ("mean, all SMs", sums(132))]


class Clock:
    """Of the GPU's SMs and its power, from the driver's management library."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.library.nvmlInit_v2()
        self.device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        self.library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self.device))

    def read(self) -> tuple[int, float]:
        """MHz and watts."""
        mhz, milliwatts = ctypes.c_uint(0), ctypes.c_uint(0)
        self.library.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(mhz))
        self.library.nvmlDeviceGetPowerUsage(self.device, ctypes.byref(milliwatts))
        return mhz.value, milliwatts.value / 1e3


class Beside:
    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.x = torch.randn(4096, 8192, device=device, dtype=torch.bfloat16) * 0.02
        self.weights = [torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) * 0.01 for _ in range(LAYERS)]
        self.parts = [[torch.rand(PART, device=device) for _ in range(3)] for _ in range(6)]
        self.side = torch.cuda.Stream(priority=-1)
        self.clock = Clock()

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
        """Milliseconds of all products, and the median clock and power meanwhile."""
        self.step(work)
        marks = [self.step(work) for _ in range(steps)]
        seen = [self.clock.read()]
        while not marks[-1][1].query():
            seen.append(self.clock.read())
            time.sleep(2e-3)
        mhz, watts = map(statistics.median, zip(*seen[len(seen) // 3 :]))
        return {"ms": statistics.median(a.elapsed_time(b) for a, b in marks), "MHz": mhz, "W": watts}

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
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds after which nothing more is begun")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    began = time.monotonic()
    bench = Beside()
    found: list[dict[str, Any]] = []
    before = bench.products(None, args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, work in rows():
        if time.monotonic() - began > args.budget:
            break
        try:
            check(bench, name, work)
            alone, beside = bench.alone(work), bench.products(work, args.steps)
        except RuntimeError as fault:
            print(f"{name}: {str(fault).splitlines()[0]}", flush=True)
            continue
        after = bench.products(None, args.steps)
        rate = (2 if name.startswith("copy") else 3) * 4 * PART * PIECES / alone * 1e-6
        slower = beside["ms"] - (before["ms"] + after["ms"]) / 2
        told = {"products ms": beside["ms"], "slower ms": slower, "MHz": beside["MHz"], "W": beside["W"]}
        found.append({"work": name, "alone ms": alone, "GB/s": rate, **told, "MHz without": after["MHz"], "W without": after["W"]})
        print(f"{time.monotonic() - began:5.1f} s  {found[-1]}", flush=True)
        before = after
        where = {**environment(bench.x.device), "command": "python docs/benchmarks/embeddings_beside.py"}
        (args.out / "embeddings-beside.json").write_text(json.dumps({"environment": where, "rows": found}, indent=1) + "\n")
    (args.out / "embeddings-beside.md").write_text(f"# Products beside sums and copies\n\n{table(found)}\n")


if __name__ == "__main__":
    main()
