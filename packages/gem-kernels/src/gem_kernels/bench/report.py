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
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version,clocks.sm,power.limit", "--format=csv,noheader"]),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("GEM_COMMIT") or _output(["git", "rev-parse", "HEAD"]),
        **more,
    }


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
    """``NAME.json`` and ``NAME.md`` in ``folder`` (default: ``$OUT``, else nothing is written)."""
    folder = folder or os.environ.get("OUT")
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"{name}.json").write_text(json.dumps(data, indent=1, default=str))
    head = "\n".join(f"- {k}: {v}" for k, v in data["environment"].items())
    Path(folder, f"{name}.md").write_text(f"# {name}\n\n{head}\n\n{markdown(data['results'], columns)}\n")


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True, file=sys.stdout)
