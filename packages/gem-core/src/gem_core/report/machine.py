"""Sections about what the machines did: speed, memory, data, ranks, communication, plan."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from gem_core.report import html
from gem_core.report.charts import Line, bars, lines, mesh, number, shares
from gem_core.report.run import Inspection, Run
from gem_core.train.mesh import DENSE, SPARSE, Mesh

Section = tuple[str, str]
PHASES = ("data_s", "forward_s", "backward_s", "optimizer_s", "checkpoint_s")
MOST_RANKS = 64
"""Ranks that are drawn one by one."""


def over_steps(runs: Sequence[Run], key: str, name: str, scale: float = 1.0) -> str:
    """A chart of one logged number, a line a run."""
    return lines([Line(run.label if len(runs) > 1 else name, column(run.steps, key, scale)) for run in runs], x="step", y=name)


def per_run(runs: Sequence[Run], tell: Any) -> str:
    """``tell(run)`` of every run, under its name where there are several."""
    return "".join(html.part(run.label, text) if len(runs) > 1 else text for run in runs if (text := tell(run)))


def has(runs: Sequence[Run], key: str) -> bool:
    return any(r.get(key) is not None for run in runs for r in run.steps)


def speed(runs: Sequence[Run]) -> Section | None:
    if not any(run.steps for run in runs):
        return None
    text = html.part("Throughput", over_steps(runs, "samples_per_s", "samples/s"))
    if has(runs, "mfu"):
        text += html.part("Model FLOPs utilisation", over_steps(runs, "mfu", "MFU"))
    else:
        reason = (runs[0].header.get("mfu_peak") or {}).get("reason") or "no peak is known"
        text += html.note(f"MFU is not given: {reason}.")
    return "Speed", text + html.part("Where a step's time goes", per_run(runs, _phases))


def _phases(run: Run) -> str:
    spent = {phase.removesuffix("_s"): mean(run.steps, phase) for phase in PHASES}
    logged = [r["step"] for r in run.steps]
    every = (logged[-1] - logged[0]) / (len(logged) - 1) if len(logged) > 1 else 1.0
    spent["checkpoint"] /= max(1.0, every)  # logged as the sum of a window
    return shares({k: 1e3 * v for k, v in spent.items() if v > 0}, " ms a step")


def memory(runs: Sequence[Run]) -> Section | None:
    if not has(runs, "memory_bytes") and not any(run.config.plan.get("memory_bytes") for run in runs):
        return None
    text = html.part("Peak so far", over_steps(runs, "memory_bytes", "GiB", 2.0**-30)) if has(runs, "memory_bytes") else ""
    text += per_run(runs, _planned_memory)
    return "Memory", text


def _planned_memory(run: Run) -> str:
    planned = {k: v for k, v in run.config.plan.get("memory_bytes", {}).items() if isinstance(v, int | float) and k != "total"}
    if not planned:
        return ""
    return html.part("As the planner expects it at its peak", shares({k: v / 2**30 for k, v in planned.items()}, " GiB"))


def data(runs: Sequence[Run]) -> Section | None:
    text = ""
    if has(runs, "data_wait"):
        text += html.part("Waiting for data", over_steps(runs, "data_wait", "share of the time"))
        for run in runs:
            waits = [r["data_wait"] for r in run.steps if r.get("data_wait") is not None]
            stalls = sum(w > 0.1 for w in waits)
            name = f"{run.label} waited" if len(runs) > 1 else "The training waited"
            if waits:
                text += html.note(
                    f"{name} {statistics.mean(waits):.1%} of the time; more than a tenth in {stalls:,} of {len(waits):,} windows."
                )
    for run in runs[:1]:
        found = run.inspection
        for name, lengths in (found.lengths if isinstance(found, Inspection) else {}).items():
            named = ["0", *(f"{2**i:,}" for i in range(len(lengths.counts) - 1))]
            text += html.part(f"Events in {name}", bars(dict(zip(named, lengths.counts)), x="events, up to the next bar's", y="samples"))
            text += html.note(
                f"The first {lengths.samples:,} training samples: {lengths.mean:,.1f} events on average, {lengths.longest:,} at most."
            )
    return ("Data", text) if text else None


def ranks(runs: Sequence[Run]) -> Section | None:
    shown = [run for run in runs if any(r.get("imbalance") is not None for r in run.steps)]
    if not shown:
        return None
    series = []
    for run in shown:
        prefix = f"{run.label}, " if len(runs) > 1 else ""
        series.append(Line(f"{prefix}mean of the window", column(run.steps, "imbalance")))
        series.append(Line(f"{prefix}worst step", column(run.steps, "imbalance_max"), dashed=True))
    text = lines(series, x="step", y="busiest rank / mean")
    return "Ranks", text + html.note("Work of the busiest rank over the mean of all ranks: at 1.2 the others wait a sixth of the time.")


def communication(runs: Sequence[Run]) -> Section | None:
    """What profiles of a few steps measured, where there are some."""
    text = per_run(runs, _profiled)
    return ("Profile", text) if text else None


def _profiled(run: Run) -> str:
    text, on_device = "", {name: p for name, p in run.profiles.items() if p.get("wall_ms") is not None}
    if on_device:
        head = ["rank", "step ms", "busy", "idle", "communication", "of it exposed"]
        keys = ("busy_ms", "idle_ms", "communication_ms", "exposed_ms")
        rows = [[name.removeprefix("rank-"), f"{p['wall_ms']:.2f}", *(f"{p[k]:.2f}" for k in keys)] for name, p in on_device.items()]
        text += html.table(head, rows)
        slowest = max(on_device.values(), key=lambda p: float(p["wall_ms"]))
        hidden = slowest["communication_ms"] - slowest["exposed_ms"]
        split = {
            "computing": slowest["busy_ms"] - slowest["exposed_ms"],
            "exposed communication": slowest["exposed_ms"],
            "idle": slowest["idle_ms"],
        }
        text += shares({k: v for k, v in split.items() if v > 0}, " ms a step")
        text += html.note(f"The slowest rank; {hidden:.2f} ms of communication a step are hidden behind computation.")
    for name, p in list(run.profiles.items())[:1]:
        rows = [[_kernel(row["name"]), f"{row['ms']:.3f}", f"{row['share']:.1%}", f"{row['calls']:,.1f}"] for row in p.get("top", ())[:15]]
        kind = "kernels" if on_device else "operators"
        text += html.part(f"Top {kind} of {name.replace('-', ' ')}", html.table(["name", "ms a step", "share", "calls"], rows))
    return text


def _kernel(name: str) -> str:
    return name if len(name) <= 48 else f"{name[:47]}…"


def plan(runs: Sequence[Run]) -> Section | None:
    text = per_run(runs, _planned)
    return ("Plan", text) if text else None


def _planned(run: Run) -> str:
    degrees, told, predicted = run.header.get("parallel") or {}, run.header.get("plan") or [], run.config.plan
    world = int(run.header.get("world", 1))
    text = ""
    if world > 1:
        arranged = Mesh(world, *(int(degrees.get(axis, 1)) for axis in (*DENSE, *SPARSE)))
        for side, kind, strategy in ((DENSE, "Dense part", "dense"), (SPARSE, "Tables", "sparse")):
            axes = [f"{axis} {getattr(arranged, axis)}" for axis in side if getattr(arranged, axis) > 1]
            text += html.part(f"{kind}: {degrees.get(strategy, '')}, {' x '.join(axes) or 'every rank alone'}", _picture(arranged, side))
    if predicted:
        text += _against(run, predicted)
    if told:
        text += html.folded("What the strategies say", "\n".join(map(str, told)))
    return text


def _picture(arranged: Mesh, side: Sequence[str]) -> str:
    """Ranks as squares: a row a group of the innermost axis, a colour a place on the axis that divides most of the state."""
    if arranged.world > MOST_RANKS:
        return html.note(f"{arranged.world:,} ranks: " + "; ".join(arranged.table()))
    inner = side[-1]
    colour = "shard" if side == DENSE else "model"
    rows = arranged.groups(inner)
    if len(rows[0]) == 1:
        rows = [list(range(start, min(start + 8, arranged.world))) for start in range(0, arranged.world, 8)]
    drawn = mesh([[(str(rank), arranged.coordinate(colour, rank)) for rank in row] for row in rows])
    row = f"; a row is a group of {inner}" if getattr(arranged, inner) > 1 else ""
    return drawn + html.note(f"Ranks; a colour is a place on the axis {colour}{row}.")


def _against(run: Run, predicted: Mapping[str, Any]) -> str:
    """The planner's numbers beside the measured ones."""
    step = [mean(run.steps, p) for p in PHASES[:4]]
    measured = {
        "step_s": sum(step) if any(step) else None,
        "samples_per_s": median(run.steps, "samples_per_s"),
        "mfu": median(run.steps, "mfu"),
    }
    memory = predicted.get("memory_bytes", {})
    rows = [
        ["step, ms", _scaled(predicted.get("step_s"), 1e3), _scaled(measured["step_s"], 1e3)],
        ["samples/s", _scaled(predicted.get("samples_per_s"), 1), _scaled(measured["samples_per_s"], 1)],
        ["MFU, %", _scaled(predicted.get("mfu"), 100), _scaled(measured["mfu"], 100)],
        ["memory, GiB", _scaled(memory.get("total"), 2.0**-30), _scaled(run.summary.get("peak_memory_bytes"), 2.0**-30)],
    ]
    place = f"{predicted.get('world', 'some'):,} x {predicted.get('gpu', 'GPUs')}" if "world" in predicted else "the cluster file"
    text = html.part("Planned and measured", html.table(["", f"planned for {place}", "this run"], rows))
    breakdown = {k: v * 1e3 for k, v in predicted.get("breakdown_s", {}).items() if isinstance(v, int | float) and v > 0}
    if breakdown:
        text += html.part("Planned time of a step", shares(breakdown, " ms"))
    exposed = [
        [name, f"{c.get('network_s', 0) * 1e3:.2f}", f"{c.get('exposed_s', 0) * 1e3:.2f}"]
        for name, c in predicted.get("collectives", {}).items()
    ]
    if exposed:
        text += html.part("Planned communication", html.table(["collective", "network ms", "exposed ms"], exposed))
    return text


def _scaled(found: Any, scale: float) -> str:
    return "unknown" if found is None else number(found * scale)


def column(records: Sequence[Mapping[str, Any]], name: str, scale: float = 1.0) -> list[tuple[float, float]]:
    return [(float(r["step"]), float(r[name]) * scale) for r in records if r.get(name) is not None]


def mean(records: Sequence[Mapping[str, Any]], name: str) -> float:
    values = [float(r[name]) for r in records if r.get(name) is not None]
    return statistics.mean(values) if values else 0.0


def median(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(r[name]) for r in records if r.get(name) is not None]
    return statistics.median(values) if values else None
