"""Training on the GPUs of one host: the step of every arrangement, equality with one GPU, held-out NE.

    torchrun --nproc-per-node 2 docs/benchmarks/parallel_train.py captured equal copies speed exact ne --out OUT

The processes start once and stay, so that kernels are compiled and libraries loaded once. Before they join, each is alone: rank 0 times the
rows of one GPU, and the last rank trains what others are held against. Parts run in the order in which they are named; every row is printed
and written as soon as it is known, and a row that fails is recorded with its error.

captured  rows of the ladder ``scaling`` of `gemrec bench train` whose steps are replayed (``--preset``)
equal     losses of the same global batches in the same order, bf16 over 200 steps (``--preset-equal``)
copies    FSDP with NCCL's gathers and with the copy engine's, both built at once and given the same batches, in turn: steps, and whether
          losses are the same bit for bit
speed     the other rows of the ladder
exact     like equal, in fp32 with the reference kernels over 20 steps, every arrangement (``--preset-exact``)
ne        held-out NE of the arrangements on the planted log, against that of the first one
host      steps of 8 samples a GPU, which take as long as the host needs to launch them
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gem_core.bench import ladder
from gem_core.bench.ladder import SEVERAL, Row
from gem_core.bench.step import measure
from gem_core.config import load_config, resolve
from gem_core.model.loss import batch_total
from gem_core.ops import use_policy
from gem_core.plugins import manager
from gem_core.train.build import build_parts, build_source
from gem_core.train.feed import Fed
from gem_core.train.measure import Meter, peak
from gem_core.train.runfolder import environment
from gem_core.train.runtime import runtime
from gem_core.train.step import Outcomes, TrainStep
from gem_core.train.trainer import Trainer
from gem_parallel.bench.scaling import CAPTURED
from gem_parallel.bench.scaling import rows as scaling_rows

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
EXACT = 20
"""Steps of `exact`."""
EXACTLY = ["precision.recipe=fp32", "kernels.default=reference", 'model.interaction.experts=["wukong","wukong"]']
"""Nothing to compile, and experts that two processes can share."""
BATCHES = {"equal": 256, "exact": 32}
"""Samples of a global batch; the reference kernels take sample after sample."""


def arrangements(world: int, gathered: str, cuda: bool) -> list[Row]:
    """What `equal` and `ne` train: one-dimensional tables first."""
    half = world // 2
    fsdp, hsdp = (f"parallel.fsdp.param_dtype={gathered}",), ("parallel.replicate=2", f"parallel.hsdp.param_dtype={gathered}")
    flat = ("parallel.sparse=torchrec" if cuda else "parallel.sparse=gem-2d", f"parallel.model={world}")
    two = (f"parallel.model={half}", "parallel.replica=2")
    whole, touched = ("parallel.sparse=gem-2d", *two), ("parallel.sparse=gem-2d", *two, "parallel.gem-2d.exchange=touched")
    found = [
        Row("1D: DDP", ("parallel.dense=ddp", *flat)),
        Row("1D: FSDP", ("parallel.dense=fsdp", *fsdp, *flat)),
        Row("EP 2", ("parallel.dense=fsdp", "parallel.expert=2", *fsdp, *flat)),
        Row("fully sharded, touched", ("parallel.dense=hsdp", *hsdp, *touched)),
        Row("fully sharded, whole", ("parallel.dense=hsdp", *hsdp, *whole)),
    ]
    if cuda:
        found.append(Row("2D: TorchRec", ("parallel.dense=hsdp", *hsdp, "parallel.sparse=torchrec-2d", *two)))
    return [Row(row.name, row.overrides, gpus=world) for row in found]


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.cuda = torch.cuda.is_available()
        self.found: dict[str, list[dict[str, Any]]] = {part: [] for part in args.parts}
        self.references: dict[str, list[float]] = {}
        self.low = "bf16" if "bf16" in {spec.name for spec in manager().offers("recipe")} else "fp32"

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def config(self, preset: str, source: str) -> Path:
        path = self.args.out / f"{preset}-{source}-{self.rank}.toml"
        data = f'[data.random]\npreset = "{preset}"' if source == "random" else ""
        path.write_text(f'[data]\nsource = "{source}"\n{data}\n[model]\npreset = "{preset}"\n')
        return path

    def speed_settings(self, batch: int) -> list[str]:
        return [f"precision.recipe={self.args.recipe}", f"data.batch_size={batch}", *self.args.overrides]

    def ladder_rows(self, *, captured: bool | None, gpus: int) -> list[Row]:
        config = load_config(self.config(self.args.preset, "random"), self.speed_settings(self.args.batch))
        every = [row for row in scaling_rows(config, self.world) if row.gpus == gpus and (not self.args.row or row.name in self.args.row)]
        return [row for row in every if captured is None or (CAPTURED in row.overrides) == captured]

    # Before the processes join

    def alone(self) -> None:
        """Rank 0 times one GPU; the last one trains the references."""
        parts = self.args.parts
        with _without_launcher():
            if self.rank == self.world - 1:
                if "equal" in parts:
                    self.refer("equal", self.args.steps_equal)
                if "exact" in parts:
                    self.refer("exact", min(EXACT, self.args.steps_equal))
            if self.rank == 0:
                if self.args.after is not None:
                    self.wait()
                singles = (("captured", True, self.args.batch), ("speed", False, self.args.batch), ("host", False, 8))
                for part, captured, batch in singles:
                    for row in self.ladder_rows(captured=captured, gpus=1) if part in parts else ():
                        self.keep(part, self.attempt(lambda row=row, batch=batch: self.timed(row, batch), row))
                        _clean()

    def wait(self) -> None:
        """Compile, then wait for what runs beside."""
        row = self.ladder_rows(captured=False, gpus=1)[0]
        config = load_config(self.config(self.args.preset, "random"), [*self.speed_settings(self.args.batch), *row.overrides])
        measure(config, steps=1, warmup=1)
        _clean()
        self.say("compiled")
        until = self.began + self.args.after_limit
        while not self.args.after.exists() and time.monotonic() < until:
            time.sleep(0.2)
        self.say(f"{self.args.after.name} {'is there' if self.args.after.exists() else 'never came'}")

    def refer(self, part: str, steps: int) -> None:
        self.references[part] = losses(self.equal_config(part), self.equal_settings(part), steps, BATCHES[part])
        _clean()
        self.say(f"reference of {part}: {len(self.references[part])} steps, last loss {self.references[part][-1]:.6f}")

    # Parts

    def equal_config(self, part: str) -> Path:
        return self.config(self.args.preset_equal if part == "equal" else self.args.preset_exact, "random")

    def equal_settings(self, part: str) -> list[str]:
        single = ["parallel.sparse=fbgemm"] if self.cuda else []
        how = [f"precision.recipe={self.low}"] if part == "equal" else EXACTLY
        return [*how, "train.optimizer.lr=0.0001", *self.args.overrides, *single]

    def equal(self) -> None:
        self._equal("equal", self.wanted(self.low)[:1])

    def exact(self) -> None:
        self._equal("exact", self.wanted("fp32"))

    def wanted(self, gathered: str) -> list[Row]:
        every = arrangements(self.world, gathered, self.cuda)
        return [row for row in every if not self.args.arrangement or row.name in self.args.arrangement]

    def _equal(self, part: str, rows: Sequence[Row]) -> None:
        want = self.references[part]
        for row in rows:

            def run(row: Row = row) -> dict[str, Any]:
                got = losses(self.equal_config(part), [*self.equal_settings(part), *row.overrides], len(want), BATCHES[part])
                off = [abs(a - b) / abs(b) for a, b in zip(got, want, strict=True)]
                recipe = self.low if part == "equal" else "fp32"
                first = {"off_first_20": max(off[:20]), "off": max(off)}
                return {"recipe": recipe, "steps": len(want), **first, "losses": got, "one GPU": want}

            self.each(part, run, row)

    def copies(self) -> None:
        names = [f"{self.world}: tables 1D", f"{self.world}: tables 1D, copy engine"]
        rows = [row for name in names for row in self.ladder_rows(captured=False, gpus=self.world) if row.name == name]
        if len(rows) == len(names):
            self.each("copies", lambda: self.in_turn(rows, self.args.batch_copies), Row(" and ".join(names), (), gpus=self.world))

    def in_turn(self, rows: Sequence[Row], batch: int) -> dict[str, Any]:
        """Windows of steps of every row, in turn and on the same batches: what changes with time on a machine changes for all."""
        path, steps, window = self.config(self.args.preset, "random"), self.args.steps_eager, self.args.warmup_eager
        every = [resolve(load_config(path, [*self.speed_settings(batch), *row.overrides])) for row in rows]
        config = every[0].config
        times: list[list[float]] = [[] for _ in rows]
        found: list[list[float]] = [[] for _ in rows]
        with runtime(config) as rt, use_policy(config.kernels.default, config.kernels.ops):
            ways = [(TrainStep(p, r.config, rt, Meter(rt.device, peak("", {"fp32"}))), p) for r in every for p in [build_parts(r, rt)]]
            source = iter(build_source(every[0], "train", rt))
            feds = [Fed(b, b.to(rt.device), float(batch_total(b)), b.tokens, None, {}) for b in (next(source) for _ in range(window))]
            for step, parts in ways:
                step.set_lr(1.0)
                parts.module.train()
            for turn in range(-1, steps):
                late = time.monotonic() - self.began > self.args.budget
                if turn > 1 and rt.count([late])[0]:
                    break
                for way in range(len(rows)) if turn % 2 else reversed(range(len(rows))):
                    step, outcomes = ways[way][0], Outcomes(rt.device)
                    rt.count([True])
                    begin = self._now(rt.device)
                    for i, (fed, following) in enumerate(zip(feds, [*feds[1:], None])):
                        outcomes.push(i, step([fed], False, following if step.looks_ahead else None), [fed])
                    found[way] += [o.loss / o.weight for o in outcomes.ready(all=True)]
                    if turn >= 0:
                        times[way].append((self._now(rt.device) - begin) / window * 1e3)
        told = [{"row": r.name, "step_ms": statistics.median(t), "windows_ms": t} for r, t in zip(rows, times)]
        ratios = sorted(b / a for a, b in zip(times[0], times[-1]))
        return {
            "batch_size": batch, "steps_a_window": window, "ways": told, "ratio": statistics.median(ratios), "ratios": ratios,
            "losses_same": sum(a == b for a, b in zip(found[0], found[-1])), "losses": found,
        }  # fmt: skip

    @staticmethod
    def _now(device: torch.device) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def ne(self) -> None:
        steps, batch = self.args.steps_ne, self.args.batch_ne
        config = self.config(self.args.preset_equal, "synthetic")
        given = [f"data.synthetic.rows={batch * self.world * steps}", f"data.synthetic.eval_rows={self.args.eval_rows}"]
        given += [f"data.batch_size={batch}", f"train.steps={steps}", "train.tensorboard=false", *self.args.overrides]
        for row in self.wanted("fp32"):
            if row.name in ("1D: FSDP", "EP 2"):
                continue

            def run(row: Row = row) -> dict[str, Any]:
                folder = Path(self.args.runs) / row.name.replace(" ", "-").replace(":", "").replace(",", "")
                trainer = Trainer(load_config(config, [*given, *row.overrides]), run_dir=folder, quiet=True, overwrite=True)
                result = trainer.run()
                found = {task: values["ne"] for task, values in result.tasks.items() if values["ne"] is not None}  # too few rows
                first = next((r["ne"] for r in self.found["ne"] if "ne" in r), found)
                return {"steps": result.steps, "ne": found, "ratio": {t: v / first[t] - 1 for t, v in found.items()}}

            self.each("ne", run, row)

    def captured(self) -> None:
        self._rows("captured", self.args.batch, captured=True)

    def speed(self) -> None:
        self._rows("speed", self.args.batch, captured=False)

    def host(self) -> None:
        self._rows("host", 8, captured=False)

    def _rows(self, part: str, batch: int, *, captured: bool) -> None:
        for row in self.ladder_rows(captured=captured, gpus=self.world) if self.world > 1 else ():
            self.each(part, lambda row=row: self.timed(row, batch), row)  # type: ignore[misc]

    def timed(self, row: Row, batch: int) -> dict[str, Any]:
        config = load_config(self.config(self.args.preset, "random"), [*self.speed_settings(batch), *row.overrides])
        held = torch.cuda.memory_allocated() if self.cuda else 0
        replayed = CAPTURED in row.overrides
        steps, warmup = (self.args.steps, self.args.warmup) if replayed else (self.args.steps_eager, self.args.warmup_eager)
        result = measure(config, steps=steps, warmup=warmup, profiled=self.args.profile and batch >= self.args.batch)
        return {"batch_size": batch, "held_before_bytes": held, **result}

    # Rows

    def each(self, part: str, run: Callable[[], dict[str, Any]], row: Row) -> None:
        """One row on all ranks, if there is time; rank 0 keeps it."""
        left = [self.args.budget - (time.monotonic() - self.began)]
        dist.broadcast_object_list(left, 0)
        if left[0] < self.args.least:
            record: dict[str, Any] = _named(row) | {"error": "not started: the time is up"}
        else:
            record = self.attempt(run, row)
        errors: list[Any] = [None] * self.world
        dist.all_gather_object(errors, record.get("error"))
        if any(errors):
            record = _named(row) | {"error": next(e for e in errors if e)}
        self.keep(part, record)
        _clean()

    def attempt(self, run: Callable[[], dict[str, Any]], row: Row) -> dict[str, Any]:
        faulthandler.dump_traceback_later(self.args.stuck)
        try:
            return _named(row) | run()
        except Exception as fault:
            if not isinstance(fault, torch.OutOfMemoryError):
                print(f"rank {self.rank}, {row.name}: {traceback.format_exc()[-1500:]}", flush=True)
            return _named(row) | {"error": f"{type(fault).__name__}: {str(fault).splitlines()[0][:250]}"}
        finally:
            faulthandler.cancel_dump_traceback_later()

    def keep(self, part: str, record: dict[str, Any]) -> None:
        self.found[part].append(record)
        if self.rank:
            return
        ladder_like = part in ("captured", "speed", "host")
        if ladder_like and "error" not in record:
            singles = [r for r in self.found[part] if r["gpus"] == 1 and "error" not in r]
            if singles and record["gpus"] > 1:
                record["scaling"] = record["samples_per_s"] / record["gpus"] / singles[0]["samples_per_s"]
            self.say(f"{part}: {ladder.line(record, SEVERAL)}  {record['step_ms_range']}")
        else:
            told = {k: v for k, v in record.items() if k not in ("losses", "one GPU", "overrides")}
            self.say(f"{part}: {told}")
        name = f"train-{self.args.preset}-{part}" if ladder_like or part == "copies" else f"parallel-{part}"
        data: Any = {"environment": environment(torch.device("cuda", 0) if self.cuda else torch.device("cpu")), "rows": self.found[part]}
        if ladder_like:
            data = {"ladder": "scaling", "overrides": self.speed_settings(record.get("batch_size", self.args.batch)), **data}
        (self.args.out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")


def _named(row: Row) -> dict[str, Any]:
    return {"row": row.name, "gpus": row.gpus, "overrides": list(row.overrides)}


def losses(path: Path, settings: Sequence[str], steps: int, batch: int) -> list[float]:
    """Of ``steps`` steps on the same global batches of ``batch`` samples: rank r of W takes the r-th of W parts of each."""
    resolved = resolve(load_config(path, settings))
    config = resolved.config
    with runtime(config) as rt, use_policy(config.kernels.default, config.kernels.ops):
        parts = build_parts(resolved, rt)
        step = TrainStep(parts, config, rt, Meter(rt.device, peak("", {"fp32"})))
        step.set_lr(1.0)
        outcomes, found = Outcomes(rt.device), []
        source: Any = build_source(resolved, "train", rt)
        parts.module.train()
        share = batch // rt.world

        def fed(number: int) -> Fed:
            begin = number * batch + rt.rank * share
            drawn = source.draw(np.arange(begin, begin + share, dtype=np.int64))
            return Fed(drawn, drawn.to(rt.device), float(batch_total(drawn)), drawn.tokens, None, {})

        current = fed(0)
        for number in range(steps):
            following = fed(number + 1)
            outcomes.push(number, step([current], False, following if step.looks_ahead else None), [current])
            found += [o.loss / o.weight for o in outcomes.ready()]
            current = following
        return found + [o.loss / o.weight for o in outcomes.ready(all=True)]


@contextmanager
def _without_launcher() -> Iterator[None]:
    """As if this process had been started alone; it keeps its GPU."""
    kept = {name: os.environ.pop(name) for name in LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("captured", "equal", "copies", "speed", "exact", "ne", "host"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="base", help="of the rows that are timed")
    parser.add_argument("--preset-equal", default="small", help="of equal and ne")
    parser.add_argument("--preset-exact", default="tiny")
    parser.add_argument("--recipe", default="bf16", help="of the rows that are timed")
    parser.add_argument("--batch", type=int, default=512, help="samples a GPU of the rows that are timed")
    parser.add_argument("--batch-copies", type=int, default=1536, help="of copies: so many that the device bounds a step, not the host")
    parser.add_argument("--steps", type=int, default=20, help="of captured rows")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps-eager", type=int, default=10, help="of the other rows; of copies: windows")
    parser.add_argument("--warmup-eager", type=int, default=4, help="of copies: steps of a window")
    parser.add_argument("--steps-equal", type=int, default=200, help="at most")
    parser.add_argument("--steps-ne", type=int, default=300)
    parser.add_argument("--batch-ne", type=int, default=256, help="samples a GPU, of ne")
    parser.add_argument("--eval-rows", type=int, default=100_000)
    parser.add_argument("--row", action="append", default=[], help="of the ladder: only this one; may be repeated")
    parser.add_argument("--arrangement", action="append", default=[], help="of equal, exact and ne: only this one; may be repeated")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--profile", action="store_true", help="times of communication, from three more steps")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no row is begun")
    parser.add_argument("--after", type=Path, help="time nothing before this file exists: something else runs beside")
    parser.add_argument("--after-limit", type=float, default=75.0, help="seconds after which it is not waited for any more")
    parser.add_argument("--least", type=float, default=8.0, help="seconds that must be left to begin a row")
    parser.add_argument("--stuck", type=float, default=60.0, help="seconds after which a row tells where it is")
    parser.add_argument("--runs", default="/tmp/parallel-runs", help="run folders of ne")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    if run.cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    run.alone()
    dist.init_process_group("cpu:gloo,cuda:nccl" if run.cuda else "gloo", timeout=timedelta(seconds=150))
    shared: list[Any] = [None] * run.world
    dist.all_gather_object(shared, run.references)
    run.references = shared[-1]
    for part in args.parts:
        getattr(run, part)()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
