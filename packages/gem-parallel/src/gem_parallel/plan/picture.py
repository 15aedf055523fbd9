"""A plan as one HTML page: the axes on the tiers, the step's timeline and its memory, drawn as inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

from gem_parallel.plan.candidates import DENSE_ORDER, SPARSE_ORDER, Dense, Sparse
from gem_parallel.plan.engine import HOST
from gem_parallel.plan.explain import cuts_text, efficiency, sparse_text, tiers_text
from gem_parallel.plan.grid import size_text
from gem_parallel.plan.memory import CATEGORIES
from gem_parallel.plan.search import Estimate, Space

WIDTH = 1100
STREAMS = {
    "compute": "what the GPU computes",
    "gather": "parameters of sharded layers, gathered ahead of their use",
    "reduce": "gradients, summed behind the layers that made them",
    "experts": "inputs and outputs of experts on other GPUs",
    "agree": "the loss, which all ranks must know; some microseconds",
    "tables": "looked-up rows and their gradients between the ranks of a copy of the tables",
    "replicas": "rows or averages between copies of the tables",
    "inputs": "ids of the next batch, to the ranks that hold their rows",
    HOST: "the host, which starts every operation of a step that is not captured",
}
"""Streams of operations, from above, with what is on them."""
COLOURS = {
    "computation": "#4878a8", "table look-up": "#6aa56a", "table update": "#6aa56a", "optimizer": "#8d7bb5", "host": "#999999",
    "launches": "#bbbbbb",
    "parameter gather": "#d9904f", "gradient reduce-scatter": "#c4694f", "gradient all-reduce": "#a03f3f", "expert exchange": "#c9b23f",
    "synchronisation": "#555555", "embedding all-to-all": "#3f9a8f", "ids all-to-all": "#86c5bd", "table replicas": "#b05fa0",
    "parameters": "#4878a8", "gradients": "#c4694f", "activations": "#d9904f", "gathered copies": "#c9b23f", "embeddings": "#3f9a8f",
    "buffers": "#999999",
}  # fmt: skip


def page(space: Space, chosen: Estimate) -> str:
    """The whole HTML document."""
    eff = efficiency(space, chosen.seconds)
    title = f"{space.workload.name} on {space.world:,} x {space.cluster.gpu.name}"
    facts = (
        f"{space.cluster.name}; {space.workload.batch:,} samples a GPU; step {chosen.seconds * 1e3:,.1f} ms, MFU {eff.step:.1%}, "
        f"scaling ratio {eff.scaling:.1%}; memory {size_text(chosen.memory.bytes)} of {size_text(space.room)}; "
        f"dense {chosen.dense.strategy}; tables {sparse_text(chosen.sparse)}, cut {cuts_text(space, chosen.sparse)}"
    )
    parts = [
        f"<h1>{html.escape(title)}</h1><p>{html.escape(facts)}</p>",
        "<h2>Axes on tiers</h2>", axes_svg(space, chosen),
        "<h2>Timeline of a step, slowest rank</h2>", timeline_svg(chosen),
        "<h2>Memory over the step, fullest rank</h2>", memory_svg(space, chosen),
    ]  # fmt: skip
    style = "body{font:14px sans-serif;margin:24px;max-width:1150px}svg{background:#fafafa;border:1px solid #ddd}text{font:12px sans-serif}"
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style>'
    return f'<!doctype html><html lang="en">{head}{"".join(parts)}</html>\n'


def axes_svg(space: Space, chosen: Estimate) -> str:
    """A row an axis, a column a tier: how many neighbours of the axis are inside one domain of the tier."""
    tiers = space.cluster.tiers
    left, row, column = 150, 34, (WIDTH - 170) / len(tiers)
    shapes = []
    for k, tier in enumerate(tiers):
        x = left + k * column
        rate = f"{tier.rate / 1e9:.4g} GB/s a GPU, {tier.latency_us:g} us"
        shapes.append(_text(x + 6, 18, f"{tier.name}: {space.cluster.domains[k]:,} GPUs"))
        shapes.append(_text(x + 6, 34, rate, "#777"))
        shapes.append(f'<line x1="{x}" y1="0" x2="{x}" y2="{52 + 5 * row}" stroke="#ccc"/>')
    for i, axis in enumerate((*DENSE_ORDER, *SPARSE_ORDER)):
        owner: Dense | Sparse = chosen.dense if axis in DENSE_ORDER else chosen.sparse
        y = 44 + i * row
        degree = getattr(owner, axis)
        shapes.append(_text(8, y + 20, f"{axis} {degree:,}"))
        if degree == 1:
            continue
        within = owner.group(space.cluster, axis).within
        for k in range(len(tiers)):
            if within[k + 1] > within[k]:
                members = within[k + 1]
                x = left + k * column + 6
                label = f"{members:,.3g} of {degree:,} in one domain" if members < degree else f"all {degree:,}"
                colour = "#4878a8" if axis in DENSE_ORDER else "#3f9a8f"
                shapes.append(f'<rect x="{x}" y="{y + 4}" width="{column - 14}" height="{row - 10}" rx="4" fill="{colour}"/>')
                shapes.append(_text(x + 8, y + 20, label, "#fff"))
        shapes.append(f"<title>{html.escape(tiers_text(space, chosen, axis))}</title>")
    return _svg(52 + 5 * row, shapes)


def timeline_svg(chosen: Estimate) -> str:
    """Streams as lanes, time from left to right; hovering names an operation and its time."""
    used = [s for s in STREAMS if any(op.stream == s for op in chosen.ops)]
    left, lane = 90, 30
    scale = (WIDTH - left - 10) / chosen.seconds
    shapes = [_text(8, 24 + i * lane, stream, note=STREAMS[stream]) for i, stream in enumerate(used)]
    for i, op in enumerate(chosen.ops):
        begin, end = float(chosen.trace.start[i]), float(chosen.trace.end[i])
        if end <= begin:
            continue
        y = 6 + used.index(op.stream) * lane
        name = html.escape(f"{op.name}: {(end - begin) * 1e3:.3f} ms from {begin * 1e3:.3f} ms")
        shapes.append(
            f'<rect x="{left + begin * scale:.2f}" y="{y}" width="{max(1.0, (end - begin) * scale):.2f}" height="{lane - 8}" '
            f'fill="{COLOURS[op.what]}" stroke="#fff" stroke-width="0.3"><title>{name}</title></rect>'
        )
    bottom = 6 + len(used) * lane
    for i in range(6):
        x = left + (WIDTH - left - 10) * i / 5
        shapes.append(f'<line x1="{x}" y1="0" x2="{x}" y2="{bottom}" stroke="#ddd"/>')
        shapes.append(_text(min(x, WIDTH - 70), bottom + 14, f"{chosen.seconds * 1e3 * i / 5:.1f} ms", "#777"))
    shapes.append(_text(8, bottom + 14, "time", "#777"))
    lanes = "; ".join(f"<b>{stream}</b>: {html.escape(STREAMS[stream])}" for stream in used)
    return _svg(bottom + 20, shapes) + _legend(dict.fromkeys(op.what for op in chosen.ops)) + f"<p>Lanes: {lanes}.</p>"


def memory_svg(space: Space, chosen: Estimate) -> str:
    """Stacked bars at every point of the step, from its start to its end; the GPU's memory and the peak as lines."""
    points, left, height = chosen.memory.points, 70, 260
    top = max(space.room, chosen.memory.bytes) * 1.05
    column = (WIDTH - left - 10) / len(points)
    shapes = []
    for size in _ticks(top):
        y = height - size / top * height
        shapes.append(f'<line x1="{left}" y1="{y:.1f}" x2="{WIDTH - 10}" y2="{y:.1f}" stroke="#ddd"/>')
        shapes.append(_text(4, y + 4 if size else height, size_text(size) if size else "0", "#777"))
    for i, (name, amounts) in enumerate(points):
        y = float(height)
        for what in CATEGORIES:
            tall = amounts.get(what, 0.0) / top * height
            y -= tall
            note = html.escape(f"{name}: {what} {size_text(amounts.get(what, 0.0))} of {size_text(sum(amounts.values()))}")
            shapes.append(
                f'<rect x="{left + i * column:.2f}" y="{y:.2f}" width="{max(0.5, column - 1):.2f}" height="{tall:.2f}" '
                f'fill="{COLOURS[what]}"><title>{note}</title></rect>'
            )
    line = height - space.room / top * height
    shapes.append(f'<line x1="{left}" y1="{line:.1f}" x2="{WIDTH - 10}" y2="{line:.1f}" stroke="#a00" stroke-dasharray="5 3"/>')
    shapes.append(_text(left + 4, line + 14, f"the GPU: {size_text(space.room)}", "#a00"))
    peak = chosen.memory.peak
    tip = height - chosen.memory.bytes / top * height
    at = min(max(left + (peak + 0.5) * column - 90, left), WIDTH - 330)
    shapes.append(_text(at, max(tip - 5, 12), f"peak {size_text(chosen.memory.bytes)}: {points[peak][0]}"))
    last = -1e9
    for i, (name, _) in enumerate(points):
        x = left + i * column
        if (x - last > 130 and x < WIDTH - 160) or i == len(points) - 1:
            shapes.append(_text(min(x, WIDTH - 40), height + 14, name, "#777"))
            last = x
    return _svg(height + 20, shapes) + _legend(CATEGORIES)


def _ticks(top: float) -> list[float]:
    """Four to ten round sizes from 0 to below ``top``."""
    step = 10.0 ** math.floor(math.log10(top / 4))
    step *= next(factor for factor in (5, 2, 1) if top / (step * factor) >= 4 or factor == 1)
    return [step * i for i in range(math.ceil(top / step))]


def _svg(height: float, shapes: Iterable[str]) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}">{"".join(shapes)}</svg>'


def _text(x: float, y: float, text: str, colour: str = "#222", note: str = "") -> str:
    title = f"<title>{html.escape(note)}</title>" if note else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{html.escape(text)}{title}</text>'


def _legend(names: Iterable[str]) -> str:
    style = "margin-right:14px;white-space:nowrap"
    items = [f'<span style="{style}"><span style="color:{COLOURS[n]}">&#9632;</span> {html.escape(n)}</span>' for n in names]
    return f"<p>{' '.join(items)}</p>"
