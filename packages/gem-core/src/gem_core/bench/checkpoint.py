"""What checkpoints that are written behind training's back cost it: the stall, and the steps while the writer runs.

    python -m gem_core.bench.checkpoint base --set precision.recipe=bf16 --every 150 --saves 2 --dir /fast/disk --out docs/benchmarks

A whole training of a preset on its random log, as ``gemrec train`` runs it. The host's clock is read after every step; the trainer bounds
how far the host runs ahead of the device to two steps. What a checkpoint costs is the time of the steps from the one that saves to the
first one after the writer has ended, less that of as many steps that no checkpoint touches.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gem_core.train
from gem_core.bench import of_preset, page
from gem_core.config import Config, load_config
from gem_core.errors import GemError, RunError
from gem_core.train.contract import Callback, RunInfo

WARMUP = 30
"""Steps at the start that count nowhere: kernels are compiled, allocators fill."""

INTERVAL_S = 60.0
"""What a checkpoint costs is told as share of this long a training."""


class _Measured(RunError):
    """Ends a run that has been measured."""


class Clock(Callback):
    """When each step ended, and when each checkpoint was begun and published; ends the run at ``last``, without a further checkpoint."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.ends: list[float] = []
        self.saves: list[dict[str, Any]] = []

    def on_step(self, run: RunInfo, record: Mapping[str, Any] | None) -> None:
        self.ends.append(time.perf_counter())
        self.header = run.header
        if run.step % 20 == 0:
            print(f"step {run.step} of {self.last}: {self.ends[-1] - self.ends[0]:.1f} s after the first", flush=True)
        if run.step == self.last:
            raise _Measured("measured")

    def on_checkpoint(self, run: RunInfo, path: Path, seconds: float) -> None:
        size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        self.saves.append({"step": int(path.name.removeprefix("step-")), "seen_after": run.step, "stall_s": seconds, "bytes": size})


def measure(config: Config, folder: Path, *, every: int, saves: int) -> dict[str, Any]:
    """Train with a background checkpoint every ``every`` steps, ``saves`` times; see the module and `costs`.

    :raises GemError: what training would raise.
    """
    clock = Clock((saves + 1) * every - 1)
    try:
        gem_core.train(config, run_dir=folder, callbacks=[clock])  # type: ignore[operator]
    except _Measured:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    keys = ("device", "versions", "commit", "seed", "parameters", "host")
    return {**costs(clock.ends, clock.saves), **{k: clock.header.get(k) for k in keys}}


def costs(ends: Sequence[float], saves: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """``ends[i]``: the clock after step i + 1. ``saves``: ``step`` that saves, ``seen_after`` (the step after which the checkpoint was
    known to be published), ``stall_s``, ``bytes``.

    ``step_ms``: the median step that no checkpoint touches. Of each save also ``step_ms`` while the writer ran (the ones around the
    stall left out), ``writing_s``, ``lost_s`` and ``share``: ``lost_s`` over `INTERVAL_S`.

    :raises RunError: a checkpoint was not published before the next one or the end, so nothing was apart from it.
    """
    if not saves or any(s["seen_after"] >= n for s, n in zip(saves, [*(s["step"] for s in saves[1:]), len(ends)])):
        raise RunError("a checkpoint was still being written when the next one was due", fix="take more steps between two (--every)")
    # The step that saves is touched as well: it waits for the device, so that the host starts anew from no lead.
    touched = {i for s in saves for i in range(s["step"] - 1, s["seen_after"] + 1)}
    steps = {i: ends[i] - ends[i - 1] for i in range(1, len(ends))}
    alone = [seconds for i, seconds in steps.items() if i >= WARMUP and i not in touched]
    pace = statistics.median(alone)
    rows = []
    for save in saves:
        first, last = save["step"] - 1, save["seen_after"]
        during = [steps[i] for i in range(first + 2, last + 1)]
        lost = sum(steps[i] for i in range(first, last + 1)) - (last + 1 - first) * pace
        rows.append(
            {
                **save,
                "longest_step_ms": max(steps[first], steps[first + 1]) * 1e3,
                "step_ms": statistics.mean(during) * 1e3 if during else None,
                "writing_s": ends[last] - ends[first],
                "lost_s": lost,
                "share": lost / INTERVAL_S,
            }
        )
    spread = statistics.stdev(alone) / len(alone) ** 0.5 if len(alone) > 1 else 0.0
    return {"step_ms": pace * 1e3, "step_ms_error": spread * 1e3, "steps_alone": len(alone), "saves": rows}


def table(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| checkpoint | GB | stall s | longest step ms | step while written ms | written in s | lost s | of a minute |",
        "|" + "---|" * 8,
    ]
    for i, s in enumerate(result["saves"]):
        during = "" if s["step_ms"] is None else f"{s['step_ms']:.1f}"
        lines.append(
            f"| {i + 1} | {s['bytes'] / 1e9:.1f} | {s['stall_s']:.2f} | {s['longest_step_ms']:.0f} | {during} | {s['writing_s']:.1f} "
            f"| {s['lost_s']:.2f} | {s['share']:.2%} |"
        )
    return "\n".join(lines) + "\n"


def write(result: Mapping[str, Any], out: Path, preset: str) -> None:
    """``checkpoint-<preset>.json`` and ``.md`` in ``out``."""
    head = (
        f"# Checkpoints of `{preset}` behind training's back\n\n`{result['command']}`, commit {str(result['commit'])[:9]}\n\n"
        f"{page.machine(result)}; seed {result['seed']}; checkpoints into {result['medium']}. Parameters: "
        f"{result['parameters']['dense']:,} dense, {result['parameters']['sparse']:,} in tables. A step that no checkpoint touches: "
        f"{result['step_ms']:.1f} ms (standard error {result['step_ms_error']:.2f}, {result['steps_alone']} steps).\n\n"
    )
    text = (
        "\nStall: training stands still while the state is copied to pinned memory. Lost: stall and slower steps together, until the "
        "checkpoint is published; its share is for one checkpoint a minute.\n"
    )
    page.write(out, f"checkpoint-{preset}", result, head + table(result) + text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--every", type=int, default=150)
    parser.add_argument("--saves", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--medium", default="the current folder's disk", help="what --dir is, for the table")
    parser.add_argument("--out", type=Path, default=Path("bench-checkpoint"))
    args = parser.parse_args()
    fixed = [
        "train.checkpoint_async=true", f"train.checkpoint_every={args.every}", "train.keep_checkpoints=1", "train.tensorboard=false",
        f"train.steps={(args.saves + 2) * args.every}", "train.log_every=1000000", "eval.max_batches=1",
    ]  # fmt: skip
    try:
        with TemporaryDirectory(dir=args.dir) as folder:
            config = load_config(None, [*of_preset(args.preset), *fixed, *args.overrides])
            result = measure(config, Path(folder, "run"), every=args.every, saves=args.saves)
    except GemError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    command = shlex.join(["python", "-m", "gem_core.bench.checkpoint", *sys.argv[1:]])
    write({**result, "medium": args.medium, "command": command}, args.out, args.preset)
    print(table(result), flush=True)


if __name__ == "__main__":
    main()
