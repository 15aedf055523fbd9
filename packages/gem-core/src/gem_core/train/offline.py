"""Evaluating a finished run: the model of a run folder's checkpoint on a split or on other data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gem_core.config import Config, Features, ResolvedConfig, load_config, resolve
from gem_core.errors import CheckpointError, ConfigError, DataError
from gem_core.metrics.slices import SlicedMetrics, record, slicing
from gem_core.model.contract import Retrieval
from gem_core.ops import use_policy
from gem_core.train.build import Parts, build_parts, build_source, check_hashed, task_names
from gem_core.train.contract import Results
from gem_core.train.evaluate import evaluate, metric_builders
from gem_core.train.pack import read_json
from gem_core.train.runfolder import RunFolder
from gem_core.train.runtime import Runtime, runtime
from gem_core.train.state import load_guard, load_parameters, opened


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one checkpoint on one split, also by slices (``{by: {slice: {samples, tasks, undefined}}}``); ``main`` is true in the
    process that should print them."""

    step: int
    samples: int
    results: Results
    main: bool
    slices: Mapping[str, Any] = field(default_factory=dict)


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


def hashed_in(folder: RunFolder) -> dict[str, list[str]]:
    """What the run's columns of hashed ids held, as far as its source told."""
    return _told_in(folder, "hashed")


def lists_in(folder: RunFolder) -> dict[str, bool]:
    """Whether the columns of the run's id features held lists, as far as its source told."""
    return _told_in(folder, "lists")


def _told_in(folder: RunFolder, what: str) -> dict[str, Any]:
    header = read_json(folder.header) if folder.header.is_file() else {}
    return dict(header.get(what) or {}) if isinstance(header, dict) else {}


def evaluate_run(
    path: str | Path, *, split: str = "eval", overrides: Iterable[str] = (), step: int | None = None, by: Sequence[str] = ()
) -> Evaluation:
    """Evaluate the newest checkpoint of the run in ``path``, or that of ``step``, on ``split``.

    :param overrides: ``KEY=VALUE`` on the run's configuration: other data, another device, further metrics.
    :param by: also by slices; see `gem_core.metrics.slices.slicing`. A column that the run did not carry along is read.
    :raises CheckpointError: no run folder, no usable checkpoint, or one that does not fit the overridden configuration.
    """
    changes = [*overrides, *_carried(run_config(Path(path), overrides).features, by)]
    with loaded_run(path, overrides=changes, step=step) as run:
        config, parts, rt = run.resolved.config, run.parts, run.runtime
        if by and isinstance(parts.model, Retrieval):
            raise ConfigError("ranks among all items have no slices", where="--by", fix="leave it out for a model that retrieves items")
        tasks, builders = task_names(config.features), metric_builders(config.eval)
        slices = [SlicedMetrics(slicing(b, config.features, run.updated), tasks, builders, config.eval.group) for b in dict.fromkeys(by)]
        try:
            source = build_source(run.resolved, split, rt)
        except DataError as error:
            named = next((b for b in by if f"column {b!r} is missing" in error.what), None)
            if named is None:
                raise
            fix = f"slice by day, warm, warm:FEATURE, a column of the data or one of {', '.join(config.features.sparse)}"
            raise ConfigError(f"there is nothing called {named!r} to slice by", where=f"--by {named}", fix=fix) from error
        check_hashed(source, run.hashed)
        results, samples = evaluate(parts.module, parts.model, source, config.eval, tasks, rt, slices)
        return Evaluation(run.step, samples, results, rt.main, record(slices))


def _carried(features: Features, by: Sequence[str]) -> list[str]:
    """The override that makes the source carry the columns that slices need."""
    known = (*features.columns, *features.sparse, "day", "warm")
    more = [b for b in by if b not in known and not b.startswith("warm:")]
    return [f"features.columns={json.dumps([*features.columns, *more])}"] if more else []


@dataclass(frozen=True)
class LoadedRun:
    """The parts of a run with the parameters of one checkpoint, in this process."""

    resolved: ResolvedConfig
    parts: Parts
    runtime: Runtime
    step: int
    hashed: Mapping[str, list[str]] = field(default_factory=dict)
    """What training's columns of hashed ids held; see `gem_core.sources.contract.Source`."""

    def updated(self, table: str) -> Tensor:
        """``[rows]`` bool: the rows of ``table`` that training had updated, which those of ids that it never saw are not.

        :raises ConfigError: the tables keep no accumulator that tells.
        """
        state = dict(self.parts.tables.state_items()) if self.parts.tables is not None else {}
        found = state.get(f"{table}.accumulator")
        if not isinstance(found, Tensor) or self.resolved.config.train.tables.kind != "rowwise_adagrad":
            raise ConfigError(
                "warm and cold ids are told apart by the accumulators of row-wise AdaGrad, which this run's tables lack here",
                where="--by warm",
                fix="evaluate in one process a run that was trained with train.tables.kind = rowwise_adagrad",
            )
        return found.detach().cpu() > self.resolved.config.train.tables.initial_accumulator


@contextmanager
def loaded_run(path: str | Path, *, overrides: Iterable[str] = (), step: int | None = None) -> Iterator[LoadedRun]:
    """The run in ``path`` at its newest checkpoint, or at that of ``step``, ready to be called; see `evaluate_run`."""
    resolved = resolve(run_config(Path(path), overrides))
    config, store = resolved.config, RunFolder(Path(path)).checkpoints
    with runtime(config) as rt, use_policy(config.kernels.default, config.kernels.ops):
        checkpoint = opened(store, step, rt)
        parts = build_parts(resolved, rt, trains=False)
        load_parameters(parts, checkpoint)
        if config.precision == run_config(Path(path)).precision:
            load_guard(parts, checkpoint)
        yield LoadedRun(resolved, parts, rt, checkpoint.step, hashed_in(RunFolder(Path(path))))
