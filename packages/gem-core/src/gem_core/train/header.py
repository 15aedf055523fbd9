"""What a run says of itself when it begins: the content of run.json, and the first lines that are printed."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from gem_core.config import Config
from gem_core.train.build import Parts
from gem_core.train.runfolder import device_name, environment
from gem_core.train.runtime import Runtime


def header(config: Config, parts: Parts, runtime: Runtime, more: Mapping[str, Any]) -> dict[str, Any]:
    """The content of run.json; ``more``: what only the trainer knows. ``flops_per_sample`` is told after the first step."""
    return {
        "name": config.run.name,
        "model": config.model.name,
        "seed": config.run.seed,
        "world": runtime.world,
        **environment(runtime.device),
        "precision": {"recipe": config.precision.recipe, "sites": dict(Counter(p for _, p, _ in parts.guard.describe()))},
        "parallel": {"dense": config.parallel.dense, "sparse": config.parallel.sparse, **parts.mesh.degrees()},
        "parameters": parts.parameter_counts(),
        "flops_per_sample": None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **more,
    }


def plan_lines(parts: Parts) -> list[str]:
    """What the strategies have to say of their plan."""
    told = (getattr(part, "describe", None) for part in (parts.module, parts.tables))
    return [line for describe in told if describe is not None for line in describe()]


def head_lines(config: Config, parts: Parts, runtime: Runtime, total: int | None) -> list[str]:
    """What is trained, on what and for how long; what one process leaves of a file that was written for many; the mesh of several."""
    counts = parts.parameter_counts()
    several = f" x {runtime.world} processes" if runtime.world > 1 else ""
    length = f"{total:,} steps, " if total is not None else ""
    first = (
        f"{config.model.name} on {device_name(runtime.device)}{several}, {config.precision.recipe}: "
        f"{counts['dense']:,} parameters, {counts['sparse']:,} in tables; {length}batch size {config.data.batch_size:,}"
    )
    if runtime.world > 1:
        node = os.environ.get("LOCAL_WORLD_SIZE")
        return [first, *parts.mesh.table(int(node) if node else None)]
    p = config.parallel
    unused = [f"parallel.{axis} = {getattr(p, axis)}" for axis in parts.mesh.degrees() if getattr(p, axis) not in (-1, 1)]
    return [first, *([f"one process: {', '.join(unused)} not used"] if unused else [])]
