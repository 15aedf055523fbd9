"""Small charts as inline SVG: lines with optional error bars, a histogram, a bar of shares, squares of ranks. No script, no font, nothing
fetched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#1f6feb", "#d1622b", "#2e8b57", "#8a4fbf", "#b8860b", "#c2255c", "#0b7285", "#5c636a")
WIDTH, HEIGHT = 640, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 16, 30, 54
MOST = 400
"""Points of a line; longer ones are thinned to means of neighbours."""


@dataclass(frozen=True)
class Line:
    """``points`` (x, y), x ascending; ``bars`` (low, high) of each point; ``marks`` draws the points; ``dashed`` is for references."""

    name: str
    points: Sequence[tuple[float, float]]
    bars: Sequence[tuple[float, float]] = field(default=())
    marks: bool = False
    dashed: bool = False


def lines(series: Sequence[Line], *, x: str, y: str, log: bool = False) -> str:
    """A chart of all series with a legend; the axes begin where the data does. ``log``: both axes logarithmic, points at 0 left out."""
    # A run keeps its colour in every chart, also beside runs that have nothing to draw there.
    coloured = [(thinned, COLOURS[i % len(COLOURS)]) for i, s in enumerate(series) if (thinned := _thinned(s, log)).points]
    if not coloured:
        return "<p class='none'>Nothing was recorded.</p>"
    shown = [s for s, _ in coloured]
    xs = [p[0] for s in shown for p in s.points]
    ys = [v for s in shown for v in (*(p[1] for p in s.points), *(v for bar in s.bars for v in bar if v > 0 or not log))]
    ax, ay = _Axis(min(xs), max(xs), _LEFT, WIDTH - _RIGHT, log), _Axis(min(ys), max(ys), HEIGHT - _BOTTOM, _TOP, log)
    parts = [_grid(ax, ay, x, y), *(_series(s, colour, ax, ay) for s, colour in coloured)]
    legend = "".join(f"<span><i style='background:{colour}'></i>{escape(s.name)}</span>" for s, colour in coloured)
    legend = f"<figcaption>{legend}</figcaption>" if len(series) > 1 else ""
    title = escape(f"{y} by {x}: {', '.join(s.name for s in shown)}")
    return f"<figure><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img'><title>{title}</title>{''.join(parts)}</svg>{legend}</figure>"


def shares(parts: Mapping[str, float], unit: str = "") -> str:
    """One bar divided by the values, each with its share."""
    total = sum(parts.values())
    if total <= 0:
        return "<p class='none'>Nothing was recorded.</p>"
    drawn, legend, at = [], [], 0.0
    for i, (name, value) in enumerate(parts.items()):
        width, colour = value / total * WIDTH, COLOURS[i % len(COLOURS)]
        text = f"{escape(name)}: {value / total:.1%} ({number(value)}{unit})"
        drawn.append(f"<rect x='{at:.1f}' y='0' width='{width:.1f}' height='34' fill='{colour}'><title>{text}</title></rect>")
        legend.append(f"<span><i style='background:{colour}'></i>{text}</span>")
        at += width
    return f"<figure><svg viewBox='0 0 {WIDTH} 34' role='img'>{''.join(drawn)}</svg><figcaption>{''.join(legend)}</figcaption></figure>"


def bars(heights: Mapping[str, float], *, x: str, y: str) -> str:
    """A histogram: a bar each, named below it; every second name where there are many."""
    if not any(heights.values()):
        return "<p class='none'>Nothing was recorded.</p>"
    axis = _Axis(0, max(heights.values()), HEIGHT - _BOTTOM, _TOP, False)
    width = (WIDTH - _LEFT - _RIGHT) / len(heights)
    parts = []
    for tick in axis.ticks:
        y0 = axis(tick)
        parts.append(f"<line class='g' x1='{_LEFT}' x2='{WIDTH - _RIGHT}' y1='{y0:.1f}' y2='{y0:.1f}'/>")
        parts.append(f"<text x='{_LEFT - 6}' y='{y0 + 4:.1f}' text-anchor='end'>{number(tick)}</text>")
    every = max(1, math.ceil(max(len(name) for name in heights) * 11 / width))
    for i, (name, height) in enumerate(heights.items()):
        left, top = _LEFT + i * width, axis(height)
        title = f"<title>{escape(name)}: {number(height)}</title>"
        at = f"x='{left + width * 0.08:.1f}' y='{top:.1f}' width='{width * 0.84:.1f}' height='{HEIGHT - _BOTTOM - top:.1f}'"
        parts.append(f"<rect {at} fill='{COLOURS[0]}'>{title}</rect>")
        if i % every == 0:
            parts.append(f"<text x='{left + width / 2:.1f}' y='{HEIGHT - _BOTTOM + 20}' text-anchor='middle'>{escape(name)}</text>")
    parts.append(_names(x, y))
    return f"<figure><svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img'><title>{escape(f'{y} by {x}')}</title>{''.join(parts)}</svg></figure>"


def mesh(rows: Sequence[Sequence[tuple[str, int]]]) -> str:
    """Squares in rows, each with its text, coloured by its number."""
    size, most = 44, max(len(row) for row in rows)
    parts = []
    for j, row in enumerate(rows):
        for i, (text, number) in enumerate(row):
            colour = COLOURS[number % len(COLOURS)]
            parts.append(f"<rect x='{i * size + 2}' y='{j * size + 2}' width='{size - 4}' height='{size - 4}' rx='5' fill='{colour}'/>")
            parts.append(f"<text class='in' x='{(i + 0.5) * size}' y='{(j + 0.5) * size + 5}' text-anchor='middle'>{escape(text)}</text>")
    box = f"viewBox='0 0 {most * size} {len(rows) * size}' style='max-width:{most * size}px'"
    return f"<figure><svg {box} role='img'><title>ranks</title>{''.join(parts)}</svg></figure>"


class _Axis:
    """Maps values to pixels, and where its ticks are."""

    def __init__(self, low: float, high: float, start: float, stop: float, log: bool) -> None:
        self.log, self.start, self.stop = log, start, stop
        if log:
            self.ticks = [10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
            self.low, self.high = math.log10(self.ticks[0]), math.log10(self.ticks[-1])
            if self.low == self.high:
                self.high += 1
            return
        if low == high:
            self.low, self.high, self.ticks = low - abs(low) * 0.05 - 1e-9, high + abs(high) * 0.05 + 1e-9, [low]
            return
        raw = (high - low) / 5
        size = 10 ** math.floor(math.log10(raw))
        step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
        first = math.ceil(low / step - 1e-9)
        self.low, self.high = low, high
        self.ticks = [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def _grid(ax: _Axis, ay: _Axis, x: str, y: str) -> str:
    parts = []
    for tick in ay.ticks:
        at = ay(tick)
        parts.append(f"<line class='g' x1='{_LEFT}' x2='{WIDTH - _RIGHT}' y1='{at:.1f}' y2='{at:.1f}'/>")
        parts.append(f"<text x='{_LEFT - 6}' y='{at + 4:.1f}' text-anchor='end'>{number(tick)}</text>")
    for tick in ax.ticks:
        at = ax(tick)
        parts.append(f"<line class='g' x1='{at:.1f}' x2='{at:.1f}' y1='{_TOP}' y2='{HEIGHT - _BOTTOM}'/>")
        parts.append(f"<text x='{at:.1f}' y='{HEIGHT - _BOTTOM + 20}' text-anchor='middle'>{number(tick)}</text>")
    parts.append(_names(x, y))
    return "".join(parts)


def _names(x: str, y: str) -> str:
    """What the axes are of: x below its end, y above its top."""
    below = f"<text x='{WIDTH - _RIGHT}' y='{HEIGHT - 5}' text-anchor='end'>{escape(x)}</text>"
    return f"{below}<text x='4' y='14'>{escape(y)}</text>"


def _series(s: Line, colour: str, ax: _Axis, ay: _Axis) -> str:
    path = " ".join(f"{'L' if i else 'M'}{ax(a):.1f} {ay(b):.1f}" for i, (a, b) in enumerate(s.points))
    dash = " stroke-dasharray='5 4'" if s.dashed else ""
    parts = [f"<path d='{path}' fill='none' stroke='{colour}' stroke-width='1.8'{dash}/>"]
    for (a, _), bar in zip(s.points, s.bars):
        low, high = (max(v, 10**ay.low) if ay.log else v for v in bar)
        at = f"x1='{ax(a):.1f}' x2='{ax(a):.1f}' y1='{ay(low):.1f}' y2='{ay(high):.1f}'"
        parts.append(f"<line {at} stroke='{colour}' stroke-width='1.2'/>")
    if s.marks or len(s.points) == 1:
        parts += [
            f"<circle cx='{ax(a):.1f}' cy='{ay(b):.1f}' r='3' fill='{colour}'><title>{number(a)}, {number(b)}</title></circle>"
            for a, b in s.points
        ]
    return "".join(parts)


def _thinned(s: Line, log: bool) -> Line:
    kept = [i for i, p in enumerate(s.points) if all(math.isfinite(v) for v in p) and (not log or min(p) > 0)]
    points, bars = [s.points[i] for i in kept], [s.bars[i] for i in kept] if s.bars else []
    if len(points) > MOST and not bars:
        size = -(-len(points) // MOST)
        groups = [points[i : i + size] for i in range(0, len(points), size)]
        points = [(sum(p[0] for p in g) / len(g), sum(p[1] for p in g) / len(g)) for g in groups]
    return Line(s.name, points, bars, s.marks, s.dashed)


def number(value: float) -> str:
    """Four digits, short."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.2g}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
