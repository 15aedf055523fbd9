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
from html import escape
from pathlib import Path
from typing import Any

import torch

from gem_core.bench import page
from gem_core.config import load_config
from gem_core.errors import ConfigError, RunError
from gem_core.hookspecs import LadderSpec
from gem_core.plugins import manager


@dataclass(frozen=True)
class Row:
    """``overrides`` (KEY=VALUE) on top of the configuration; ``at_once``: the most samples of a micro-batch, for memory; 0: all of them."""

    name: str
    overrides: tuple[str, ...] = ()
    at_once: int = 0
    gpus: int = 1

    def cut(self, batch: int) -> tuple[int, int]:
        """Samples of a micro-batch and how many of them make a batch of ``batch``."""
        count = -(-batch // self.at_once) if self.at_once else 1
        return batch // count, count


_TORCH = ("kernels.ops.norm=compiled", "kernels.ops.norm_linear=compiled", "kernels.ops.mlp=compiled")
"""Norms and MLPs by torch.compile of the unfused form; see the package that offers "compiled"."""

_PADDED, _BUCKETED = "data.random.padded=true", "data.random.window=16"
_MATMUL = "kernels.ops.norm_gdpa=matmul"
_COMPILED, _CAPTURED, _FUSED = "train.compile=true", "train.capture=true", "parallel.sparse=fbgemm"
_ROWS = "parallel.fbgemm.output=bf16"

EFFICIENCY = (
    Row("padded, eager", (_PADDED, "kernels.default=eager", _FUSED), at_once=32),
    Row("+ length-bucketed", (_PADDED, _BUCKETED, "kernels.default=eager", _FUSED), at_once=128),
    Row("+ compile, SDPA", (_PADDED, _BUCKETED, "kernels.ops.jagged_attention=sdpa", _MATMUL, *_TORCH, _COMPILED, _FUSED), at_once=128),
    Row("jagged, eager", ("kernels.default=eager", _FUSED), at_once=128),
    Row("jagged, varlen_attn + compile", (_BUCKETED, "kernels.ops.jagged_attention=varlen", _MATMUL, *_TORCH, _COMPILED, _FUSED)),
    Row("our attention + compile", (*_TORCH, _COMPILED, _FUSED)),
    Row("our kernels", (_FUSED,)),
    Row("+ compile", (_COMPILED, _FUSED)),
    Row("+ step as a CUDA graph", (_CAPTURED, _FUSED)),
    Row("+ looked-up rows in bf16", (_CAPTURED, _FUSED, _ROWS)),
    Row("+ precision fp8", (_CAPTURED, _FUSED, _ROWS, "precision.recipe=fp8-block")),
    Row("the core's tables", (_CAPTURED,)),
)
"""One change a row as far as changes combine (a captured step is not compiled). All tables but those of the last row are updated in the
backward pass."""


def builtin_specs() -> list[LadderSpec]:
    return [LadderSpec("efficiency", lambda config, devices: EFFICIENCY)]


COLUMNS = ("row", "gpus", "step ms", "samples/s", "TFLOP/s", "MFU", "wasted", "memory GiB", "first step s", "loss", "imbalance")
SEVERAL = (*COLUMNS, "scaling", "exposed ms", "predicted ms", "predicted GiB")
"""Columns of a ladder whose rows run on several devices or are predicted."""

NOISE = {"loss": 2e-3, "grad_norm": 3e-2}
"""What two rows' losses and gradient norms on the same samples may differ by, relatively: products in bf16, summed in another order."""

QUANTISED = {"loss": 1e-2, "grad_norm": 1.5e-1}
"""Likewise where a row's products are quantised."""


def climb(
    config: str,
    ladder: str | LadderSpec,
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
    devices: int | None = None,
    cluster: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure the rows of a ladder and write ``train-<preset>.json``, ``.md`` and, for one of several devices, ``.svg`` into ``out``, after
    every row.

    A row that fails is recorded with its error; no row is started after ``budget_s``, and none runs longer than ``row_limit_s``.

    :param devices: most devices of a row; None: those of this machine.
    :param cluster: cluster file that rows are predicted for, where the ladder can.
    :raises PluginError: an unknown ladder.
    :raises ConfigError: an unknown row.
    :raises RunError: rows that should compute the same do not (see `step.check`); raised at the end, everything is written by then.
    """
    spec: LadderSpec = manager().find("ladder", ladder) if isinstance(ladder, str) else ladder
    batch = [f"data.batch_size={batch_size}"]
    every = spec.rows(load_config(config, [*overrides, *batch]), devices or torch.cuda.device_count() or 1)
    names = [row.name for row in every]
    unknown = sorted(set(rows) - set(names))
    if unknown:
        raise ConfigError(f"the ladder has no row {unknown[0]!r}", where="--row", fix=f"its rows: {', '.join(names)}")
    chosen = [row for row in every if not rows or row.name in rows]
    began, done = time.monotonic(), []
    columns = SEVERAL if spec.profile or cluster or any(row.gpus > 1 for row in chosen) else COLUMNS
    say("  ".join(f"{name:>12}" if i else f"{name:28}" for i, name in enumerate(columns)))
    for row in chosen:
        left = budget_s - (time.monotonic() - began)
        record: dict[str, Any] = {
            "row": row.name,
            "gpus": row.gpus,
            "overrides": list(row.overrides),
            "batch_size": row.cut(batch_size)[0],
        }
        if cluster is not None and spec.predict is not None:
            # Beside the row's own start it would take processor time from it, so before.
            record["predicted"] = dict(spec.predict(load_config(config, [*overrides, *batch, *row.overrides]), row.gpus, cluster))
            left = budget_s - (time.monotonic() - began)
        if left < 20:
            record["error"] = "not started: the time is up"
        else:
            folder = out / "profile" / row.name.strip("+ ").replace(" ", "-") if out is not None and profile else None
            command = _command(config, row, overrides, batch_size, steps, warmup, folder)
            record |= _run([*command, "--summary"] if spec.profile and folder is None else command, min(left, row_limit_s))
        done.append(record)
        _scaling(done)
        _compare(done)
        say(line(record, columns))
        if out is not None:
            _write(out, preset, spec.name, done, overrides, columns)
    wrong = [f"{r['row']}: {r['differs']}" for r in done if "differs" in r]
    if wrong:
        raise RunError(
            "rows compute something else than the first one: " + "; ".join(wrong), fix="an implementation that they use is wrong"
        )
    return done


def _compare(records: Sequence[dict[str, Any]]) -> None:
    """Writes ``differs`` into the last record where it computes something else than the first record that was checked likewise."""
    last, *before = reversed(records)
    limits = QUANTISED if (last.get("mfu_peak") or {}).get("reason", "") and "quantised" in last["mfu_peak"]["reason"] else NOISE
    for kind, found in last.get("check", {}).items():
        first: Any = next((r["check"][kind] for r in reversed(before) if kind in r.get("check", {})), None)
        for name, limit in limits.items() if first is not None else ():
            off = abs(found[name] / first[name] - 1) if first[name] else abs(found[name])
            if not off <= limit:  # NaN too
                last["differs"] = f"{name} {found[name]:.4g} on {kind} histories, not {first[name]:.4g}"


def _scaling(records: Sequence[dict[str, Any]]) -> None:
    """Weak scaling of the last record: samples a second and device over those of the first record of one device, of a captured step over
    those of a captured one."""
    last = records[-1]

    def captured(record: dict[str, Any]) -> bool:
        return "train.capture=true" in record["overrides"]

    singles = [r for r in records if r["gpus"] == 1 and "error" not in r and captured(r) == captured(last)]
    alone = singles[0]["samples_per_s"] if singles else None
    if alone and "error" not in last and last["gpus"] > 1:
        last["scaling"] = last["samples_per_s"] / last["gpus"] / alone


def _command(config: str, row: Row, overrides: Sequence[str], batch: int, steps: int, warmup: int, profile: Path | None) -> list[str]:
    words = [sys.executable, "-m"]
    if row.gpus > 1:
        words += ["torch.distributed.run", "--standalone", f"--nproc-per-node={row.gpus}", "-m"]
    words += ["gem_core.bench.step", config, "--steps", str(steps), "--warmup", str(warmup)]
    size, count = row.cut(batch)
    settings = [*overrides, f"data.batch_size={size}", f"train.accumulate={count}", *row.overrides]
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
        # the launcher's own report of lost processes follows what they said, at length
        own = lines[: next((i for i, x in enumerate(lines) if "ChildFailedError" in x), len(lines))]
        told = next((x for x in reversed(own) if "Error" in x or "memory" in x), lines[-1])
        return {"error": told[:300], "command": shlex.join(command), "log": own[-80:]}
    found = next((x for x in reversed(lines) if x.startswith("{")), None)
    if found is None:
        raise RunError("the measuring process printed no result", where=shlex.join(command), fix=f"its last line: {lines[-1][:200]}")
    return {**json.loads(found), "command": shlex.join(command)}


def cells(record: dict[str, Any], columns: Sequence[str] = COLUMNS) -> list[str]:
    """The values of a record in the order of ``columns``."""
    predicted, profiled = record.get("predicted") or {}, record.get("profile") or {}

    def number(value: float | None, form: str, factor: float = 1.0) -> str:
        return "" if value is None else format(value * factor, form)

    def off(value: float | None, measured: float | None) -> str:
        return f" ({value / measured - 1:+.0%})" if value and measured else ""

    step, memory = record.get("step_ms"), record.get("peak_memory_bytes")
    checked = record.get("check") or {}
    loss = (checked.get("jagged") or checked.get("equal") or {}).get("loss")
    texts = {
        "row": record["row"],
        "gpus": str(record["gpus"]),
        "step ms": record.get("error") or number(step, ".1f"),
        "samples/s": number(record.get("samples_per_s"), ",.0f"),
        "TFLOP/s": number(record.get("tflops"), ".1f"),
        "MFU": number(record.get("mfu"), ".1%") or ("" if "error" in record else "n/a"),
        "wasted": number(record.get("wasted"), ".0%"),
        "memory GiB": number(memory, ".1f", 2.0**-30),
        "first step s": number(record.get("first_step_s"), ".1f"),
        "loss": number(loss, ".4f") + (" differs" if "differs" in record else ""),
        "imbalance": number(record.get("imbalance"), ".3f"),
        "scaling": number(record.get("scaling"), ".1%"),
        "exposed ms": number(profiled.get("exposed_ms"), ".1f"),
        "predicted ms": number(predicted.get("step_ms"), ".1f") + off(predicted.get("step_ms"), step),
        "predicted GiB": number(predicted.get("memory_bytes"), ".1f", 2.0**-30) + off(predicted.get("memory_bytes"), memory),
    }
    return [texts[column] for column in columns]


def line(record: dict[str, Any], columns: Sequence[str] = COLUMNS) -> str:
    """One row as text."""
    return "  ".join(f"{value:>12}" if i else f"{value:28}" for i, value in enumerate(cells(record, columns)))


def markdown(title: str, records: Sequence[dict[str, Any]], header: Sequence[str], columns: Sequence[str] = COLUMNS) -> str:
    lines = [f"# {title}", "", *header, "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cells(r, columns)) + " |" for r in records]
    reasons = {r["mfu_peak"]["reason"] for r in records if "mfu_peak" in r and r["mfu_peak"]["reason"]}
    lines += ["", *(f"MFU n/a: {reason}." for reason in sorted(reasons))]
    return "\n".join(lines).rstrip() + "\n"


def picture(records: Sequence[dict[str, Any]]) -> str:
    """Bars of the steps' times as SVG; a stroke marks the prediction, the dark part is exposed communication."""
    shown = [r for r in records if "error" not in r]
    most = max((max(r["step_ms"], (r.get("predicted") or {}).get("step_ms", 0.0)) for r in shown), default=1.0)
    left, width, height = 330, 420, 22
    parts = []
    for i, r in enumerate(shown):
        y, scale = 8 + i * height, width / most
        exposed = (r.get("profile") or {}).get("exposed_ms") or 0.0
        parts.append(f"<text x='{left - 8}' y='{y + 12}' text-anchor='end'>{escape(r['row'])}</text>")
        parts.append(f"<rect x='{left}' y='{y}' width='{r['step_ms'] * scale:.1f}' height='15' fill='#1f6feb'/>")
        parts.append(f"<rect x='{left}' y='{y}' width='{exposed * scale:.1f}' height='15' fill='#0b3d91'/>")
        if "predicted" in r:
            x = left + r["predicted"]["step_ms"] * scale
            parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{y - 3}' y2='{y + 18}' stroke='#d1622b' stroke-width='2'/>")
        parts.append(f"<text x='{left + width + 8}' y='{y + 12}'>{r['step_ms']:.1f} ms</text>")
    size = f"width='{left + width + 90}' height='{16 + height * len(shown)}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} font-family='sans-serif' font-size='12'>{''.join(parts)}</svg>\n"


def _write(
    out: Path, preset: str, ladder: str, records: Sequence[dict[str, Any]], overrides: Sequence[str], columns: Sequence[str]
) -> None:
    name = f"train-{preset}" + ("" if ladder == "efficiency" else f"-{ladder}")
    first = next((r for r in records if "error" not in r), {})
    machine = f"{page.machine(first)}; seed 0, random log of the preset."
    header = [machine, "FLOPs are those of real events; times are medians of 5-step windows."]
    if any(r.get("check") for r in records):
        header.append(
            f"Loss: on the same samples and initial parameters, checked to be within {NOISE['loss']:.1%} of the first row's (gradient "
            f"norm: {NOISE['grad_norm']:.0%}; quantised rows {QUANTISED['loss']:.0%} and {QUANTISED['grad_norm']:.0%}); padded rows, whose "
            "padding is computed, on histories that are equally long."
        )
    result = {"ladder": ladder, "overrides": list(overrides), "rows": list(records)}
    page.write(out, name, result, markdown(f"Training step of `{preset}`", records, header, columns))
    if columns != COLUMNS:
        (out / f"{name}.svg").write_text(picture(records))
