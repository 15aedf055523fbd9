"""Training steps of one configuration in bf16 and in a quantised recipe, with and without its guard, in one process.

Every variant is a run of its own: model, optimizer, guard, recorded steps. All train on the same batches, kept on the device. The two that
are compared are in memory together and have a window of steps each in every round, the order turning; ratios are of windows of the same
round. Where two do not fit, they come one after the other, the first, the second, the second, the first. Sampled steps, which leave the GPU
waiting, are timed after the rounds, and so are the forward passes that a comparison with bf16 on held-out rows takes.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from gem_core.bench import page
from gem_core.config import config_from_dict, resolve
from gem_core.config.load import plain
from gem_core.config.schema import Config
from gem_core.ops import use_policy
from gem_core.train.build import Parts, build_parts, build_source
from gem_core.train.feed import Fed, Feed
from gem_core.train.measure import Meter, peak
from gem_core.train.runfolder import device_name, environment
from gem_core.train.runtime import Runtime, runtime
from gem_core.train.step import Outcomes, TrainStep
from gem_precision.guard import GuardConfig

NEVER = 10**9
SAMPLED = 2
"""Sampled steps a window."""


@dataclass
class _Run:
    """One variant. ``at``: steps made."""

    parts: Parts
    step: TrainStep
    outcomes: Outcomes
    at: int = 0
    losses: list[float] = field(default_factory=list)

    def __call__(self, fed: Fed) -> None:
        self.at += 1
        vector = self.step([fed], False, None)
        self.outcomes.push(self.at, vector, [fed])
        self.parts.guard.on_step(self.at, vector[0] / vector[1])
        self.losses += [o.loss / o.weight for o in self.outcomes.ready()]


def measure(
    config: Config,
    recipe: str = "fp8-block",
    *,
    steps: int = 10,
    rounds: int = 7,
    warmup: int = 6,
    batches: int = 2,
    guard: bool = True,
    apart: bool = False,
    tell: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Times of a step of ``config`` by variant: ``bf16`` and ``recipe``; with ``guard`` also the recipe with every linear quantised, slow
    or not, its guard off (``all``) and on, between two samples (``watched``). ``ratios``: median, lowest and highest over the rounds of
    bf16 / recipe and of watched / all. ``apart``: one model in memory at a time, each built twice, with ``rounds`` windows each time.

    ``overhead``: share of such a step that the guard takes with default periods: watching, samples, comparisons on held-out rows.
    ``tell`` gets a line as each variant is ready.
    :raises GemError: what training would raise.
    """
    every: dict[str, Any] = {"allow_slow": True}
    variants: dict[str, tuple[str, Mapping[str, Any]]] = {"bf16": ("bf16", {}), recipe: (recipe, {})}
    if guard:
        variants["all"] = (recipe, every | {"guard": {"enabled": False}})
        variants["watched"] = (recipe, every | {"guard": {"sample_every": NEVER, "drift_every": NEVER}})
    pairs = [list(variants)[i : i + 2] for i in range(0, len(variants), 2)]
    together = [[name] for first, second in pairs for name in (first, second, second, first)] if apart else pairs
    with runtime(config) as rt, use_policy(config.kernels.default, config.kernels.ops):
        feed = Feed(build_source(resolve(config), "train", rt), rt.device, None)
        given = list(islice(feed, batches))
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        losses: dict[str, float] = {}
        found: dict[str, Any] = {}
        for names in together:
            runs = {}
            for name in names:
                began = time.perf_counter()
                chosen, options = variants[name]
                runs[name] = _build(_with(config, chosen, options), rt)
                for i in range(warmup * batches):
                    runs[name](given[i % batches])
                rt.wait()
                if tell is not None:
                    tell(f"{name}: ready after {time.perf_counter() - began:.1f} s{_memory(rt)}")
            for turn in range(rounds):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    seconds[name].append(_window(runs[name], given, steps, rt))
            losses |= {name: run.losses[-1] for name, run in runs.items()}
            if recipe in runs:
                sites = [p for _, p, _ in runs[recipe].parts.guard.describe()]
                found |= {"sites": {p: sites.count(p) for p in dict.fromkeys(sites)}, "refused": _refused(runs[recipe].parts)}
            if "watched" in runs and "samples_ms" not in found:
                found["samples_ms"] = _guard_passes(runs["watched"], given, rounds, rt)
                found["watched_sites"] = len(runs["watched"].parts.guard.sites)  # type: ignore[attr-defined]
            runs.clear()
            gc.collect()
            if rt.device.type == "cuda":
                torch.cuda.empty_cache()
        result = _result(seconds, recipe, guard)
        if guard:
            sampled, passes = found.pop("samples_ms")
            base, watched = statistics.median(seconds["all"]), result["ratios"]["watched"][0]
            result |= _guard_cost(sampled, passes, given[0].host.size, base, watched)
        return result | found | {
            "recipe": recipe,
            "losses": {name: losses[name] for name in variants},
            "seconds": seconds,
            "samples": given[0].host.size,
            "captured": config.train.capture,
            "apart": apart,
            **environment(rt.device),
        }  # fmt: skip


def _memory(rt: Runtime) -> str:
    return f", {torch.cuda.memory_reserved(rt.device) / 2**30:.1f} GiB reserved" if rt.device.type == "cuda" else ""


def _build(config: Config, rt: Runtime) -> _Run:
    resolved = resolve(config)
    torch.manual_seed(config.run.seed)
    parts = build_parts(resolved, rt)
    meter = Meter(rt.device, peak(device_name(rt.device), parts.precisions()))
    step = TrainStep(parts, resolved.config, rt, meter)
    step.set_lr(1.0)
    parts.module.train()
    return _Run(parts, step, Outcomes(rt.device))


def _with(config: Config, recipe: str, options: Mapping[str, Any]) -> Config:
    data = plain(config)
    data["precision"] = {"recipe": recipe, recipe: {**data.get("precision", {}).get(recipe, {}), **options}}
    return config_from_dict(data)


def _window(run: Callable[[Fed], None], given: Sequence[Fed], steps: int, rt: Runtime) -> float:
    """Seconds a step."""
    rt.wait()
    began = time.perf_counter()
    for i in range(steps):
        run(given[i % len(given)])
    rt.wait()
    return (time.perf_counter() - began) / steps


def _result(seconds: Mapping[str, Sequence[float]], recipe: str, guard: bool) -> dict[str, Any]:
    def ratio(above: str, below: str) -> tuple[float, float, float]:
        found = [a / b for a, b in zip(seconds[above], seconds[below])]
        return statistics.median(found), min(found), max(found)

    ratios = {"speed-up": ratio("bf16", recipe)} | ({"watched": ratio("watched", "all")} if guard else {})
    return {"step_ms": {name: 1e3 * statistics.median(s) for name, s in seconds.items()}, "ratios": ratios}


def _guard_passes(run: _Run, given: Sequence[Fed], rounds: int, rt: Runtime) -> tuple[float, list[float]]:
    """Seconds of a sampled step, and of the forward passes in the precisions in force and in bf16."""
    guard = run.parts.guard
    real, guard.config = guard.config, guard.config.model_copy(update={"sample_every": 1})  # type: ignore[attr-defined]
    _window(run, given, SAMPLED, rt)
    sampled = statistics.median(_window(run, given, SAMPLED, rt) for _ in range(rounds))
    guard.config = real  # type: ignore[attr-defined]
    run.parts.module.eval()
    passes = []
    for precision in (nullcontext, guard.shadow):  # type: ignore[attr-defined]
        with torch.no_grad(), precision():
            _window(lambda fed: run.parts.module(fed.batch), given, SAMPLED, rt)
            passes.append(statistics.median(_window(lambda fed: run.parts.module(fed.batch), given, SAMPLED, rt) for _ in range(rounds)))
    run.parts.module.train()
    return sampled, passes


def _guard_cost(sampled: float, passes: Sequence[float], samples: int, step: float, watched: float) -> dict[str, Any]:
    periods = GuardConfig()
    compared = sum(passes) * periods.drift_rows / samples
    parts = {
        "watching": watched - 1,
        "samples": (sampled - step) / periods.sample_every / step,
        "comparisons": compared / periods.drift_every / step,
    }
    return {"sampled_ms": 1e3 * sampled, "forward_ms": [1e3 * s for s in passes], "overhead": sum(parts.values()), "overhead_parts": parts}


def _refused(parts: Parts) -> list[str]:
    """Linears that stay in bf16 because they would be slower, by reason."""
    reasons: dict[str, int] = {}
    for _, _, why in parts.guard.describe():
        if "slower" in why or "do not pay" in why:
            reasons[why] = reasons.get(why, 0) + 1
    return [f"{count} x {why}" for why, count in reasons.items()]


def markdown(result: Mapping[str, Any], command: str) -> str:
    """The result as a page."""
    ms, ratios, recipe = result["step_ms"], result["ratios"], result["recipe"]

    def share(name: str) -> str:
        middle, low, high = ratios[name]
        return f"{middle:.3f} ({low:.3f} to {high:.3f})"

    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    lines = [
        f"`{command}`, commit {str(result['commit'])[:9]}", "",
        f"{result['device']}; {versions}. {result['samples']} samples, {'captured' if result['captured'] else 'eager'} steps; the same "
        f"batches, {len(result['seconds']['bf16'])} windows each, "
        + ("one model in memory at a time." if result["apart"] else "interleaved."), "",
        "| step | ms |", "|---|---|", *(f"| {name} | {value:.2f} |" for name, value in ms.items()), "",
        f"bf16 / {recipe}: {share('speed-up')}. Losses: " + ", ".join(f"{k} {v:.5f}" for k, v in result["losses"].items()) + ".",
    ]  # fmt: skip
    if "overhead" in result:
        parts = ", ".join(f"{k} {100 * v:+.2f} %" for k, v in result["overhead_parts"].items())
        lines += [
            "", f"With every linear quantised, slow or not, the guard of {result['watched_sites']} sites takes "
            f"{100 * result['overhead']:.2f} % of a step ({parts}); watched / all: {share('watched')}; a sampled step takes "
            f"{result['sampled_ms']:.1f} ms.",
        ]  # fmt: skip
    lines += ["", "In bf16, since slower otherwise:", "", *(f"- {r}" for r in result["refused"])] if result["refused"] else []
    return "\n".join(lines) + "\n"


def write(result: Mapping[str, Any], folder: Path, name: str, command: str) -> None:
    """``precision-step-<name>.json`` and ``.md``."""
    title = f"# A training step of `{name}` in bf16 and {result['recipe']}\n\n"
    page.write(folder, f"precision-step-{name}", {**result, "command": command}, title + markdown(result, command))
