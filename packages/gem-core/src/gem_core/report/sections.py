"""The sections of a report, each a function from a `Run` to a title and HTML, or to None where the run has nothing of the kind.

A further section is one more function in `SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from gem_core.report.charts import Line, lines, shares
from gem_core.report.run import Inspection, Run

Section = tuple[str, str]
PHASES = ("data_s", "forward_s", "backward_s", "optimizer_s", "checkpoint_s")


def overview(run: Run) -> Section:
    s, h = run.summary, run.header
    rows = [
        ("model", h.get("model", run.config.model.name)),
        ("state", s.get("status", "not finished")),
        ("steps", _count(s.get("steps", run.steps[-1]["step"] if run.steps else None))),
        ("samples", _count(s.get("samples", run.steps[-1]["samples"] if run.steps else None))),
        ("wall time", _clock(s.get("wall_s"))),
        ("device", f"{h.get('device', 'unknown')} x {h.get('world', 1)}"),
        ("peak memory", f"{s['peak_memory_bytes'] / 2**20:,.0f} MiB" if s.get("peak_memory_bytes") else "unknown"),
        ("started", h.get("started", "unknown")),
        ("command", " ".join(map(str, h.get("command", ())))),
    ]
    return "Overview", _pairs(rows)


def results(run: Run) -> Section | None:
    tasks, undefined = run.summary.get("tasks", {}), run.summary.get("undefined", {})
    if not tasks:
        return None
    names = list(dict.fromkeys(m for metrics in tasks.values() for m in metrics))
    rows = [[task, *(_value(metrics.get(m)) for m in names)] for task, metrics in tasks.items()]
    reasons = [f"{t}.{m}: {why}" for t, found in undefined.items() for m, why in found.items() if m in names and why]
    shown = {"bayes_ne": "Bayes NE", "ne": "NE", "auc": "AUC", "gauc": "GAUC"}
    text = _table(["task", *(shown.get(m, m) for m in names)], rows)
    if reasons:
        text += "<p>Undefined: " + "; ".join(map(escape, reasons)) + ".</p>"
    step = run.summary.get("evaluated_step")
    samples = run.summary.get("eval_samples")
    return "Results", text + (f"<p>Step {step:,}, {samples:,} evaluation samples.</p>" if step and samples else "")


def losses(run: Run) -> Section | None:
    if not run.steps:
        return None
    text = "<h3>Training loss</h3>" + lines([Line("loss", _column(run.steps, "loss"))], x="step", y="loss")
    text += "<h3>Learning rate and gradient norm</h3>" + lines([Line("learning rate", _column(run.steps, "lr"))], x="step", y="rate")
    text += lines([Line("gradient norm", _column(run.steps, "grad_norm"))], x="step", y="norm")
    skipped = sum(int(r.get("skipped") or 0) for r in run.steps)
    return "Losses", text + (f"<p>{skipped:,} steps were skipped for a non-finite loss.</p>" if skipped else "")


def metrics(run: Run) -> Section | None:
    names = list(dict.fromkeys(m for e in run.evals for found in e["tasks"].values() for m in found if m != "bayes_ne"))
    parts = []
    for name in names:
        series = [Line(task, _metric(run, task, name), marks=True) for task in _tasks(run)]
        if name == "ne":
            series += [Line(f"{task}, Bayes", _metric(run, task, "bayes_ne"), dashed=True) for task in _tasks(run)]
        if any(s.points for s in series):
            parts.append(f"<h3>{escape(name)}</h3>" + lines(series, x="step", y=name))
    return ("Evaluations", "".join(parts)) if parts else None


def calibration(run: Run) -> Section:
    title, found = "Calibration", run.inspection
    if isinstance(found, str):
        return title, f"<p class='none'>The curve is {escape(found)}.</p>"
    if not found.calibration:
        return title, "<p class='none'>A model that ranks items has no calibration.</p>"
    parts = []
    for task, points in found.calibration.items():
        if not points:
            parts.append(f"<h3>{escape(task)}</h3><p class='none'>No row of the evaluation set counts for this task.</p>")
            continue
        pairs = [(p.predicted, p.observed) for p in points]
        ends = [v for pair in pairs for v in pair if v > 0]
        series = [
            Line("observed rate, 95 % interval", pairs, [(p.low, p.high) for p in points], marks=True),
            Line("perfect", [(min(ends), min(ends)), (max(ends), max(ends))] if ends else [], dashed=True),
        ]
        chart = lines(series, x="mean prediction of the group", y="rate", log=True)
        parts.append(f"<h3>{escape(task)}</h3>{chart}")
    groups = "groups of about equal weight, by prediction; both axes logarithmic"
    return title, "".join(parts) + f"<p>Step {found.step:,}, {found.samples:,} evaluation samples in {groups}.</p>"


def speed(run: Run) -> Section | None:
    if not run.steps:
        return None
    text = "<h3>Throughput</h3>" + lines([Line("samples a second", _column(run.steps, "samples_per_s"))], x="step", y="samples/s")
    if any(r.get("mfu") is not None for r in run.steps):
        text += "<h3>Model FLOPs utilisation</h3>" + lines([Line("MFU", _column(run.steps, "mfu"))], x="step", y="MFU")
    else:
        text += f"<p>MFU is not given: {escape(str((run.header.get('mfu_peak') or {}).get('reason') or 'no peak is known'))}.</p>"
    spent = {phase.removesuffix("_s"): _total(run.steps, phase) for phase in PHASES}
    text += "<h3>Where a step's time goes</h3>" + shares({k: v for k, v in spent.items() if v > 0}, " s a step")
    waits = [r["data_wait"] for r in run.steps if r.get("data_wait") is not None]
    if waits:
        text += f"<p>The training waited for data {sum(waits) / len(waits):.1%} of the time.</p>"
    return "Speed", text


def model(run: Run) -> Section:
    counts = run.header.get("parameters", {})
    rows = [("parameters, tables", _count(counts.get("sparse"))), ("parameters, dense", _count(counts.get("dense")))]
    flops = run.header.get("flops_per_sample")
    if flops:
        rows.append(("FLOPs of a training step a sample", f"{flops:,.0f}"))
    text, found = _pairs(rows), run.inspection
    if isinstance(found, Inspection):
        if found.parameters:
            table = _table(["module", "parameters"], [[part, f"{n:,}"] for part, n in found.parameters.items()])
            text += "<h3>Parameters by module</h3>" + table
        if found.flops:
            total = sum(found.flops.values()) or 1.0
            parts = [[part, f"{n:,.0f}", f"{n / total:.1%}"] for part, n in found.flops.items()]
            text += "<h3>FLOPs by part</h3>" + _table(["part", "FLOPs a sample", "share"], parts)
            text += "<p>Of a training step, forward and backward, on the first evaluation batch.</p>"
    return "Model", text


def software(run: Run) -> Section | None:
    h = run.header
    if not h:
        return None
    rows = [*h.get("versions", {}).items(), ("commit", h.get("commit") or "outside a repository"), ("host", h.get("host", "unknown"))]
    text = _pairs(rows) + "<h3>Plug-ins</h3>" + _pairs(h.get("plugins", {}).items())
    sites = (h.get("precision") or {}).get("sites", {})
    text += "<h3>Precision</h3>" + _pairs([("recipe", (h.get("precision") or {}).get("recipe", "fp32")), *sites.items()])
    if h.get("kernels"):
        text += "<h3>Kernels</h3><ul>" + "".join(f"<li>{escape(str(k))}</li>" for k in h["kernels"]) + "</ul>"
    return "Software", text


def configuration(run: Run) -> Section:
    return "Configuration", f"<details><summary>config.toml</summary><pre>{escape(run.text)}</pre></details>"


SECTIONS: tuple[Callable[[Run], Section | None], ...] = (
    overview,
    results,
    losses,
    metrics,
    calibration,
    speed,
    model,
    software,
    configuration,
)


def _tasks(run: Run) -> list[str]:
    return list(dict.fromkeys(task for e in run.evals for task in e["tasks"]))


def _metric(run: Run, task: str, name: str) -> list[tuple[float, float]]:
    found = ((float(e["step"]), e["tasks"].get(task, {}).get(name)) for e in run.evals)
    return [(step, float(value)) for step, value in found if value is not None]


def _column(records: Sequence[Any], name: str) -> list[tuple[float, float]]:
    return [(float(r["step"]), float(r[name])) for r in records if r.get(name) is not None]


def _total(records: Sequence[Any], name: str) -> float:
    values = [float(r[name]) for r in records if r.get(name) is not None]
    return sum(values) / len(values) if values else 0.0


def _value(value: Any) -> str:
    return "undefined" if value is None else f"{value:.5f}" if isinstance(value, int | float) else str(value)


def _count(value: Any) -> str:
    return "unknown" if value is None else f"{value:,}"


def _clock(seconds: Any) -> str:
    if seconds is None:
        return "unknown"
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _pairs(rows: Iterable[tuple[Any, Any]]) -> str:
    return _table(None, [[str(k), str(v)] for k, v in rows])


def _table(head: list[str] | None, rows: list[list[str]]) -> str:
    top = "" if head is None else "<tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"
    kind = "pairs" if head is None else "grid"
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table class='{kind}'>{top}{body}</table></div>"
