"""Callbacks that tell a run's numbers to an experiment tracker: ``[train.callbacks.mlflow]`` and ``[train.callbacks.wandb]``.

Only rank 0 talks to the tracker. A resumed run goes on in the tracker's run of before. A tracker that cannot be reached at the start is an
error; one that fails later costs its numbers and not the training: it is said when it begins, and at the end how often.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Literal

from pydantic import Field

from gem_core.config.base import FrozenConfig
from gem_core.errors import ConfigError, RunError
from gem_core.train.contract import Callback, Results, RunInfo


class MLflowConfig(FrozenConfig):
    """``[train.callbacks.mlflow]``"""

    tracking_uri: str | None = Field(None, description="server or folder; None: what MLFLOW_TRACKING_URI says, else ./mlruns")
    experiment: str = Field("gem", min_length=1)


class WandbConfig(FrozenConfig):
    """``[train.callbacks.wandb]``"""

    project: str = Field("gem", min_length=1)
    entity: str | None = None
    mode: Literal["online", "offline"] | None = Field(None, description="None: what WANDB_MODE says, else online")
    tags: tuple[str, ...] = ()


class Tracker(Callback):
    """What both trackers share. ``package``: the module to import and the extra that brings it."""

    package: str

    def __init__(self) -> None:
        try:
            self.library = import_module(self.package)
        except ImportError as error:
            raise ConfigError(
                f"the package {self.package} is not usable: {error}",
                where=f"train.callbacks.{self.package}",
                fix=f"pip install 'gem-core[{self.package}]', or remove the callback",
            ) from error
        self.run_id: str | None = None
        self.lost, self._tracks = 0, False

    def begin(self, run: RunInfo) -> None:
        """Begin or continue the tracker's run."""
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def finish(self, succeeded: bool, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def on_start(self, run: RunInfo) -> None:
        if run.rank:
            return
        try:
            self.begin(run)
        except Exception as error:
            raise RunError(
                f"{self.package} cannot begin a run: {type(error).__name__}: {error}",
                where=f"train.callbacks.{self.package}",
                fix="check its address and login, or remove the callback",
            ) from error
        self._tracks = True

    def on_step(self, run: RunInfo, record: Mapping[str, Any] | None) -> None:
        if record is not None:
            self._try(lambda: self.log(run.step, {f"train/{k}": v for k, v in _numbers(record) if k != "step"}))

    def on_eval(self, run: RunInfo, results: Results, record: Mapping[str, Any]) -> None:
        values = {f"eval/{t}/{name}": v.value for t, metrics in results.items() for name, v in metrics.items() if v.value is not None}
        self._try(lambda: self.log(run.step, values))

    def on_error(self, run: RunInfo, error: BaseException) -> None:
        self._end(False, {})

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        self._end(True, {f"final/{k}": v for k, v in _numbers(summary)})

    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run_id = state["run_id"]

    def _end(self, succeeded: bool, values: Mapping[str, float]) -> None:
        self._try(lambda: self.finish(succeeded, values))
        if self.lost:
            print(f"{self.package}: {self.lost} messages did not reach the tracker; metrics.jsonl has all numbers", file=sys.stderr)
        self._tracks = False

    def _try(self, action: Callable[[], None]) -> None:
        if not self._tracks:
            return
        try:
            action()
        except Exception as error:  # whatever the library raises: the training is worth more than its log
            if not self.lost:
                print(f"{self.package}: the tracker fails ({type(error).__name__}: {error}); the training goes on", file=sys.stderr)
            self.lost += 1


class MLflow(Tracker):
    """Parameters, metrics and tags through ``mlflow.MlflowClient``, which leaves the library's global state alone."""

    package = "mlflow"

    def __init__(self, config: MLflowConfig) -> None:
        super().__init__()
        self.config = config

    def begin(self, run: RunInfo) -> None:
        entities = import_module("mlflow.entities")
        self.metric = entities.Metric
        self.client = self.library.MlflowClient(tracking_uri=self.config.tracking_uri)
        if self.run_id is not None:
            self.client.update_run(self.run_id, status="RUNNING")
            return
        found = self.client.get_experiment_by_name(self.config.experiment)
        experiment = self.client.create_experiment(self.config.experiment) if found is None else found.experiment_id
        tags = {f"gem.{k}": str(run.header[k]) for k in ("model", "device", "commit", "world") if k in run.header}
        self.run_id = self.client.create_run(experiment, run_name=run.config.run.name, tags=tags).info.run_id
        settings = [entities.Param(key, str(value)[:500]) for key, value in _flat(run.config.model_dump(mode="json"))]
        for start in range(0, len(settings), 100):
            self.client.log_batch(self.run_id, params=settings[start : start + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1e3)
        self.client.log_batch(self.run_id, metrics=[self.metric(k, v, now, step) for k, v in values.items()])

    def finish(self, succeeded: bool, values: Mapping[str, float]) -> None:
        for key, number in values.items():
            self.client.log_metric(self.run_id, key, number)
        self.client.set_terminated(self.run_id, "FINISHED" if succeeded else "FAILED")


class Wandb(Tracker):
    """A run of ``wandb.init``, kept in the run folder; the optimizer step is the axis of every chart."""

    package = "wandb"

    def __init__(self, config: WandbConfig) -> None:
        super().__init__()
        self.config = config

    def begin(self, run: RunInfo) -> None:
        c = self.config
        self.run = self.library.init(
            project=c.project, entity=c.entity, mode=c.mode, tags=list(c.tags), name=run.config.run.name, dir=str(run.directory),
            id=self.run_id, resume=None if self.run_id is None else "allow", config=dict(_flat(run.config.model_dump(mode="json"))),
        )  # fmt: skip
        self.run_id = self.run.id
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log({"step": step, **values})

    def finish(self, succeeded: bool, values: Mapping[str, float]) -> None:
        self.run.summary.update(dict(values))
        self.run.finish(exit_code=0 if succeeded else 1)


def _numbers(record: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{path}{key}", float(value)


def _flat(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
