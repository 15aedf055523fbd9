"""What a report is made from: the files of a run folder, and what one pass over the evaluation split tells beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gem_core.config import Config
from gem_core.errors import CheckpointError, GemError
from gem_core.metrics.curve import CalibrationCurve, Point
from gem_core.model.contract import Retrieval
from gem_core.train.build import build_source, task_names
from gem_core.train.evaluate import evaluate
from gem_core.train.offline import loaded_run, run_config
from gem_core.train.runfolder import RunFolder, read_lines


@dataclass(frozen=True)
class Inspection:
    """Of the newest checkpoint: calibration by task, samples that it is of, parameters and training
    FLOPs a sample by part of the model."""

    step: int
    samples: int
    calibration: Mapping[str, Sequence[Point]]
    parameters: Mapping[str, int]
    flops: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """A run folder as read. ``inspection`` is a sentence where there is none: why."""

    path: Path
    config: Config
    text: str
    header: Mapping[str, Any]
    summary: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    evals: Sequence[Mapping[str, Any]]
    inspection: Inspection | str


def read(path: Path, *, inspect: bool = True, overrides: Sequence[str] = ()) -> Run:
    """Read the folder; ``inspect`` also loads the newest checkpoint and evaluates it on the evaluation split.

    What that lacks (no checkpoint yet, data that is not on this machine) is told in the report and does not fail it.

    :raises CheckpointError: it is no run folder.
    """
    folder, config = RunFolder(path), run_config(path)
    found: Inspection | str = "left out: --no-eval was given"
    if inspect:
        try:
            found = _inspect(path, overrides)
        except GemError as error:
            found = f"not available: {error.what}" + (f" ({error.where})" if error.where else "")
    lines = [list(read_lines(p)) if p.is_file() else [] for p in (folder.metrics, folder.evals)]
    return Run(path, config, folder.config.read_text(), _json(folder.header), _json(folder.summary), lines[0], lines[1], found)


def _inspect(path: Path, overrides: Sequence[str]) -> Inspection:
    with loaded_run(path, overrides=overrides) as run:
        model, config = run.parts.model, run.resolved.config
        parameters: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            part = name.split(".")[0]
            parameters[part] = parameters.get(part, 0) + parameter.numel()
        counted = getattr(model, "flops", None)
        first = next(iter(build_source(run.resolved, "eval", run.runtime)))
        flops = {} if counted is None else {part: float(n) / max(1, first.size) for part, n in counted(first).items()}
        if isinstance(model, Retrieval):
            return Inspection(run.step, 0, {}, parameters, flops)
        tasks = task_names(config.features)
        curve = CalibrationCurve(tasks)
        source = build_source(run.resolved, "eval", run.runtime)
        _, samples = evaluate(run.parts.module, model, source, config.eval, tasks, run.runtime, [curve])
        return Inspection(run.step, samples, curve.points(), parameters, flops)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except ValueError as error:
        raise CheckpointError("the file is damaged", where=str(path), fix="restore it, or run the training again") from error
