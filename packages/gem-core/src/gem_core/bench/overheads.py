"""What a training step costs beside itself: the trainer's metrics and logs, and waiting for data. Ratios of windows interleaved in one run.

    python -m gem_core.bench.overheads config.toml --set precision.recipe=bf16 --steps 20 --rounds 5 --out docs/benchmarks

The trainer runs the configuration as ``gemrec train`` does, without evaluation and checkpoints. In every round the same batches are
trained on three times: as the source delivers them (``fed``), from the device's memory with all that the trainer does for a step
(``logged``), and from there by the step alone, whose outcomes are read but go nowhere (``bare``). ``logged`` over ``bare`` is what metrics
and logs cost, ``fed`` over ``logged`` what data cost.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gem_core.bench import page
from gem_core.config import Config, load_config
from gem_core.errors import GemError, RunError
from gem_core.train.contract import Callback, RunInfo
from gem_core.train.feed import Fed, grouped
from gem_core.train.trainer import Trainer

LEAD = 8
"""Steps before a window of ``fed`` that count nowhere: sources read ahead while the other windows run, which is used up first."""

FIXED = ("train.steps=1000000000", "train.log_every=10", "eval.max_batches=1", "eval.every=1000000000")


class _Measured(RunError):
    """Ends a run that has been measured."""


class _Silent:
    """A meter that takes no time."""

    def mark(self, phase: str | None) -> None:
        pass


class _Waits(Callback):
    """The share of time that the trainer's own log says was spent waiting for data."""

    def __init__(self) -> None:
        self.counting, self.seen = False, list[float]()

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.seen) if self.seen else None

    def on_step(self, run: RunInfo, record: Mapping[str, Any] | None) -> None:
        if self.counting and record is not None and record.get("data_wait") is not None:
            self.seen.append(record["data_wait"])


class Probe(Trainer):
    """A trainer whose loop measures; see the module."""

    def __init__(self, config: Config, folder: Path, *, steps: int, rounds: int, warmup: int) -> None:
        self.waits = _Waits()
        super().__init__(config, run_dir=folder, quiet=True, callbacks=[self.waits])
        self.steps, self.rounds, self.warmup = steps, rounds, warmup
        self.seconds: dict[str, list[float]] = {"fed": [], "logged": [], "bare": []}

    def _loop(self) -> str:
        self.parts.module.train()
        self.meter.mark(None)
        source = grouped(self.feed, self.config.train.accumulate, self.step.looks_ahead)
        kept: list[tuple[Sequence[Fed], Fed | None]] = [next(source)]

        def fed(i: int) -> None:
            # In the trainer's loop a batch is taken while the device computes the one before; so it is at a window's edges, too.
            self._one(*kept[-1])
            kept.append(next(source))

        for i in range(self.warmup):
            fed(i)
        for _ in range(2):  # every shape twice: a captured step is recorded at its second batch
            for batches, following in kept[:-1]:
                self._bare(batches, following)
        turn = tries = 0
        while turn < self.rounds:
            tries += 1
            known, heard = self.step.news, len(self.waits.seen)
            for i in range(LEAD):
                fed(i)
            del kept[:-1]
            self.waits.counting = True
            self.seconds["fed"].append(self._window(fed))
            self.waits.counting = False
            others: list[tuple[str, Callable[[int], Any]]] = [
                ("logged", lambda i: self._one(*kept[i])),
                ("bare", lambda i: self._bare(*kept[i])),
            ]
            for name, run in others[:: 1 if turn % 2 else -1]:
                self.seconds[name].append(self._window(run))
            if self.step.news > known and tries < 4 * self.rounds:  # a captured step met a kind of batch that it had to record
                for windows in self.seconds.values():
                    windows.pop()
                del self.waits.seen[heard:]
            else:
                turn += 1
        raise _Measured("measured")

    def _bare(self, batches: Sequence[Fed], following: Fed | None) -> None:
        meter, mark = self.step.meter, self.step._mark
        self.step.meter, self.step._mark = _Silent(), _Silent().mark  # type: ignore[assignment]
        try:
            self.outcomes.push(self.info.step, self.step(batches, False, following), batches)
            self.outcomes.ready()
        finally:
            self.step.meter, self.step._mark = meter, mark

    def _window(self, run: Callable[[int], Any]) -> float:
        """Seconds a step."""
        self.runtime.wait()
        self.meter.window()  # what a log tells is of this window alone
        self.meter.mark(None)
        began = time.perf_counter()
        for i in range(self.steps):
            run(i)
        self.runtime.wait()
        return (time.perf_counter() - began) / self.steps


def measure(config: Config, folder: Path, *, steps: int = 20, rounds: int = 5, warmup: int = 10) -> dict[str, Any]:
    """``seconds`` a step of each window by kind; ``metrics`` and ``data``: medians over the rounds of what they add, as share of a step;
    ``data_wait``: the mean of what the trainer's log says, None if there were too few steps for a log.

    :raises GemError: what training would raise.
    """
    probe = Probe(config, folder, steps=steps, rounds=rounds, warmup=warmup)
    with suppress(_Measured):
        probe.run()
    keys = ("device", "versions", "commit", "seed", "parameters", "host")
    return {**shares(probe.seconds), "seconds": probe.seconds, "data_wait": probe.waits.mean} | {k: probe.header.get(k) for k in keys}


def shares(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Of windows of each round: medians of ``logged / bare - 1`` and ``fed / logged - 1``, and the lowest and highest round of both."""
    found: dict[str, Any] = {"step_ms": statistics.median(seconds["bare"]) * 1e3}
    for name, more, less in (("metrics", "logged", "bare"), ("data", "fed", "logged")):
        added = [a / b - 1 for a, b in zip(seconds[more], seconds[less])]
        found[name], found[f"{name}_range"] = statistics.median(added), [min(added), max(added)]
    return found


def table(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""

    def row(name: str, key: str) -> str:
        low, high = result[f"{key}_range"]
        return f"| {name} | {result[key]:+.2%} | {low:+.2%} to {high:+.2%} |"

    waited = result["data_wait"]
    lines = [
        "| beside a step | of its time, median | rounds |",
        "|---|---|---|",
        row("metrics and logs", "metrics"),
        row("data", "data"),
        f"| waiting for data, by the trainer's own clock | {'' if waited is None else format(waited, '.2%')} | |",
    ]
    return "\n".join(lines) + "\n"


def write(result: Mapping[str, Any], out: Path, name: str) -> None:
    """``train-<name>-overheads.json`` and ``.md`` in ``out``."""
    windows = len(result["seconds"]["bare"])
    head = (
        f"# Beside a training step of `{name}`\n\n`{result['command']}`, commit {str(result['commit'])[:9]}\n\n"
        f"{page.machine(result)}; seed {result['seed']}. A step alone: {result['step_ms']:.1f} ms. {windows} rounds; in each "
        "the same batches: as the source delivers them, then from memory with the trainer's metrics and logs (every 10 steps) and by "
        "the step alone.\n\n"
    )
    page.write(out, f"train-{name}-overheads", result, head + table(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--name", default="run", help="in the names of the files")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("bench-overheads"))
    args = parser.parse_args()
    try:
        with TemporaryDirectory() as folder:
            config = load_config(args.config, [*FIXED, *args.overrides])
            result = measure(config, Path(folder, "run"), steps=args.steps, rounds=args.rounds, warmup=args.warmup)
    except GemError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    command = shlex.join(["python", "-m", "gem_core.bench.overheads", *sys.argv[1:]])
    write({**result, "command": command}, args.out, args.name)
    print(table(result), flush=True)


if __name__ == "__main__":
    main()
