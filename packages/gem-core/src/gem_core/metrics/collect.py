"""All metrics of all tasks over one evaluation set: from batches and logits to values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, get_args

import torch
from torch import Tensor

from gem_core.batch import Batch
from gem_core.errors import DataError, PluginError
from gem_core.metrics.contract import Better, Metric, Predictions, Value
from gem_core.sources.contract import TRUE_PROBABILITY

ALWAYS = ("bayes_ne",)
"""Metrics that are computed whether or not the configuration names them."""

Gather = Callable[[Tensor], list[Tensor]]
"""A CPU tensor to the same tensor of every other rank (the first dimension may differ)."""


class Collector(Protocol):
    """What an evaluation feeds with batches and logits, and merges over the ranks."""

    def update(self, batch: Batch, logits: Tensor, tasks: tuple[str, ...]) -> None: ...

    def merge(self, gather: Gather) -> None: ...


class MetricSet:
    """Metrics by task and name, fed batch by batch.

    :param build: metric name -> a fresh metric.
    :param group: column or single-valued sparse feature that keys group metrics.
    """

    def __init__(self, tasks: Iterable[str], build: Mapping[str, Callable[[], Metric]], group: str | None = None) -> None:
        self.metrics: dict[str, dict[str, Metric]] = {task: {name: fresh(name, b) for name, b in build.items()} for task in tasks}
        self.group = group
        self.samples = 0
        self._broken = torch.zeros(len(self.metrics), dtype=torch.int64)

    def update(self, batch: Batch, logits: Tensor, tasks: tuple[str, ...]) -> None:
        """Add a batch (CPU tensors) and its ``logits [B, T]`` (CPU) in the order of ``tasks``."""
        if batch.labels is None:
            raise DataError("the evaluation data has no labels", fix="declare them in [features.labels]")
        missing = [task for task in self.metrics if task not in batch.label_names or task not in tasks]
        if missing:
            raise DataError(
                f"the task {missing[0]!r} has no {'label' if missing[0] not in batch.label_names else 'prediction'}",
                where=f"features.labels.{missing[0]}",
                fix=f"the data has the labels {', '.join(batch.label_names)}; the model predicts {', '.join(tasks)}",
            )
        self.samples += batch.size
        group = None if self.group is None else group_key(batch, self.group)
        labels, weights = batch.labels.double(), batch.weights
        if weights is not None and not bool(((weights >= 0) & weights.isfinite()).all()):
            fix = "the source must give weights of at least 0; 0 leaves a sample out"
            what = "a sample of the evaluation data has a weight that is negative or not finite"
            raise DataError(what, where="features.weight", fix=fix)
        for i, task in enumerate(self.metrics):
            column, source = tasks.index(task), batch.label_names.index(task)
            weight = torch.ones(batch.size, dtype=torch.float64) if weights is None else weights.double()
            weight = weight if weight.dim() == 1 else weight[:, source]
            keep = weight > 0
            if batch.label_mask is not None:
                keep &= batch.label_mask[:, source]
            finite = torch.isfinite(logits[:, column])
            self._broken[i] += int((keep & ~finite).sum())
            keep &= finite
            if not bool(keep.any()):
                continue
            logit, label, truth = logits[keep, column], labels[keep, source], batch.columns.get(TRUE_PROBABILITY + task)
            if not bool(((label >= 0) & (label <= 1)).all()):
                fix = "the source must give labels in [0, 1], and a label_mask where one is missing"
                raise DataError("a sample of the evaluation data has a label outside [0, 1]", where=f"features.labels.{task}", fix=fix)
            rows = Predictions(
                task,
                logit,
                torch.sigmoid(logit.double()),
                label,
                weight[keep],
                None if group is None else group[keep],
                None if truth is None else truth[keep].double(),
            )
            for name, metric in self.metrics[task].items():
                with _named(name):
                    metric.update(rows)

    def merge(self, gather: Gather) -> None:
        """Add the states of all other ranks; every rank must call it."""
        self.samples += sum(int(t) for t in gather(torch.tensor([self.samples])))
        for broken in gather(self._broken.unsqueeze(0)):
            self._broken += broken[0]
        for metrics in self.metrics.values():
            for name, metric in metrics.items():
                with _named(name):
                    others = {key: gather(tensor) for key, tensor in metric.state().items()}
                    for k in range(len(next(iter(others.values()), []))):
                        metric.merge({key: tensors[k] for key, tensors in others.items()})

    def compute(self) -> dict[str, dict[str, Value]]:
        """``{task: {metric: value}}``."""
        results = {}
        for (task, metrics), broken in zip(self.metrics.items(), self._broken.tolist()):
            reason = f"{broken} of the predictions are not finite"
            results[task] = {name: Value(None, reason, broken=True) if broken else _value(name, metric) for name, metric in metrics.items()}
        return results


def fresh(name: str, build: Callable[[], Metric]) -> Metric:
    """A new metric.

    :raises PluginError: what ``build`` gives lacks something of `Metric`.
    """
    with _named(name):
        metric = build()
    lacking = [member for member in ("better", "update", "state", "merge", "compute") if not hasattr(metric, member)]
    if lacking:
        raise _wrong(name, f"lacks {', '.join(lacking)}")
    if metric.better not in get_args(Better):
        raise _wrong(name, f"says better = {metric.better!r}, which is none of {', '.join(map(repr, get_args(Better)))}")
    return metric


def _value(name: str, metric: Metric) -> Value:
    with _named(name):
        value = metric.compute()
    if not isinstance(value, Value):
        raise _wrong(name, f"computes a {type(value).__name__}, not a gem_core.metrics.Value")
    if value.value is not None and not isinstance(value.value, int | float):
        raise _wrong(name, f"computes a Value of a {type(value.value).__name__}, not of a float or None")
    return value


def _wrong(name: str, what: str) -> PluginError:
    return PluginError(
        f"the metric {name!r} {what}",
        where="eval.metrics",
        fix="mend the plug-in that offers it (`gemrec plugins` tells which): gem_core.metrics.contract.Metric says what a metric has",
    )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Tell whose fault it is: the traceback of a plug-in's own mistake ends in its own line, and that is what its author needs."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while the metric {name!r} of eval.metrics was computed")
        raise


def group_key(batch: Batch, name: str, where: str = "eval.group") -> Tensor:
    """``[B]`` int64 keys: a column of the batch, or a sparse feature with exactly one id a sample. ``where`` names it in errors.

    :raises DataError: there is no such column or feature, the column holds numbers that are not whole, or a sample has no or several ids.
    """
    if name in batch.columns:
        values = batch.columns[name]
        if values.is_floating_point() and bool((values != values.round()).any()):
            raise DataError(
                f"the column {name!r} holds numbers that are not whole or missing",
                where=where,
                fix="name a column of whole numbers or text, or a sparse feature of one id a sample",
            )
        return values.long()
    if batch.sparse is None or name not in batch.sparse.keys:
        there = dict.fromkeys((*batch.columns, *(batch.sparse.keys if batch.sparse else ())))
        raise DataError(
            f"the evaluation data has neither a column nor a sparse feature called {name!r}",
            where=where,
            fix=f"it has: {', '.join(there) or 'none'}",
        )
    ids = batch.sparse[name]
    if bool((ids.lengths != 1).any()):
        raise DataError(
            f"the sparse feature {name!r} has no or several ids in some samples, so it cannot group them",
            where=where,
            fix="name a feature with one id a sample, or a column",
        )
    return ids.values.long()
