"""A validation report as text and as one HTML page with its plots in it."""

from __future__ import annotations

import datetime
import html
from collections.abc import Sequence

import numpy as np

from gem_data.validate import Report


def text(report: Report) -> str:
    """Plain lines for the terminal."""
    lines = [f"{report.split}: {report.rows:,} rows in {report.files} file(s)", ""]
    lines += _aligned(_columns(report))
    for name in report.lengths:
        q = report.quantiles(name)
        lines.append(f"history {name}: " + "  ".join(f"{k} {v:,.1f}" if k == "mean" else f"{k} {v:,.0f}" for k, v in q.items()))
    for task, days in report.label_rates.items():
        total, n = (sum(v[i] for v in days.values()) for i in (0, 1))
        rates = [s / c for s, c in days.values() if c]
        spread = f", by day {min(rates):.4f} to {max(rates):.4f}" if len(rates) > 1 else ""
        lines.append(f"label {task}: rate {total / max(n, 1):.4f} of {n:,}{spread}")
    lines.append("")
    lines += [f"VIOLATION {v.feature}: {v.what} ({v.count:,})\n  first: {v.example}" for v in report.violations] or ["no violations"]
    return "\n".join(lines) + "\n"


def page(reports: Sequence[Report]) -> str:
    """One HTML page without outside parts."""
    body = "".join(_section(r) for r in reports)
    style = (
        "body{font:14px sans-serif;max-width:70em;margin:2em auto}table{border-collapse:collapse}"
        "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:right}td:first-child,th:first-child{text-align:left}.bad{color:#b00}"
    )
    head = f"<meta charset='utf-8'><title>gemrec data validate</title><style>{style}</style>"
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>\n"


def _columns(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("feature", "values", "missing", "least", "greatest", "distinct")]
    for c in report.columns:
        distinct = "very many" if c.distinct is None else f"{c.distinct:,}" if c.distinct else "-"
        low, high = (f"{v:,.6g}" if np.isfinite(v) else "-" for v in (c.low, c.high))
        rows.append((c.feature, f"{c.rows:,}", f"{c.missing / max(c.rows, 1):.2%}", low, high, distinct))
    return rows


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))) for row in rows]


def _section(report: Report) -> str:
    head, *rows = _columns(report)
    parts = [f"<h1>{html.escape(report.split)}</h1><p>{report.rows:,} rows in {report.files} file(s)</p>"]
    if report.violations:
        items = "".join(
            f"<li><b>{html.escape(v.feature)}</b>: {html.escape(v.what)} ({v.count:,})<br><code>{html.escape(v.example)}</code></li>"
            for v in report.violations
        )
        parts.append(f"<h2 class='bad'>Violations</h2><ul>{items}</ul>")
    else:
        parts.append("<p>No violations.</p>")
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    parts.append(f"<h2>Features</h2><table><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr>{cells}</table>")
    for name, counts in report.lengths.items():
        q = report.quantiles(name)
        edges = [0, 1, *(2**i for i in range(1, 1 + int(np.log2(max(q["max"], 1))) + 1))]
        bars = [
            (f"{a}" if b - a == 1 else f"{a}-{b - 1}", float(sum(c for n, c in counts.items() if a <= n < b)))
            for a, b in zip(edges, edges[1:])
        ]
        caption = ", ".join(f"{k} {v:,.0f}" for k, v in q.items())
        parts.append(f"<h2>Lengths of {html.escape(name)}</h2><p>{caption}</p>{_bars(bars)}")
    for task, days in report.label_rates.items():
        if len(days) > 1:
            bars = [(str(datetime.date(1970, 1, 1) + datetime.timedelta(days=d)), s / max(n, 1)) for d, (s, n) in days.items()]
            parts.append(f"<h2>Rate of {html.escape(task)} by day</h2>{_bars(bars)}")
    return "".join(parts)


def _bars(bars: Sequence[tuple[str, float]]) -> str:
    """A bar chart as inline SVG."""
    width, height, gap = 700, 160, 4
    top, step = max((v for _, v in bars), default=1) or 1, 700 / max(len(bars), 1)
    drawn = []
    for i, (name, value) in enumerate(bars):
        h = value / top * height
        shown = f"{value:,.4g}"
        drawn.append(
            f"<g><title>{html.escape(name)}: {shown}</title><rect x='{i * step:.1f}' y='{height - h:.1f}' width='{max(step - gap, 1):.1f}' "
            f"height='{h:.1f}' fill='#47a'/><text x='{i * step:.1f}' y='{height + 12}' font-size='9' "
            f"transform='rotate(40 {i * step:.1f} {height + 12})'>{html.escape(name)}</text></g>"
        )
    return f"<svg viewBox='0 0 {width + 40} {height + 70}' width='{width + 40}' role='img'>{''.join(drawn)}</svg>"
