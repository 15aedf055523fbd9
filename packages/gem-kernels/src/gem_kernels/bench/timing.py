"""How kernels are timed: CUDA-graph replays, variants in shuffled rounds, memory and errors beside the times."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch import Tensor

Run = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)


@functools.lru_cache(maxsize=1)
def stream() -> torch.cuda.Stream:
    """The stream that graphs are captured on. A backward pass can only be captured on the stream that its forward ran on."""
    return torch.cuda.Stream()


def capture(run: Run) -> Run:
    """Record ``run`` in a CUDA graph after a warm-up; gives the replay. What it allocates lives in the graph's pool."""
    stream().wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream()):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream()):
        # the function too: its closure holds the tensors that the graph reads
        kept = run(), run

    def replay() -> object:
        graph.replay()
        return kept[0]

    return replay


def interleaved_ms(variants: dict[Name, Run], *, rounds: int = 7, target_ms: float = 12.0, seed: int = 0) -> dict[Name, list[float]]:
    """Milliseconds of one call of each variant, a value a round. In every round each variant runs for about ``target_ms``, in an order that
    is drawn anew: power decides the clock, so that what runs after a slow variant is faster than after a fast one."""
    repeats = {}
    for name, run in variants.items():
        run()
        repeats[name] = max(1, min(200, int(target_ms / max(_elapsed(run, 1), 1e-3))))
    times: dict[Name, list[float]] = {name: [] for name in variants}
    order, drawn = list(variants), random.Random(seed)
    for _ in range(rounds):
        drawn.shuffle(order)
        for name in order:
            times[name].append(_elapsed(variants[name], repeats[name]))
    return times


def _elapsed(run: Run, repeats: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def release() -> None:
    """Give cached device memory back, so that the next row's peak is its own."""
    gc.collect()
    torch.cuda.empty_cache()


def peak_bytes(run: Run) -> int:
    """Most device memory that an eager call allocates beyond what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def relative_error(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in float64; NaN counts as infinite."""
    difference = (value.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-300)
    return float("inf") if bool(torch.isnan(difference)) else float(difference)
