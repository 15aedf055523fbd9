"""What a metric promises the evaluation, and what it is given.

A third party offers ``MetricSpec(name, build)`` through the hook ``gem_metrics``; ``build(config)`` gets the ``[eval]`` section and
returns a fresh `Metric`. The evaluation builds one for each task, feeds it every counted row of the evaluation set once, merges the
states of all ranks and asks for the value: a metric is therefore always pooled over the whole set, never a mean over batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor

Better = Literal["lower", "higher", "one"]


@dataclass(frozen=True)
class Predictions:
    """The rows of one batch that count for one task (label mask true, weight above 0), on the CPU.

    ``logit [n]`` as the model gave it (rank by this: two logits may share a probability), ``probability [n]`` its sigmoid in float64,
    ``label [n]`` float64 in [0, 1], ``weight [n]`` float64 > 0, ``group [n]`` int64 or None (the key of ``eval.group``),
    ``true_probability [n]`` float64 or None (planted logs only).
    """

    task: str
    logit: Tensor
    probability: Tensor
    label: Tensor
    weight: Tensor
    group: Tensor | None = None
    true_probability: Tensor | None = None


@dataclass(frozen=True)
class Value:
    """A result. ``value`` None means undefined, and ``reason`` then says why; ``details`` may hold further numbers about it. ``broken``: it
    is the model's fault (predictions that are not finite), not that of the samples."""

    value: float | None
    reason: str | None = None
    details: Mapping[str, float] = field(default_factory=dict)
    broken: bool = False


def undefined(reason: str) -> Value:
    """No value, with the reason that the user reads."""
    return Value(None, reason)


def result_record(results: Mapping[str, Mapping[str, Value]]) -> dict[str, Any]:
    """For JSON: ``tasks``: task -> metric -> value, null where undefined; ``undefined``: task -> metric -> the reason."""
    return {
        "tasks": {task: {name: v.value for name, v in metrics.items()} for task, metrics in results.items()},
        "undefined": {task: {name: v.reason for name, v in metrics.items() if v.value is None} for task, metrics in results.items()},
    }


@runtime_checkable
class Metric(Protocol):
    """One metric of one task over one evaluation set.

    ``better`` tells early stopping what an improvement is: a lower value, a higher one, or one nearer to 1.
    """

    better: Better

    def update(self, rows: Predictions) -> None:
        """Add rows; never called with zero rows."""

    def state(self) -> dict[str, Tensor]:
        """Everything added so far as CPU tensors. The keys, dtypes and trailing dimensions never depend on the data; the first may."""

    def merge(self, state: Mapping[str, Tensor]) -> None:
        """Add what another rank's metric of the same kind has seen."""

    def compute(self) -> Value:
        """The value over all rows seen."""
