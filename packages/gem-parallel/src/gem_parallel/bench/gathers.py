"""All-gather back ends: right over many reuses, alone, and beside back-to-back products.

    torchrun --nproc-per-node 4 -m gem_parallel.bench.gathers --out OUT

Every back end is first compared with the process group's collective, bit for bit, over ``--iterations`` gathers of random sizes. Then each
one is timed in turn with the process group's, ``--pairs`` times: medians of the pairs' ratios with 95 % intervals (order statistics).
Rates are bytes that a member receives over the time of a gather. Beside products: both run back to back on streams of their own, and
count as long as both are busy; the slow-down is against the same products with nothing beside, right before.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gem_core.train.collective import Gatherer, GatherOptions, Topology
from gem_parallel import collectives
from gem_parallel.bench import report
from gem_parallel.collectives.copy_engine import HierarchicalGather
from gem_parallel.collectives.process_group import GroupGather, all_gather

BASE = "default"


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mib", type=float, default=128.0, help="a rank's part")
    p.add_argument("--pairs", type=int, default=25)
    p.add_argument("--iterations", type=int, default=1000)
    p.add_argument("--most", type=int, default=4 << 20, help="largest part, in elements, of the comparison")
    p.add_argument("--width", type=int, default=8192, help="of the square products")
    p.add_argument("--products", type=int, default=24, help="of a measurement")
    p.add_argument("--ctas", type=int, nargs="+", default=[4, 8])
    p.add_argument("--budget", type=float, default=1e9, help="seconds after which nothing more is begun")
    p.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")))
    return p.parse_args()


def backends(device: torch.device, ctas: Sequence[int]) -> dict[str, Gatherer]:
    """The process group's first; then those that the machine allows, the hosts also as declared."""
    group, world = dist.group.WORLD, dist.get_world_size()
    one = Topology(device.type, (0,) * world)
    found: dict[str, Gatherer] = {BASE: GroupGather(group, GatherOptions(device, one))}
    made, told = collectives.gatherer("copy-engine", group, GatherOptions(device, one))
    say(told)
    if told.startswith("copy-engine"):
        found["copy-engine"] = made
        for mates in (m for m in range(1, world) if world % m == 0):
            declared = Topology(device.type, tuple(i // mates for i in range(world)))
            found[f"copy-engine, {world // mates} hosts of {mates}"] = HierarchicalGather(group, GatherOptions(device, declared))
    if device.type == "cuda":
        for n in ctas:
            found[f"low-cta, {n} SMs"] = GroupGather(group, GatherOptions(device, one, ctas=n), limited=True)
    return found


def compare(made: Gatherer, device: torch.device, iterations: int, most: int) -> int:
    """Gathers that differ from the process group's."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes, noise = random.Random(5), torch.Generator(device).manual_seed(rank)
    data = torch.randint(-(2**31), 2**31 - 1, (most,), dtype=torch.int32, device=device, generator=noise)
    expected = torch.empty(most * world, dtype=torch.int32, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(iterations):
        size = sizes.choice([1, sizes.randrange(1, 1000), sizes.randrange(1, most)])
        start = sizes.randrange(0, most - size + 1)
        all_gather(expected[: size * world], data[start : start + size])
        out = made.allocate(size * world, torch.int32)
        out.view(world, size)[rank] = data[start : start + size]
        made.gather(out)
        wrong += (out != expected[: size * world]).any()
        del out
    dist.all_reduce(wrong)
    return int(wrong)


class Clock:
    """Times on the device (CUDA events), or the host's."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, a: Any, b: Any) -> float:
        """Milliseconds."""
        return float(a.elapsed_time(b)) if self.cuda else (b - a) * 1e3

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()


def repeated(made: Gatherer, size: int) -> Callable[[], None]:
    """One gather of ``size`` bytes a member, its part written once in advance: what is timed is the exchange."""

    def gather() -> None:
        out = made.allocate(size * dist.get_world_size(), torch.uint8)
        made.gather(out)

    return gather


def alone(clock: Clock, gather: Callable[[], None], count: int = 5) -> float:
    """Milliseconds of a gather, several back to back, the slowest rank's."""
    clock.settle()
    first = clock.mark()
    for _ in range(count):
        gather()
    last = clock.mark()
    clock.settle()
    return slowest(clock.between(first, last) / count)


def products(clock: Clock, work: Callable[[], None], count: int) -> list[Any]:
    marks = [clock.mark()]
    for _ in range(count):
        work()
        marks.append(clock.mark())
    return marks


def beside(clock: Clock, work: Callable[[], None], gather: Callable[[], None], count: int, gathers: int) -> tuple[float, float, float]:
    """Milliseconds of a product with nothing beside it, of one beside gathers, and of a gather beside products; the slowest rank's."""
    clock.settle()
    free = products(clock, work, count // 2)
    clock.settle()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    started = clock.mark()
    with torch.cuda.stream(side):
        side.wait_event(started)
        moved = products(clock, gather, gathers)
    worked = products(clock, work, count)
    clock.settle()
    until = min(clock.between(started, moved[-1]), clock.between(started, worked[-1]))
    both = [[clock.between(started, m) for m in marks] for marks in (worked, moved)]
    # the first of each begin before the other is under way
    spans = [[b - a for a, b in zip(times[1:], times[2:]) if b <= until or b == times[2]] for times in both]
    usual = median(clock.between(a, b) for a, b in zip(free[1:], free[2:]))
    return slowest(usual), slowest(median(spans[0])), slowest(median(spans[1]))


def slowest(number: float) -> float:
    worst = torch.tensor([number], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def middle(values: Sequence[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval by order statistics."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
    return median(ordered), ordered[low], ordered[high]


def told(values: Sequence[float], digits: int = 3) -> str:
    mid, low, high = middle(values)
    return f"{mid:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    args = arguments()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=45))
    began, clock, world = time.monotonic(), Clock(device), dist.get_world_size()
    data: dict[str, Any] = {"environment": {}, "correctness": [], "alone": [], "beside products": []}

    def save() -> None:
        if dist.get_rank() == 0:
            more = {k: str(v) for k, v in vars(args).items() if k != "out"}
            data["environment"] = report.environment("gem_parallel.bench.gathers", **more)
            report.write(args.out, "gathers", data)

    def time_left() -> bool:
        left = torch.tensor([float(time.monotonic() - began < args.budget)])
        dist.broadcast(left, 0)
        return bool(left)

    there = backends(device, args.ctas)
    for name in [n for n in there if n != BASE]:
        iterations = args.iterations if "copy" in name else args.iterations // 10
        wrong = compare(there[name], device, iterations, args.most)
        data["correctness"].append({"back end": name, "gathers": iterations, "differ": wrong})
        say(str(data["correctness"][-1]))
        if wrong:
            del there[name]
    save()
    size = int(args.mib * 2**20)
    received = size * (world - 1)
    calls = {name: repeated(made, size) for name, made in there.items()}
    for call in calls.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.pairs if time_left() else 0):
        for name, call in calls.items():
            times[name].append(alone(clock, call))
    for name, found in times.items():
        rate = [received / t / 1e6 for t in found]
        ratios = [b / a for a, b in zip(found, times[BASE])]
        data["alone"].append({"back end": name, "ms": told(found), "GB/s": told(rate, 1), "rate / default": told(ratios)} if found else {})
        say(str(data["alone"][-1]))
    save()
    if cuda:
        measure_beside(args, data, calls, {n: median(t) for n, t in times.items()}, received, clock, time_left)
        save()
    dist.barrier()
    dist.destroy_process_group()


def measure_beside(
    args: argparse.Namespace, data: dict[str, Any], calls: dict[str, Callable[[], None]], usual: dict[str, float], received: int,
    clock: Clock, time_left: Callable[[], bool],
) -> None:  # fmt: skip
    """Rows of ``beside products``."""
    a, b = (torch.randn(args.width, args.width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def work() -> None:
        torch.mm(a, b, out=out)

    for _ in range(10):
        work()
    one = alone(clock, work)
    say(f"products: {2 * args.width**3 / one / 1e9:.0f} TFLOP/s")
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
    for _ in range(args.pairs):
        if not time_left():
            break
        for name, call in calls.items():
            # gathers for longer than the products last, even if these take 1.5 x as long
            gathers = 3 + math.ceil(1.5 * args.products * one / usual[name])
            found[name].append(beside(clock, work, call, args.products, gathers))
    for name, rows in found.items():
        if rows:
            row = {
                "back end": name, "pairs": len(rows), "products slowed": told([g / f for f, g, _ in rows]),
                "gather ms": told([t for _, _, t in rows]), "GB/s": told([received / t / 1e6 for _, _, t in rows], 1),
            }  # fmt: skip
            data["beside products"].append(row)
            say(str(row))


if __name__ == "__main__":
    main()
