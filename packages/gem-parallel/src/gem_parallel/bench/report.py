"""Environment and tables of the benchmarks."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def environment(module: str, **more: Any) -> dict[str, Any]:
    """Hardware, versions, commit and the command that made the numbers."""
    cuda = torch.cuda.is_available()
    return {
        "command": " ".join(["torchrun", f"--nproc-per-node {dist.get_world_size()}", f"-m {module}", *sys.argv[1:]]),
        "device": f"{dist.get_world_size()} x {torch.cuda.get_device_name() if cuda else platform.processor() or 'CPU'}",
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,  # type: ignore[no-untyped-call]
        "fbgemm": _version("fbgemm_gpu"),
        "torchrec": _version("torchrec"),
        "python": platform.python_version(),
        "commit": os.environ.get("GEM_COMMIT") or _output(["git", "rev-parse", "HEAD"]),
        **more,
    }


def _version(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__version__", None)


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of all columns that some row has."""
    columns = list(dict.fromkeys(c for row in rows for c in row))
    cells = [columns, *([_cell(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(text.ljust(w) for text, w in zip(line, widths)) + " |" for line in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def write(folder: Path, name: str, data: dict[str, Any]) -> None:
    """``NAME.json`` and ``NAME.md``; tables of ``data`` are its lists of dicts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1, default=str) + "\n")
    head = "\n".join(f"- {k}: {v}" for k, v in data["environment"].items())
    parts = [f"## {key}\n\n{table(rows)}" for key, rows in data.items() if isinstance(rows, list) and rows]
    (folder / f"{name}.md").write_text(f"# {name}\n\n{head}\n\n" + "\n\n".join(parts) + "\n")
