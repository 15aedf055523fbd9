"""Evaluating a finished run: the model of a run folder's checkpoint on a split or on other data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gem_core.config import Config, ResolvedConfig, load_config, resolve
from gem_core.errors import CheckpointError
from gem_core.ops import use_policy
from gem_core.train.build import Parts, build_parts, build_source, task_names
from gem_core.train.contract import Results
from gem_core.train.evaluate import evaluate
from gem_core.train.runfolder import RunFolder
from gem_core.train.runtime import Runtime, runtime
from gem_core.train.state import load_guard, load_parameters


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one checkpoint on one split; ``main`` is true in the process that should print them."""

    step: int
    samples: int
    results: Results
    main: bool


def run_config(path: Path, overrides: Iterable[str] = ()) -> Config:
    """The configuration of a run folder.

    :raises CheckpointError: it is no run folder.
    """
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise CheckpointError("this is no run folder: it has no config.toml", where=str(path), fix="give a folder that gemrec train made")
    # The run's own copy of vocabularies and edges: the file that was named may have changed since.
    kept = [f"features.fitted={json.dumps(str(folder.fitted.resolve()))}"] if folder.fitted.is_file() else []
    return load_config(folder.config, [*kept, *overrides])


def evaluate_run(path: str | Path, *, split: str = "eval", overrides: Iterable[str] = (), step: int | None = None) -> Evaluation:
    """Evaluate the newest checkpoint of the run in ``path``, or that of ``step``, on ``split``.

    :param overrides: ``KEY=VALUE`` on the run's configuration: other data, another device, further metrics.
    :raises CheckpointError: no run folder, no usable checkpoint, or one that does not fit the overridden configuration.
    """
    with loaded_run(path, overrides=overrides, step=step) as run:
        config, parts, rt = run.resolved.config, run.parts, run.runtime
        source = build_source(run.resolved, split, rt)
        results, samples = evaluate(parts.module, parts.model, source, config.eval, task_names(config.features), rt)
        return Evaluation(run.step, samples, results, rt.main)


@dataclass(frozen=True)
class LoadedRun:
    """The parts of a run with the parameters of one checkpoint, in this process."""

    resolved: ResolvedConfig
    parts: Parts
    runtime: Runtime
    step: int


@contextmanager
def loaded_run(path: str | Path, *, overrides: Iterable[str] = (), step: int | None = None) -> Iterator[LoadedRun]:
    """The run in ``path`` at its newest checkpoint, or at that of ``step``, ready to be called; see `evaluate_run`."""
    resolved = resolve(run_config(Path(path), overrides))
    config, store = resolved.config, RunFolder(Path(path)).checkpoints
    with runtime(config) as rt, use_policy(config.kernels.default, config.kernels.ops):
        checkpoint = store.latest()[0] if step is None else store.load(step)
        parts = build_parts(resolved, rt, trains=False)
        load_parameters(parts, checkpoint)
        if config.precision == run_config(Path(path)).precision:
            load_guard(parts, checkpoint)
        yield LoadedRun(resolved, parts, rt, checkpoint.step)
