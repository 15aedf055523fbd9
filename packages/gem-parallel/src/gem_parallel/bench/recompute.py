"""Recomputation chosen by measured return against the same budget for every layer: step time over peak memory, and gradients.

    python -m gem_parallel.bench.recompute base.toml --set precision.recipe=bf16 --out OUT

Every set of regions (attention, feed-forward, pooling, ...) is recomputed in all layers at once: the uniform budgets, and at the same time
the profile: what a set saves and costs a layer. The last layer is profiled apart: its backward pass comes first, when nothing has been
freed, so that what it makes again is there at the peak. Proposed are every set in all layers but the last, and what a knapsack gives: a set
for every layer so that the step is as fast as possible within the memory of each uniform budget that no other one beats, and between them.
Proposals are measured, and for every uniform budget the fastest that fits is picked, the uniform one itself unless another is faster by
`CLEARLY`; ``--rounds`` more of measurements say what the picks are worth. Take a batch whose step the device bounds, not the host: what is
recomputed is launched again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from gem_core.bench.page import table
from gem_core.config import Config, load_config, resolve
from gem_core.model.loss import batch_total, task_loss
from gem_core.ops import use_policy
from gem_core.train.build import Parts, build_parts, build_source
from gem_core.train.feed import Fed
from gem_core.train.measure import Meter, peak
from gem_core.train.runfolder import environment
from gem_core.train.runtime import runtime
from gem_core.train.step import TrainStep
from gem_parallel.plan.activations import regions
from gem_parallel.plan.budget import choose
from gem_parallel.recompute import recompute

Picks = tuple[tuple[str, ...], ...]
"""The regions that each layer recomputes."""

CLEARLY = 0.003
"""Share of a step by which another choice must be faster than a uniform one to be picked instead: less may be chance."""


class Bench:
    """The model, a few batches, and steps with some modules recomputed."""

    def __init__(self, parts: Parts, config: Config, rt: Any, batches: Sequence[Fed]) -> None:
        self.parts, self.batches, self.device = parts, batches, rt.device
        self.step = TrainStep(parts, config, rt, Meter(rt.device, peak("", {"fp32"})))
        self.step.set_lr(0.0)
        parts.module.train()
        # a recipe's own stay: theirs are the casts
        self._forwards = {part: part.__dict__.get("forward") for part in parts.model.modules()}

    def apply(self, modules: Sequence[str]) -> None:
        for part, own in self._forwards.items():
            part.__dict__.pop("forward", None)
            if own is not None:
                part.forward = own
        if modules:
            recompute(self.parts.model, tuple(modules))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the dense parameters, from the first batch."""
        self.parts.model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        batch = self.batches[0].batch
        task_loss(self.parts.module(batch), batch).backward()  # type: ignore[no-untyped-call]
        found = {n: p.grad.clone() for n, p in self.parts.dense_parameters().items() if p.grad is not None}
        self.parts.model.zero_grad(set_to_none=True)
        return found

    def measure(self, steps: int, warmup: int) -> tuple[float, int]:
        """Median milliseconds of a step, and the peak of allocated bytes."""
        if self.device.type != "cuda":
            for i in range(warmup + steps):
                self.step([self.batches[i % len(self.batches)]], False)
            return 0.0, 0
        times: list[tuple[Any, Any]] = []
        for i in range(warmup + steps):
            if i == warmup:
                torch.cuda.synchronize(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            self.step([self.batches[i % len(self.batches)]], False)
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize(self.device)
        return median(a.elapsed_time(b) for a, b in times[warmup:]), torch.cuda.max_memory_allocated(self.device)


def modules_of(layers: Sequence[nn.Module], picks: Sequence[Sequence[str]]) -> list[str]:
    """Names of the modules that layer i recomputes under the parts ``picks[i]``."""
    found = []
    for i, (layer, parts) in enumerate(zip(layers, picks, strict=True)):
        there = regions(layer)
        found += [f"layers.{i}.{name}" for part in parts for name in there.get(part, ())]
    return found


def run(bench: Bench, steps: int, warmup: int, rounds: int, say: Any, until: float = float("inf")) -> Iterator[dict[str, Any]]:
    """Rows ``uniform`` and ``proposed`` after every round; see the module's text. ``until``: when no further measurement is begun, on
    `time.monotonic`."""
    stack: Any = bench.parts.model.layers
    layers = list(stack)
    parts = sorted({part for layer in layers for part in regions(layer)})
    sets = [some for n in range(len(parts) + 1) for some in combinations(parts, n)]
    plain = [bench.gradients() for _ in range(2)]
    bench.apply(modules_of(layers, [sets[-1]] * len(layers)))
    again = bench.gradients()
    off = {
        name: max((float((plain[0][k] - other[k]).abs().max() / g.abs().max().clamp(min=1e-30)) for k, g in plain[0].items()), default=0.0)
        for name, other in (("repeated", plain[1]), ("recomputed", again))
    }
    same = plain[0].keys() == again.keys()
    say(f"gradients: {off['repeated']:.2e} off when nothing changes, {off['recomputed']:.2e} with all regions recomputed")
    del plain, again

    rows: dict[Picks, list[tuple[float, int]]] = {}

    def measured(picks: Picks) -> None:
        bench.apply(modules_of(layers, picks))
        rows.setdefault(picks, []).append(bench.measure(steps, warmup))
        ms, size = rows[picks][-1]
        say(f"{_told(parts, picks)}: {ms:.1f} ms, {size / 2**30:.2f} GiB")

    uniform = {some: (some,) * len(layers) for some in sets}
    for picks in uniform.values():
        measured(picks)
    profile = {some: rows[picks][0] for some, picks in uniform.items()}
    proposals = _proposals(bench, layers, sets, profile)
    for picks in proposals:
        if picks not in rows:
            measured(picks)
    first = {picks: (median(t for t, _ in found), max(p for _, p in found)) for picks, found in rows.items()}
    picked = {some: _picked(first, picks) for some, picks in uniform.items()}
    before = {picks: len(found) for picks, found in rows.items()}
    for _ in range(rounds):
        for picks in dict.fromkeys([*picked.values(), *uniform.values()]):
            if time.monotonic() < until:
                measured(picks)
        last = {picks: found[before[picks] :] or found for picks, found in rows.items()}
        yield _report(last, parts, uniform, proposals, picked, off, same)


def _proposals(
    bench: Bench, layers: Sequence[nn.Module], sets: Sequence[tuple[str, ...]], profile: Mapping[tuple[str, ...], tuple[float, int]]
) -> list[Picks]:
    """Every set in all layers but the last, and what the knapsack gives from what every set saves and costs a layer. ``profile``:
    milliseconds and peak of every set in all layers."""
    count, (fastest, full) = len(layers), profile[()]

    def peak_of(inner: tuple[str, ...], last: tuple[str, ...]) -> int:
        bench.apply(modules_of(layers, [*[inner] * (count - 1), last]))
        return bench.measure(1, 0)[1]

    bare = peak_of((), ())  # of one batch, as those that it is compared with
    saved = {some: ((bare - peak_of(some, ())) / max(1, count - 1), bare - peak_of((), some)) for some in sets if some}
    saved[()] = (0.0, 0)
    most = tuple(max(place) for place in zip(*saved.values()))
    # nothing is ever taken to be faster than no recomputation
    groups = [[(most[place] - saved[s][place], max(0.0, (profile[s][0] - fastest) / count)) for s in sets] for place in (0, 1)]
    least = full - (count - 1) * most[0] - most[1]
    peaks = sorted({p for t, p in profile.values() if not any(u <= t and q < p for u, q in profile.values())})
    found: list[Picks] = [(*[some] * (count - 1), ()) for some in sets]
    for budget in sorted({*peaks, *((a + b) / 2 for a, b in zip(peaks, peaks[1:]))}, reverse=True):
        picks = choose([*[groups[0]] * (count - 1), groups[1]], budget - least + 1.0)
        if picks is not None:
            found.append(tuple(sets[i] for i in picks))
    return list(dict.fromkeys(found))


def _picked(measured: Mapping[Picks, tuple[float, int]], uniform: Picks) -> Picks:
    """The fastest of all ``measured`` (milliseconds, peak) that needs no more memory than ``uniform``."""
    own, limit = measured[uniform]
    best = min((picks for picks, (_, peak) in measured.items() if peak <= limit * 1.001), key=lambda picks: measured[picks][0])
    return best if measured[best][0] < own * (1 - CLEARLY) else uniform


def _told(parts: Sequence[str], picks: Picks) -> str:
    names = {part: sum(part in some for some in picks) for part in parts}
    return ", ".join(f"{part} x {n}" for part, n in names.items() if n) or "nothing"


def _report(
    rows: Mapping[Picks, Sequence[tuple[float, int]]],
    parts: Sequence[str],
    uniform: Mapping[tuple[str, ...], Picks],
    proposals: Sequence[Picks],
    picked: Mapping[tuple[str, ...], Picks],
    off: Mapping[str, float],
    same: bool,
) -> dict[str, Any]:

    def row(kind: str, picks: Picks, **more: Any) -> dict[str, Any]:
        times, memory = zip(*rows[picks])
        told = {"budget": kind, "recomputed": _told(parts, picks), "step ms": median(times), "peak GiB": max(memory) / 2**30}
        return {**told, "rounds": len(times), **more}

    found = {
        "gradients": [
            {"parameters": "same" if same else "differ", "off when repeated": off["repeated"], "off recomputed": off["recomputed"]}
        ],
        "uniform": [row("uniform", picks) for picks in uniform.values()],
        "proposed": [row("proposed", picks) for picks in proposals],
    }
    for line, some in zip(found["uniform"], uniform):
        pick = row("picked", picked[some])
        line |= {"picked at that peak": pick["recomputed"], "picked ms": pick["step ms"], "picked GiB": pick["peak GiB"]}
    for line in (*found["uniform"], *found["proposed"]):
        others = [o for o in (*found["uniform"], *found["proposed"]) if o is not line]
        line["on the front"] = not any(
            o["step ms"] < line["step ms"] * 0.998 and o["peak GiB"] <= line["peak GiB"] for o in others
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which nothing is measured again")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    began = time.monotonic()
    resolved = resolve(load_config(args.config, args.overrides))
    config = resolved.config
    with runtime(config) as rt, use_policy(config.kernels.default, config.kernels.ops):
        parts = build_parts(resolved, rt)
        source = iter(build_source(resolved, "train", rt))
        batches = []
        for _ in range(3):
            batch = next(source)
            batches.append(Fed(batch, batch.to(rt.device), float(batch_total(batch)), batch.tokens, None, {}))
        bench = Bench(parts, config, rt, batches)
        bench.measure(1, 2)
        args.out.mkdir(parents=True, exist_ok=True)
        until = began + args.budget
        for found in run(bench, args.steps, args.warmup, args.rounds, lambda line: print(line, flush=True), until):
            where = {**environment(rt.device), "command": " ".join(["python -m gem_parallel.bench.recompute", *sys.argv[1:]])}
            (args.out / "recompute.json").write_text(json.dumps({"environment": where, **found}, indent=1) + "\n")
            text = "\n\n".join(f"## {name}\n\n{table(rows)}" for name, rows in found.items())
            versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
            head = (
                f"{where['device']}; {versions}; {config.data.batch_size} samples, {args.steps} steps a measurement\n\n`{where['command']}`"
            )
            (args.out / "recompute.md").write_text(f"# recompute\n\n{head}\n\n{text}\n")
            print(text, flush=True)


if __name__ == "__main__":
    main()
