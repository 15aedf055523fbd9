"""Environment and tables of the benchmarks."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gem_core.bench import page


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


def write(folder: Path, name: str, data: dict[str, Any]) -> None:
    """``NAME.json`` and ``NAME.md``; tables of ``data`` are its lists of dicts."""
    head = "\n".join(f"- {k}: {v}" for k, v in data["environment"].items())
    parts = [f"## {key}\n\n{page.table(rows)}" for key, rows in data.items() if isinstance(rows, list) and rows]
    page.write(folder, name, data, f"# {name}\n\n{head}\n\n" + "\n\n".join(parts) + "\n")
