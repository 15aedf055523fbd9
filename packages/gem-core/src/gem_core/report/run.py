"""What a report is made from: the files of a run folder, and what one pass over the data tells beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gem_core.batch import Batch
from gem_core.config import Config
from gem_core.errors import CheckpointError, GemError
from gem_core.metrics.curve import CalibrationCurve, Point
from gem_core.model.contract import Retrieval
from gem_core.requests import history_lengths
from gem_core.train.build import build_source, present, task_names
from gem_core.train.evaluate import evaluate
from gem_core.train.offline import loaded_run, run_config
from gem_core.train.runfolder import RunFolder, read_lines

SAMPLES_OF_LENGTHS = 20_000
"""Training samples whose histories are counted, from the beginning of the training data."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of one history over ``samples``: how many are 0, 1, 2 to 3, 4 to 7, …; mean and longest."""

    counts: Sequence[int]
    samples: int
    mean: float
    longest: int


@dataclass(frozen=True)
class Inspection:
    """Of the newest checkpoint: calibration by task, samples that it is of, parameters and training FLOPs a sample by part of the model;
    and the lengths of histories in the training data."""

    step: int
    samples: int
    calibration: Mapping[str, Sequence[Point]]
    parameters: Mapping[str, int]
    flops: Mapping[str, float]
    lengths: Mapping[str, Lengths]


@dataclass(frozen=True)
class Run:
    """A run folder as read. ``inspection`` is a sentence where there is none: why. ``profiles``: summaries of `gem_core.train.profile`
    by rank. ``label`` is its name in legends."""

    path: Path
    label: str
    config: Config
    text: str
    header: Mapping[str, Any]
    summary: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    evals: Sequence[Mapping[str, Any]]
    decisions: Sequence[Mapping[str, Any]]
    inspection: Inspection | str
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def read(path: Path, *, inspect: bool = True, overrides: Sequence[str] = (), label: str | None = None) -> Run:
    """Read the folder; ``inspect`` also loads the newest checkpoint and evaluates it on the evaluation split.

    What that lacks (no checkpoint yet, data that is not on this machine) is told in the report and does not fail it.

    :raises CheckpointError: it is no run folder; ConfigError: an override that no configuration takes.
    """
    folder, config = RunFolder(path), run_config(path)
    run_config(path, overrides)
    found: Inspection | str = "left out: --no-eval was given"
    if inspect:
        try:
            found = _inspect(path, overrides)
        except GemError as error:
            found = f"not available: {error.what}" + (f" ({error.where})" if error.where else "")
    steps, evals, decisions = (list(read_lines(p)) if p.is_file() else [] for p in (folder.metrics, folder.evals, folder.decisions))
    profiles = {p.parent.name: _json(p) for p in sorted((path / "profile").glob("rank-*/summary.json"))}
    header = _json(folder.header)
    name = label or str(header.get("name") or path.name)
    text = folder.config.read_text()
    return Run(path, name, config, text, header, _json(folder.summary), steps, evals, decisions, found, profiles)


def labels(paths: Sequence[Path]) -> list[str]:
    """The names of runs where all differ, else those of their folders, else the whole paths."""
    names = [str(_json(RunFolder(p).header).get("name") or p.name) for p in paths]
    for found in (names, [p.name for p in paths]):
        if len(set(found)) == len(found):
            return found
    return [str(p) for p in paths]


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
        lengths = count_lengths(present(build_source(run.resolved, "train", run.runtime)))
        if isinstance(model, Retrieval):
            return Inspection(run.step, 0, {}, parameters, flops, lengths)
        tasks = task_names(config.features)
        curve = CalibrationCurve(tasks)
        source = build_source(run.resolved, "eval", run.runtime)
        _, samples = evaluate(run.parts.module, model, source, config.eval, tasks, run.runtime, [curve])
        return Inspection(run.step, samples, curve.points(), parameters, flops, lengths)


def count_lengths(batches: Iterable[Batch], most: int = SAMPLES_OF_LENGTHS) -> dict[str, Lengths]:
    """Lengths by history over the first ``most`` samples, to the end of a batch."""
    found: dict[str, list[torch.Tensor]] = {}
    seen = 0
    for batch in batches:
        for name, lengths in history_lengths(batch).items():
            found.setdefault(name, []).append(lengths.cpu().to(torch.int64))
        seen += batch.size
        if seen >= most:
            break
    result = {}
    for name, pieces in found.items():
        whole = torch.cat(pieces)
        # 0, 1, 2..3, 4..7: the number of binary digits
        digits = torch.where(whole > 0, whole.double().clamp(min=1).log2().floor().long() + 1, 0)
        counts = [int(n) for n in torch.bincount(digits)]
        result[name] = Lengths(counts, whole.numel(), float(whole.double().mean()), int(whole.max()))
    return result


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CheckpointError("the file is damaged", where=str(path), fix="restore it, or remove it: the report then does without")
    return found
