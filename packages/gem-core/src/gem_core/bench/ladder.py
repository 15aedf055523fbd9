"""Ladders of configurations measured one after another, each row in processes of its own, one change a row."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem_core.errors import ConfigError, RunError


@dataclass(frozen=True)
class Row:
    """``overrides`` (KEY=VALUE) on top of the configuration; ``micro`` cuts the batch into that many micro-batches, for memory."""

    name: str
    overrides: tuple[str, ...] = ()
    micro: int = 1
    gpus: int = 1


EFFICIENCY = (
    Row("padded, eager", ("data.random.padded=true", "kernels.default=eager"), micro=16),
    Row("+ length-bucketed", ("data.random.padded=true", "data.random.window=16", "kernels.default=eager"), micro=4),
    Row("jagged, eager", ("kernels.default=eager",), micro=4),
    Row("jagged, fused kernels"),
    Row("+ compile", ("train.compile=true",)),
    Row("+ fused tables", ("train.compile=true", "parallel.sparse=fbgemm")),
)
LADDERS: dict[str, tuple[Row, ...]] = {"efficiency": EFFICIENCY}

COLUMNS = ("row", "gpus", "step ms", "samples/s", "TFLOP/s", "MFU", "wasted", "memory GiB", "first step s", "imbalance")


def climb(
    config: str,
    ladder: str,
    *,
    preset: str,
    overrides: Sequence[str] = (),
    rows: Sequence[str] = (),
    batch_size: int = 512,
    steps: int = 30,
    warmup: int = 10,
    budget_s: float = 540.0,
    row_limit_s: float = 240.0,
    out: Path | None = None,
    profile: bool = False,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure the rows of a ladder and write ``train-<preset>.json`` and ``.md`` into ``out``, after every row.

    A row that fails is recorded with its error; no row is started after ``budget_s``, and none runs longer than ``row_limit_s``.

    :raises ConfigError: an unknown ladder or row.
    """
    if ladder not in LADDERS:
        raise ConfigError(f"there is no ladder {ladder!r}", where="--ladder", fix=f"use one of {', '.join(LADDERS)}")
    names = [row.name for row in LADDERS[ladder]]
    unknown = sorted(set(rows) - set(names))
    if unknown:
        raise ConfigError(f"the ladder has no row {unknown[0]!r}", where="--row", fix=f"its rows: {', '.join(names)}")
    chosen = [row for row in LADDERS[ladder] if not rows or row.name in rows]
    began, done = time.monotonic(), []
    for row in chosen:
        left = budget_s - (time.monotonic() - began)
        if left < 20:
            record: dict[str, Any] = {"row": row.name, "gpus": row.gpus, "error": "not started: the time is up"}
        else:
            folder = out / "profile" / row.name.strip("+ ").replace(" ", "-") if out is not None and profile else None
            command = _command(config, row, overrides, batch_size, steps, warmup, folder)
            record = {"row": row.name, "gpus": row.gpus, **_run(command, min(left, row_limit_s))}
        done.append(record)
        say(line(record))
        if out is not None:
            _write(out, preset, ladder, done, config, overrides)
    return done


def _command(config: str, row: Row, overrides: Sequence[str], batch: int, steps: int, warmup: int, profile: Path | None) -> list[str]:
    words = [sys.executable, "-m"]
    if row.gpus > 1:
        words += ["torch.distributed.run", "--standalone", f"--nproc-per-node={row.gpus}", "-m"]
    words += ["gem_core.bench.step", config, "--steps", str(steps), "--warmup", str(warmup)]
    settings = [*overrides, f"data.batch_size={batch // row.micro}", f"train.accumulate={row.micro}", *row.overrides]
    words += [word for setting in settings for word in ("--set", setting)]
    return words if profile is None else [*words, "--profile", str(profile)]


def _run(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return {"error": f"stopped after {limit_s:.0f} s", "command": shlex.join(command)}
    lines = output.strip().splitlines() or [""]
    if process.returncode:
        told = next((x for x in reversed(lines) if "Error" in x or "memory" in x), lines[-1])
        return {"error": told[:300], "command": shlex.join(command), "log": lines[-80:]}
    found = next((x for x in reversed(lines) if x.startswith("{")), None)
    if found is None:
        raise RunError("the measuring process printed no result", where=shlex.join(command), fix=f"its last line: {lines[-1][:200]}")
    return {**json.loads(found), "command": shlex.join(command)}


def cells(record: dict[str, Any]) -> list[str]:
    """The values of a record in the order of `COLUMNS`."""
    if "error" in record:
        return [record["row"], str(record["gpus"]), record["error"], *[""] * (len(COLUMNS) - 3)]

    def number(key: str, form: str, factor: float = 1.0) -> str:
        value = record.get(key)
        return "" if value is None else format(value * factor, form)

    return [
        record["row"],
        str(record["gpus"]),
        number("step_ms", ".1f"),
        number("samples_per_s", ",.0f"),
        number("tflops", ".1f"),
        number("mfu", ".1%") or "n/a",
        number("wasted", ".0%"),
        number("peak_memory_bytes", ".1f", 2.0**-30),
        number("first_step_s", ".1f"),
        number("imbalance", ".3f"),
    ]


def line(record: dict[str, Any]) -> str:
    """One row as text."""
    return "  ".join(f"{value:>12}" if i else f"{value:28}" for i, value in enumerate(cells(record)))


def markdown(title: str, records: Sequence[dict[str, Any]], header: Sequence[str]) -> str:
    lines = [f"# {title}", "", *header, "", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(r)) + " |" for r in records]
    reasons = {r["mfu_peak"]["reason"] for r in records if "mfu_peak" in r and r["mfu_peak"]["reason"]}
    lines += ["", *(f"MFU n/a: {reason}." for reason in sorted(reasons))]
    return "\n".join(lines).rstrip() + "\n"


def _write(out: Path, preset: str, ladder: str, records: Sequence[dict[str, Any]], config: str, overrides: Sequence[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    name = f"train-{preset}" + ("" if ladder == "efficiency" else f"-{ladder}")
    (out / f"{name}.json").write_text(json.dumps({"ladder": ladder, "overrides": list(overrides), "rows": list(records)}, indent=1) + "\n")
    first = next((r for r in records if "error" not in r), {})
    versions = ", ".join(f"{k} {v}" for k, v in first.get("versions", {}).items())
    machine = f"{first.get('device', '')}; {versions}; seed 0, random log of the preset."
    header = [machine, "FLOPs are those of real events; times are medians of 5-step windows."]
    (out / f"{name}.md").write_text(markdown(f"Training step of `{preset}`", records, header))
