"""Time of training steps of one configuration, as the trainer runs them, without evaluation and checkpoints.

    torchrun --nproc-per-node 4 -m gem_core.bench.step base.toml --steps 30
    python -m gem_core.bench.step base.toml --set kernels.default=eager --profile profile/

One JSON object is the last line on standard output of rank 0. FLOPs are those of real events, whatever is padded or recomputed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from gem_core.batch import Batch
from gem_core.config import Config, ResolvedConfig, load_config, resolve
from gem_core.errors import GemError
from gem_core.ops import use_policy
from gem_core.requests import history_lengths
from gem_core.sources.drawn import build_random
from gem_core.sources.laws import UniformLaw
from gem_core.train.build import Parts, build_parts, build_source
from gem_core.train.feed import Fed, Feed, grouped
from gem_core.train.measure import PHASES, Meter, peak, peak_memory
from gem_core.train.profile import activities, events_of, summarise, write
from gem_core.train.runfolder import device_name, environment
from gem_core.train.runtime import Runtime, runtime
from gem_core.train.step import Outcomes, TrainStep

WINDOW = 5
"""Steps between two readings of the clock."""

SETTLING = 90
"""Most steps beyond the warm-up of a captured row, whose batches are recorded for each of a few sizes, at the second that has it."""


def measure(config: Config, *, steps: int = 30, warmup: int = 10, traces: Path | None = None, profiled: bool = False) -> dict[str, Any]:
    """Run ``warmup`` and then ``steps`` training steps; returns what one device does and needs.

    ``step_ms`` (median over windows of 5 steps, without a wait between them, and the fastest and slowest window; a window in which a
    captured step met a kind of batch that it had to record is ``repeated``, up to twice as many as there are), ``samples_per_s`` of all
    ranks, ``tflops`` and ``mfu`` of one device from the FLOPs of real events, ``wasted`` (share of the events that are padding), seconds of
    data, forward, backward and optimizer a step, ``first_step_s`` (the steps of `check` included, since they compile),
    ``peak_memory_bytes`` and what was reserved of the device's memory, where what graphs need counts too, the losses, what `check` found,
    and the imbalance (max over mean work of the ranks).
    ``profiled``: three more steps run under the profiler, and their times (of rank 0) are in ``profile``; ``traces`` is a folder for the
    trace and the summary with its kernels.

    :raises GemError: what training would raise.
    """
    resolved = resolve(config)
    config = resolved.config
    policy = use_policy(config.kernels.default, config.kernels.ops)
    with runtime(config) as rt, policy:
        began = time.perf_counter()
        parts = build_parts(resolved, rt)
        built_s = time.perf_counter() - began
        held_against = peak(device_name(rt.device), parts.precisions())
        step, outcomes = TrainStep(parts, config, rt, Meter(rt.device, held_against)), Outcomes(rt.device)
        parts.module.train()
        began = time.perf_counter()
        checked = check(step, outcomes, resolved, rt)
        groups = grouped(Feed(build_source(resolved, "train", rt), rt.device, None), config.train.accumulate, step.looks_ahead)
        step.set_lr(1.0)
        run = _Run(parts, step, outcomes, groups, rt)
        run(1)
        rt.wait()
        first_s = time.perf_counter() - began
        run(max(0, warmup - 1))
        for _ in range(SETTLING // (2 * WINDOW) if config.train.capture else 0):
            known = step.news
            run(2 * WINDOW)
            if not run.met_news(known):
                break
        if rt.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(rt.device)
        run.events.clear()
        meters, repeated = _windows(run, steps)
        rt.wait()
        windows = [_window(meter, rt) for meter in meters]
        run.read(all=True)
        memory = max(rt.gather_objects(peak_memory(rt.device)))
        held, real = (sum(counts) for counts in zip(*run.events))
        times = _profile(lambda: run(1), rt, traces) if profiled or traces is not None else None
        return _summary(windows, rt) | {
            "profile": times,
            "repeated_windows": repeated,
            "first_step_s": first_s,
            "build_s": built_s,
            "peak_memory_bytes": memory,
            "reserved_memory_bytes": max(rt.gather_objects(_reserved(rt.device))),
            "wasted": 1 - real / max(1, held),
            "losses": run.losses,
            "check": checked,
            "parameters": parts.parameter_counts(),
            "mfu_peak": {"name": held_against.name, "flops_per_s": held_against.flops, "reason": held_against.reason},
            "world": rt.world,
            **environment(rt.device),
        }


def repeated(parts: Parts, step: TrainStep, host: Batch, rt: Runtime, *, windows: int = 4) -> float:
    """Seconds of a training step on the same batch again and again, brought to the device each time: the median of windows."""
    groups = grouped(Feed(_Again(host), rt.device, None), step.config.train.accumulate, step.looks_ahead)
    run = _Run(parts, step, Outcomes(rt.device), groups, rt)
    size = WINDOW if rt.device.type == "cuda" else 1
    run(size)
    return float(statistics.median(_window(run(size), rt)["step_s"] for _ in range(windows)))


@dataclass(frozen=True)
class _Again:
    """A source of one batch without end."""

    host: Batch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.host

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@dataclass
class _Run:
    """Training steps; ``events``: of each batch, with and without padding."""

    parts: Parts
    step: TrainStep
    outcomes: Outcomes
    groups: Iterator[tuple[list[Fed], Fed | None]]
    rt: Runtime
    losses: list[float] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, count: int) -> Meter:
        """``count`` steps. Each time another meter, read in the end: reading waits for the device, which would then wait for the host."""
        meter = self.step.meter = Meter(self.rt.device, self.step.meter.peak)
        self.step._mark = meter.mark
        meter.mark(None)
        for _ in range(count):
            batches, following = next(self.groups)
            meter.mark("data")
            self.outcomes.push(len(self.losses), self.step(batches, False, following), batches)
            meter.steps += 1
            for fed in batches:
                self.events.append((fed.host.tokens, _real_events(fed.host)))
                meter.count(fed.host.size, self.events[-1][1], _real_flops(self.parts.model, fed.host))
            self.read()
        return meter

    def read(self, *, all: bool = False) -> None:
        self.losses.extend(o.loss / o.weight for o in self.outcomes.ready(all=all))

    def met_news(self, known: int) -> bool:
        """Whether a rank's captured step recorded a kind of batch since ``step.news`` was ``known``."""
        return bool(self.rt.count([self.step.news > known])[0])


def _windows(run: _Run, steps: int) -> tuple[list[Meter], int]:
    """Meters of ``steps`` steps in windows, and how many windows were repeated because something was recorded in them."""
    sizes = [min(WINDOW, steps - start) for start in range(0, steps, WINDOW)]
    meters: list[Meter] = []
    repeated = 0
    while len(meters) < len(sizes):
        known = run.step.news
        meter = run(sizes[len(meters)])
        if repeated < 2 * len(sizes) and run.met_news(known):
            repeated += 1
        else:
            meters.append(meter)
    return meters, repeated


def _window(meter: Meter, rt: Runtime) -> dict[str, Any]:
    found = meter.window(rt.world)
    return {**found, "step_s": sum(float(found.get(f"{p}_s") or 0) for p in (*PHASES, "captured"))}


CHECKED, CHECKED_LENGTH = 64, 192
"""Samples of the batches that a row is checked with, and events of each where all are equally long."""


def check(step: TrainStep, outcomes: Outcomes, resolved: ResolvedConfig, rt: Runtime) -> dict[str, dict[str, float]]:
    """Loss and dense gradient norm on the first samples of the random log, for comparison with other rows that start from the same seed:
    ``equal``: all histories equally long, which every implementation takes, padding ones included; ``jagged``: as they are. By steps with
    learning rate 0, the last of three: a captured step is replayed by then. Nothing with other sources or several ranks.
    """
    config = resolved.config
    if config.data.source != "random" or rt.world > 1:
        return {}
    length = {"equal": UniformLaw(max=min(CHECKED_LENGTH, resolved.source.law.max), sparsity=1.0), "jagged": resolved.source.length}
    found = {}
    step.set_lr(0.0)
    for name, law in length.items():
        if name == "jagged" and resolved.source.padded:
            continue
        options = resolved.source.model_copy(update={"length": law, "padded": False, "window": 1, "balanced": False})
        source = build_random(options, config.features, split="train", batch_size=CHECKED, seed=config.run.seed)
        fed = next(iter(Feed(source, rt.device)))
        for _ in range(3):
            outcomes.push(0, step([fed], False, None), [fed])
        last = outcomes.ready(all=True)[-1]
        found[name] = {"loss": last.loss / last.weight, "grad_norm": last.grad_norm}
    return found


def _reserved(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory(device)


def _lengths(batch: Batch) -> dict[str, torch.Tensor]:
    """Real events of each history: a padded batch of the random source carries them as columns."""
    return {name: batch.columns.get(f"length.{name}", lengths) for name, lengths in history_lengths(batch).items()}


def _real_events(batch: Batch) -> int:
    return sum(int(lengths.sum()) for lengths in _lengths(batch).values())


def _real_flops(model: torch.nn.Module, batch: Batch) -> float | None:
    count = getattr(model, "count_flops", None)
    return None if count is None else float(count(_lengths(batch), batch.size).training)


def _summary(windows: list[dict[str, Any]], rt: Runtime) -> dict[str, Any]:
    def median(key: str) -> float | None:
        values = [w[key] for w in windows if w[key] is not None]
        return statistics.median(values) if values else None

    ms = [w["step_s"] * 1e3 for w in windows]
    work = [float(w["tflops"] or 0) for w in windows]
    ranks = rt.gather_objects(statistics.mean(work))
    keys = ("samples_per_s", "tokens_per_s", "tflops", "mfu", "data_wait", "data_s", "forward_s", "backward_s", "optimizer_s")
    mean = statistics.mean(ranks)
    return {
        "step_ms": statistics.median(ms),
        "step_ms_range": [min(ms), max(ms)],
        **{key: median(key) for key in keys},
        "imbalance": max(ranks) / mean if mean else None,
    }


def _profile(run: Any, rt: Runtime, folder: Path | None) -> dict[str, Any] | None:
    """Three steps under the profiler on every rank; rank 0 writes, and returns the summary without the list of kernels.

    Without ``folder`` only the device is recorded where there is one: recording the host would slow down what waits for it.
    """
    watched = activities(rt.device)
    with profile(activities=watched if folder is not None else watched[-1:]) as recorded:
        for _ in range(3):
            run()
        rt.wait()
    if not rt.main:
        return None
    summary = summarise(events_of(recorded), 3) if folder is None else write(recorded, folder, 3)
    return {key: value for key, value in summary.items() if key not in ("top", "origins")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--summary", action="store_true", help="three more steps under the profiler, for the times of communication")
    args = parser.parse_args()
    try:
        result = measure(
            load_config(args.config, args.overrides), steps=args.steps, warmup=args.warmup, traces=args.profile, profiled=args.summary
        )
    except GemError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except torch.OutOfMemoryError as error:
        raise SystemExit(f"out of memory: {str(error).splitlines()[0]}") from None
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
