"""What a run learnt: overview, differences, results, losses, evaluations, calibration, guard, model, software, configuration.

A section is a function from the runs of a report (the first is its own, the others are compared with it) to a title and HTML, or to None
where they have nothing of the kind. Those about machines are in `gem_core.report.machine`; a further section is one more function in
`SECTIONS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from gem_core.report import html, machine
from gem_core.report.charts import Line, lines
from gem_core.report.machine import Section, over_steps
from gem_core.report.run import Inspection, Run

NAMES = {"bayes_ne": "Bayes NE", "ne": "NE", "auc": "AUC", "gauc": "GAUC", "logloss": "log loss"}


def overview(runs: Sequence[Run]) -> Section:
    if len(runs) > 1:
        rows = [_facts(run) for run in runs]
        head = ["", *(run.label for run in runs)]
        return "Overview", html.table(head, [[key, *(str(facts[key]) for facts in rows)] for key in rows[0] if key != "command"])
    return "Overview", html.pairs(_facts(runs[0]).items())


def _facts(run: Run) -> dict[str, Any]:
    s, h, last = run.summary, run.header, run.steps[-1] if run.steps else {}
    device = f"{h.get('device', 'unknown')}" + (f" x {h['world']}" if h.get("world", 1) != 1 else "")
    return {
        "model": h.get("model", run.config.model.name),
        "state": s.get("status", "not finished"),
        "steps": html.count(s.get("steps", last.get("step"))),
        "samples": html.count(s.get("samples", last.get("samples"))),
        "wall time": html.clock(s.get("wall_s", last.get("time"))),
        "device": device,
        "peak memory": html.gib(s.get("peak_memory_bytes") or last.get("memory_bytes")),
        "started": h.get("started", "unknown"),
        "command": " ".join(map(str, h.get("command", ()))),
    }


def differences(runs: Sequence[Run]) -> Section | None:
    """Results of every run beside those of the first, and the keys of the configurations that differ."""
    if len(runs) < 2:
        return None
    rows = []
    first = _numbers(runs[0])
    every = dict.fromkeys(key for run in runs for key in _numbers(run))
    for key in every:
        cells = [key]
        for i, run in enumerate(runs):
            number = _numbers(run).get(key)
            text = "undefined" if number is None else f"{number:,.5g}"
            if i and number is not None and first.get(key):
                text += f" ({number / first[key] - 1:+.2%})"
            cells.append(text)
        rows.append(cells)
    text = html.table(["", *(run.label for run in runs)], rows)
    text += html.note(f"In brackets: the change against {runs[0].label}. Throughput and MFU are medians over the log windows.")
    flat = [_flat(run.config.model_dump(mode="json", exclude={"plan"})) for run in runs]
    keys = [key for key in sorted({k for f in flat for k in f}) if len({str(f.get(key)) for f in flat}) > 1]
    changed = [[key, *(_short(f.get(key)) for f in flat)] for key in keys]
    told = html.table(["key", *(run.label for run in runs)], changed) if changed else html.nothing("The configurations are equal.")
    return "Differences", text + html.part("Configuration", told)


def _numbers(run: Run) -> dict[str, float]:
    found: dict[str, float | None] = {}
    for task, metrics in run.summary.get("tasks", {}).items():
        found |= {f"{task} {NAMES.get(name, name)}": value for name, value in metrics.items() if name != "bayes_ne"}
    loss = [r["loss"] for r in run.steps if r.get("loss") is not None]
    found["last training loss"] = loss[-1] if loss else None
    for name, key in (("samples/s", "samples_per_s"), ("MFU", "mfu"), ("share of time waiting for data", "data_wait")):
        found[name] = machine.median(run.steps, key)
    memory = run.summary.get("peak_memory_bytes")
    found["peak memory, GiB"] = memory / 2**30 if memory else None
    found["wall time, s"] = run.summary.get("wall_s")
    return {name: float(value) for name, value in found.items() if value is not None}


def _flat(config: Any, path: str = "") -> dict[str, Any]:
    if isinstance(config, Mapping) and config:
        return {k: v for name, inner in config.items() for k, v in _flat(inner, f"{path}.{name}" if path else str(name)).items()}
    return {path: config}


def _short(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def results(runs: Sequence[Run]) -> Section | None:
    run = runs[0]
    tasks, undefined = run.summary.get("tasks", {}), run.summary.get("undefined", {})
    if not tasks:
        return None
    names = list(dict.fromkeys(m for metrics in tasks.values() for m in metrics))
    rows = [[task, *(html.value(metrics.get(m)) for m in names)] for task, metrics in tasks.items()]
    reasons = [f"{t}.{m}: {why}" for t, found in undefined.items() for m, why in found.items() if m in names and why]
    text = html.table(["task", *(NAMES.get(m, m) for m in names)], rows)
    if reasons:
        text += html.note(f"Undefined: {'; '.join(reasons)}.")
    step, samples = run.summary.get("evaluated_step"), run.summary.get("eval_samples")
    return "Results", text + (html.note(f"Step {step:,}, {samples:,} evaluation samples.") if step and samples else "")


def losses(runs: Sequence[Run]) -> Section | None:
    if not any(run.steps for run in runs):
        return None
    text = html.part("Training loss", over_steps(runs, "loss", "loss"))
    text += html.part("Learning rate", over_steps(runs, "lr", "learning rate"))
    text += html.part("Gradient norm", over_steps(runs, "grad_norm", "gradient norm"))
    for run in runs:
        skipped = max((int(r.get("skipped") or 0) for r in run.steps), default=0)
        if skipped:
            text += html.note(f"{run.label}: {skipped:,} steps were skipped for a non-finite loss.")
    return "Losses", text


def evaluations(runs: Sequence[Run]) -> Section | None:
    names = list(dict.fromkeys(m for run in runs for e in run.evals for found in e["tasks"].values() for m in found if m != "bayes_ne"))
    parts = []
    for name in names:
        title = NAMES.get(name, name)
        for tasks in [[t] for t in _tasks(runs)] if len(runs) > 1 else [_tasks(runs)]:
            series = [Line(run.label if len(runs) > 1 else t, _metric(run, t, name), marks=True) for t in tasks for run in runs]
            if name == "ne":
                series += [Line(f"{t}, Bayes" if len(runs) == 1 else "Bayes", _metric(runs[0], t, "bayes_ne"), dashed=True) for t in tasks]
            if any(s.points for s in series):
                parts.append(html.part(f"{title} of {tasks[0]}" if len(runs) > 1 else title, lines(series, x="step", y=title)))
    return ("Evaluations", "".join(parts)) if parts else None


def calibration(runs: Sequence[Run]) -> Section:
    title, found = "Calibration", [(run, run.inspection) for run in runs]
    known = [(run, inspection) for run, inspection in found if isinstance(inspection, Inspection)]
    text = "".join(
        html.nothing(f"The curve{f' of {run.label}' if len(runs) > 1 else ''} is {reason}.")
        for run, reason in found
        if isinstance(reason, str)
    )
    if known and not any(inspection.calibration for _, inspection in known):
        return title, text + html.nothing("A model that ranks items has no calibration.")
    for task in dict.fromkeys(t for _, inspection in known for t in inspection.calibration):
        series, ends = [], []
        for run, inspection in known:
            points = inspection.calibration.get(task, ())
            ends += [v for p in points for v in (p.predicted, p.observed) if v > 0]
            name = run.label if len(known) > 1 else "observed rate, 95 % interval"
            series.append(Line(name, [(p.predicted, p.observed) for p in points], [(p.low, p.high) for p in points], marks=True))
        if not any(s.points for s in series):
            text += html.part(task, html.nothing("No row of the evaluation set counts for this task."))
            continue
        series.append(Line("perfect", [(min(ends), min(ends)), (max(ends), max(ends))] if ends else [], dashed=True))
        text += html.part(task, lines(series, x="mean prediction of the group", y="rate", log=True))
    for run, inspection in known:
        name = f"{run.label}: step" if len(runs) > 1 else "Step"
        text += html.note(
            f"{name} {inspection.step:,}, {inspection.samples:,} evaluation samples in groups of about equal weight, by "
            "prediction; both axes logarithmic."
        )
    return title, text


def guard(runs: Sequence[Run]) -> Section | None:
    """Decisions of the numerics guard."""
    shown = [run for run in runs if run.decisions or (run.header.get("precision") or {}).get("recipe", "fp32") not in ("fp32", "bf16")]
    text = ""
    for run in shown:
        keys = list(dict.fromkeys(k for d in run.decisions for k in d))
        rows = [[_short(d.get(k)) if d.get(k) is not None else "" for k in keys] for d in run.decisions[:200]]
        told = html.table(keys, rows) if rows else html.nothing("The guard of this run decided nothing.")
        if len(run.decisions) > 200:
            told += html.note(f"The first 200 of {len(run.decisions):,} decisions.")
        text += html.part(run.label, told) if len(runs) > 1 else told
    return ("Guard", text) if shown else None


def model(runs: Sequence[Run]) -> Section:
    text = ""
    for run in runs:
        counts = run.header.get("parameters", {})
        rows = [("parameters, tables", html.count(counts.get("sparse"))), ("parameters, dense", html.count(counts.get("dense")))]
        flops = run.header.get("flops_per_sample")
        if flops:
            rows.append(("FLOPs of a training step a sample", f"{flops:,.0f}"))
        text += html.part(run.label, html.pairs(rows)) if len(runs) > 1 else html.pairs(rows)
    found = runs[0].inspection
    if isinstance(found, Inspection):
        if found.parameters:
            table = html.table(["module", "parameters"], [[part, f"{n:,}"] for part, n in found.parameters.items()])
            text += html.part("Parameters by module", table)
        if found.flops:
            total = sum(found.flops.values()) or 1.0
            parts = [[part, f"{n:,.0f}", f"{n / total:.1%}"] for part, n in found.flops.items()]
            text += html.part("FLOPs by part", html.table(["part", "FLOPs a sample", "share"], parts))
            text += html.note("Of a training step, forward and backward, on the first evaluation batch.")
    return "Model", text


def software(runs: Sequence[Run]) -> Section | None:
    text = ""
    for run in runs:
        h = run.header
        if not h:
            continue
        rows = [*h.get("versions", {}).items(), ("commit", h.get("commit") or "outside a repository"), ("host", h.get("host", "unknown"))]
        sites = (h.get("precision") or {}).get("sites", {})
        told = html.pairs(rows) + html.part("Plug-ins", html.pairs(h.get("plugins", {}).items()))
        told += html.part("Precision", html.pairs([("recipe", (h.get("precision") or {}).get("recipe", "fp32")), *sites.items()]))
        if h.get("kernels"):
            told += html.part("Kernels", "<ul>" + "".join(f"<li>{escape(str(k))}</li>" for k in h["kernels"]) + "</ul>")
        text += f"<details><summary>{escape(run.label)}</summary>{told}</details>" if len(runs) > 1 else told
    return ("Software", text) if text else None


def configuration(runs: Sequence[Run]) -> Section:
    text = html.folded("config.toml", runs[0].text)
    for run in runs[1:]:
        changes = "\n".join(
            difflib.unified_diff(runs[0].text.splitlines(), run.text.splitlines(), runs[0].label, run.label, lineterm="", n=1)
        )
        text += html.folded(f"{run.label}: what differs", changes or "nothing")
    return "Configuration", text


SECTIONS: tuple[Callable[[Sequence[Run]], Section | None], ...] = (
    overview,
    differences,
    results,
    losses,
    evaluations,
    calibration,
    machine.speed,
    machine.memory,
    machine.data,
    machine.ranks,
    machine.communication,
    machine.plan,
    guard,
    model,
    software,
    configuration,
)


def _tasks(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(task for run in runs for e in run.evals for task in e["tasks"]))


def _metric(run: Run, task: str, name: str) -> list[tuple[float, float]]:
    found = ((float(e["step"]), e["tasks"].get(task, {}).get(name)) for e in run.evals)
    return [(step, float(value)) for step, value in found if value is not None]
