"""What captured steps compute and how long they take, beside steps as usual, on one GPU.

    python docs/benchmarks/captured.py base --set precision.recipe=bf16 --set parallel.sparse=fbgemm --set data.batch_size=512 --out FOLDER

A few batches of a preset's log are trained on again and again, each way from the same seed: as usual; as usual with the samples of every
batch in another order, which is the same step with other orders of sums; captured, but nothing recorded (batches in rooms with slack, the
step cut at the look-ups); captured, recorded at the second round and replayed from then on. Batches wait on the device: no source is timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_core.bench.page import write
from gem_core.config import Config, load_config, resolve
from gem_core.model.loss import batch_total
from gem_core.ops import use_policy
from gem_core.testing.models import take
from gem_core.train.build import build_parts, build_source
from gem_core.train.captured import Captured
from gem_core.train.feed import Fed
from gem_core.train.measure import Meter, peak
from gem_core.train.optim import DenseAdamW
from gem_core.train.runfolder import environment
from gem_core.train.runtime import Runtime, choose_device
from gem_core.train.step import TrainStep

_CAPTURED = ("train.capture=true",)
WAYS = {"as usual": (), "other order of samples": (), "captured, not recorded": _CAPTURED, "replayed": _CAPTURED}
PAIRS = [("as usual", "other order of samples"), ("as usual", "captured, not recorded"), ("captured, not recorded", "replayed")]


class FirstGradients:
    """Keeps the dense gradients of the first step after it was made."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self._real = DenseAdamW.step

    def __enter__(self) -> FirstGradients:
        def step(optimizer: DenseAdamW, *given: Any) -> None:
            if not self.found:
                self.found = {n: p.grad.detach().float().cpu() for n, p in optimizer.parameters.items() if p.grad is not None}
            self._real(optimizer, *given)

        DenseAdamW.step = step  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        DenseAdamW.step = self._real  # type: ignore[method-assign]


def train(config: Config, way: str, hosts: list[Any], steps: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One way: losses and times by step, and the first gradients."""
    resolved = resolve(config)
    runtime = Runtime(choose_device(resolved.config.run.device))
    device = runtime.device
    if way == "other order of samples":
        hosts = [take(h, torch.randperm(h.size, generator=torch.Generator().manual_seed(i)).tolist()) for i, h in enumerate(hosts)]
    fed = [Fed(h, h.to(device), float(batch_total(h)), h.tokens, None, {}) for h in hosts]
    record = Captured._record
    if way == "captured, not recorded":
        Captured._record = lambda self, found: None  # type: ignore[method-assign]
    on_cuda = device.type == "cuda"
    try:
        with use_policy(resolved.config.kernels.default, resolved.config.kernels.ops), FirstGradients() as gradients:
            parts = build_parts(resolved, runtime)
            step = TrainStep(parts, resolved.config, runtime, Meter(device, peak("", set())))
            step.set_lr(1.0)
            parts.module.train()
            torch.manual_seed(resolved.config.run.seed)
            outcomes, marks, host = [], [], []
            for i in range(steps):
                following = fed[(i + 1) % len(fed)] if step.looks_ahead else None
                began = time.perf_counter()
                outcomes.append(step([fed[i % len(fed)]], False, following))
                host.append(time.perf_counter() - began)
                if on_cuda:
                    marks.append(torch.cuda.Event(enable_timing=True))
                    marks[-1].record()
    finally:
        Captured._record = record  # type: ignore[method-assign]
    losses = [float(v[0] / v[1]) for v in torch.stack(outcomes).cpu()]
    late = list(zip(marks, marks[1:]))[3 * len(fed) :]
    return {
        "losses": losses,
        "graphs": 0 if step._captured is None else sum(len(r.graphs) for r in step._captured._recorded),
        "step_ms": statistics.median(a.elapsed_time(b) for a, b in late) if late else None,
        "host_ms": statistics.median(host[3 * len(fed) :] or host) * 1e3,
    }, gradients.found


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The distance of two sets of gradients over the norm of the first."""
    assert a.keys() == b.keys()
    norm = sum(float(g.double().square().sum()) for g in a.values()) ** 0.5
    return float(sum(float((g - b[n]).double().square().sum()) for n, g in a.items()) ** 0.5 / norm)


def page(result: dict[str, Any]) -> str:
    lines = [
        f"# Captured steps of `{result['preset']}` beside steps as usual",
        "",
        f"`{result['command']}`, commit {result['commit']}",
        "",
        f"{result['device']}; {', '.join(f'{n} {v}' for n, v in result['versions'].items())}; seed {result['seed']}; {result['batches']} "
        f"batches of {result['batch_size']} samples in turn, {result['steps']} steps.",
        "",
        "| way | step ms | graphs recorded | loss of step 1, 2, 3, … last |",
        "|---|---|---|---|",
    ]
    for way, found in result["ways"].items():
        ms = "" if found["step_ms"] is None else f"{found['step_ms']:.1f}"
        losses = ", ".join(f"{x:.6f}" for x in (*found["losses"][:3], found["losses"][-1]))
        lines.append(f"| {way} | {ms} | {found['graphs']} | {losses} |")
    lines += ["", "| pair | gradients of step 1 apart | largest relative difference of losses, by quarter of the run |", "|---|---|---|"]
    for pair in result["pairs"]:
        quarters = ", ".join(f"{x:.1e}" for x in pair["losses"])
        lines.append(f"| {pair['a']} – {pair['b']} | {pair['gradients']:.1e} | {quarters} |")
    lines += [
        "",
        "Gradients: the norm of the difference over the norm. Slack rows and another order of samples both change nothing but the order of "
        "sums; what follows from that grows alike. A replayed step is the step that was recorded.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    own = ['data.source="random"', f'data.random.preset="{args.preset}"', f'model.preset="{args.preset}"', *args.overrides]
    config = load_config(None, own)
    source = iter(build_source(resolve(config), "train", Runtime(torch.device("cpu"))))
    hosts = [next(source) for _ in range(args.batches)]
    ways, gradients = {}, {}
    for way, extra in WAYS.items():
        ways[way], gradients[way] = train(load_config(None, [*own, *extra]), way, hosts, args.steps)
        print(way, json.dumps(ways[way]), flush=True)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    pairs = []
    for a, b in PAIRS:
        relative = [abs(x - y) / abs(x) for x, y in zip(ways[a]["losses"], ways[b]["losses"])]
        cut = max(1, args.steps // 4)
        quarters = [max(relative[i : i + cut]) for i in range(0, args.steps, cut)]
        pairs.append({"a": a, "b": b, "gradients": apart(gradients[a], gradients[b]), "losses": quarters})
    told = environment(choose_device(config.run.device))
    result = {
        "preset": args.preset,
        "batch_size": config.data.batch_size,
        "batches": args.batches,
        "steps": args.steps,
        "seed": config.run.seed,
        "ways": ways,
        "pairs": pairs,
        **{key: told[key] for key in ("device", "versions", "commit")},
        "command": shlex.join(["python", "docs/benchmarks/captured.py", *sys.argv[1:]]),
    }
    write(args.out, f"train-{args.preset}-captured", result, page(result))
    print(page(result), flush=True)


if __name__ == "__main__":
    main()
