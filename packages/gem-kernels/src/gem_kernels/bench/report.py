"""Results as JSON and as a Markdown table, with everything a reader needs to judge them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def environment(command: str, **more: Any) -> dict[str, Any]:
    """Hardware, versions, commit and the command that made the numbers."""
    import triton

    device = torch.cuda.get_device_properties(0)
    return {
        "command": command,
        "device": device.name,
        "sms": device.multi_processor_count,
        "memory_gib": round(device.total_memory / 2**30, 1),
        "driver": _driver(str(device.uuid)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("GEM_COMMIT") or _output(["git", "rev-parse", "HEAD"]),
        **more,
    }


def _driver(uuid: str) -> str | None:
    """Driver, clock and power limit of the one device that is used."""
    of = f"--id=GPU-{uuid.removeprefix('GPU-')}"
    return _output(["nvidia-smi", of, "--query-gpu=driver_version,clocks.sm,power.limit", "--format=csv,noheader"])


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def markdown(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """A table; floats with three significant digits, absent values empty."""
    cells = [columns, *([_cell(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(line, widths)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def write(folder: str | None, name: str, data: dict[str, Any], columns: list[str]) -> None:
    """``NAME.json``, ``NAME.md`` and ``NAME.svg`` in ``folder``; nothing without one."""
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"{name}.json").write_text(json.dumps(data, indent=1, default=str))
    head = "\n".join(f"- {k}: {v}" for k, v in data["environment"].items())
    Path(folder, f"{name}.md").write_text(f"# {name}\n\n{head}\n\n{markdown(data['results'], columns)}\n")
    Path(folder, f"{name}.svg").write_text(plot(data["results"]))


_COLORS = ("#1b6ca8", "#d1495b", "#8a8d91", "#edae49", "#4f9d69", "#7b5ea7", "#3a3f44")


def plot(results: list[dict[str, Any]]) -> str:
    """SVG: for every row and pass one bar an implementation, as long as its rate (TFLOP/s, or GB/s where there is no arithmetic)."""
    names = list(dict.fromkeys(_variant(r) for r in results))
    shapes, y = [], 30
    for i, name in enumerate(names):
        shapes.append(f'<rect x="{10 + 170 * i}" y="8" width="10" height="10" fill="{_COLORS[i % len(_COLORS)]}"/>')
        shapes.append(f'<text x="{24 + 170 * i}" y="17">{name}</text>')
    for title in dict.fromkeys((r["row"], r["pass"]) for r in results):
        bars = [(r, r.get("tflops") or r.get("gbs") or 0.0) for r in results if (r["row"], r["pass"]) == title]
        longest = max(value for _, value in bars) or 1.0
        shapes.append(f'<text x="10" y="{y + 12}">{title[0]} {title[1]}</text>')
        for r, value in bars:
            color = _COLORS[names.index(_variant(r)) % len(_COLORS)]
            shapes.append(f'<rect x="260" y="{y}" width="{500 * value / longest:.0f}" height="11" fill="{color}"/>')
            unit = "TFLOP/s" if r.get("tflops") else "GB/s"
            shapes.append(f'<text x="{266 + 500 * value / longest:.0f}" y="{y + 10}">{value:.0f} {unit}</text>')
            y += 13
        y += 8
    width = max(900, 20 + 170 * len(names))
    style = "<style>text{font:11px sans-serif}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}">{style}{"".join(shapes)}</svg>\n'


def _variant(result: dict[str, Any]) -> str:
    return f"{result['op']} {result['impl']}" if "op" in result else result["impl"]


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True, file=sys.stdout)
