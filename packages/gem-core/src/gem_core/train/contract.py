"""What recipes, strategies and callbacks promise the trainer, and what they are given."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from gem_core.config.schema import Config
from gem_core.metrics.contract import Value

Results = Mapping[str, Mapping[str, Value]]
"""``{task: {metric: value}}``."""


@dataclass(frozen=True)
class RecipeContext:
    """Given to ``RecipeSpec.apply(module, config, context)``: where the module runs and whether it is going to be compiled."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    compile: bool = False


@runtime_checkable
class DenseModule(Protocol):
    """What ``StrategySpec.build(model, mesh, config)`` of a dense strategy returns: called as the model is.

    - ``model`` stays the owner of the parameters: its names are the canonical names of checkpoints, so a strategy shards or wraps it in
      place and never renames.
    - The loss of each rank is already divided by the *global* sample weight and multiplied by the world, so that a strategy that
      averages gradients over the ranks, as PyTorch's do, gives the gradient of the global mean loss.
    - Parameters of ``model.tables`` are not the dense strategy's business.
    - ``no_sync()``, where it exists, is entered for all micro-batches of a step but the last.
    - ``describe()``, where it exists, gives lines for the head of the run.
    """

    def __call__(self, batch: Any) -> Any: ...

    def no_sync(self) -> AbstractContextManager[Any]: ...


@dataclass
class RunInfo:
    """What a callback sees of the run. ``step`` and ``samples`` are kept up to date; the rest does not change."""

    config: Config
    directory: Path
    model: nn.Module
    total_steps: int | None
    rank: int
    world: int
    step: int = 0
    samples: int = 0
    header: Mapping[str, Any] = field(default_factory=dict)


class Callback:
    """Base of trainer callbacks; every method may be left out. Called on every rank, in the order of the configuration.

    A callback whose state must survive a restart adds ``state_dict()`` and ``load_state_dict(state)`` (JSON values and tensors).
    """

    def on_start(self, run: RunInfo) -> None:
        """Before the first step; after a checkpoint was loaded, if one was."""

    def on_step(self, run: RunInfo, record: Mapping[str, Any] | None) -> None:
        """After every optimizer step. ``record`` is the line of metrics.jsonl on log steps, else None; it must not be changed."""

    def on_eval(self, run: RunInfo, results: Results, record: Mapping[str, Any]) -> None:
        """After an evaluation. ``record`` is the line of eval.jsonl."""

    def on_checkpoint(self, run: RunInfo, path: Path, seconds: float) -> None:
        """After a checkpoint was published; training stood still for ``seconds``."""

    def on_error(self, run: RunInfo, error: BaseException) -> None:
        """The run fails with ``error``; it is raised again afterwards."""

    def on_end(self, run: RunInfo, summary: Mapping[str, Any]) -> None:
        """After summary.json was written."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    ``status``: "finished" (all steps), "early_stopped" or "interrupted" (a signal; resume continues). ``tasks``: task -> metric -> value,
    None where undefined. ``summary`` is the content of summary.json. ``main`` is true in the process of rank 0.
    """

    directory: Path
    status: str
    steps: int
    samples: int
    tasks: Mapping[str, Mapping[str, float | None]]
    summary: Mapping[str, Any]
    main: bool = True
