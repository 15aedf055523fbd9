"""Metrics of parts of an evaluation set: by day, by the value of a column, by whether training has seen the sample's ids."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import ConfigError, DataError
from gem_core.metrics.collect import Gather, MetricSet, group_key
from gem_core.metrics.contract import Metric, Value, result_record

MOST = 1000
"""Slices that are kept; more are refused, since each holds metrics of its own."""
_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


@dataclass(frozen=True)
class Slicing:
    """``keys(batch)`` gives each sample's slice ``[B]`` int64, ``label(key)`` the slice's name."""

    name: str
    keys: Callable[[Batch], Tensor]
    label: Callable[[int], str] = str


class SlicedMetrics:
    """A `MetricSet` for each slice that occurs, fed as one is."""

    def __init__(self, by: Slicing, tasks: Sequence[str], build: Mapping[str, Callable[[], Metric]], group: str | None = None) -> None:
        self.by, self.group = by, group
        self._make: Callable[[], MetricSet] = lambda: MetricSet(tasks, build, group)
        self.sets: dict[int, MetricSet] = {}

    def update(self, batch: Batch, logits: Tensor, tasks: tuple[str, ...]) -> None:
        """Add a batch (CPU tensors) and its ``logits [B, T]`` in the order of ``tasks``.

        :raises DataError: more than `MOST` slices.
        """
        keys = self.by.keys(batch)
        columns = dict(batch.columns)
        if self.group is not None:
            columns[self.group] = group_key(batch, self.group)
        judged = Batch(
            batch.size,
            labels=batch.labels,
            label_names=batch.label_names,
            label_mask=batch.label_mask,
            weights=batch.weights,
            columns=columns,
        )
        found, index = torch.unique(keys, return_inverse=True)
        for i, key in enumerate(found.tolist()):
            rows = torch.nonzero(index == i).squeeze(1)
            self._set(key).update(judged.take(rows), logits[rows], tasks)

    def merge(self, gather: Gather) -> None:
        """Add the slices of all other ranks; every rank must call it."""
        own = torch.tensor(sorted(self.sets), dtype=torch.int64)
        found = sorted({*own.tolist(), *(k for keys in gather(own) for k in keys.tolist())})
        for key in found:  # all of them before the first exchange: what is refused is refused by every rank
            self._set(key)
        for key in found:
            self._set(key).merge(gather)

    def compute(self) -> dict[str, tuple[int, dict[str, dict[str, Value]]]]:
        """``{slice: (samples, {task: {metric: value}})}``, slices in the order of their keys."""
        return {self.by.label(key): (found.samples, found.compute()) for key, found in sorted(self.sets.items())}

    def _set(self, key: int) -> MetricSet:
        if key not in self.sets:
            if len(self.sets) >= MOST:
                raise DataError(
                    f"the evaluation data has more than {MOST} slices by {self.by.name!r}",
                    where=f"--by {self.by.name}",
                    fix="slice by a column of few values; for per-user quality set eval.group and read gauc",
                )
            self.sets[key] = self._make()
        return self.sets[key]


def slicing(by: str, features: Features, seen: Callable[[str], Tensor]) -> Slicing:
    """What ``--by`` names: "day" (of the impression, UTC), "warm" or "warm:FEATURE", a column, or a sparse feature of one id a sample (a
    hashed one by the rows of its table: what was hashed is not in a batch).

    :param seen: table name -> ``[rows]`` bool, whether training has updated the row.
    :raises ConfigError: no time of the impression is declared; no such feature.
    """
    if by == "day":
        if features.timestamp is None:
            raise ConfigError("slices by day need the time of the impression", where="--by day", fix="declare features.timestamp")
        unit = _DAY[features.timestamp_unit]
        first = datetime.date(1970, 1, 1).toordinal()
        return Slicing(by, lambda batch: _times(batch) // unit, lambda day: str(datetime.date.fromordinal(first + day)))
    if by == "warm" or by.startswith("warm:"):
        named = by.partition(":")[2]
        wanted = [named] if named else list(features.sparse)
        unknown = [name for name in wanted if name not in features.sparse]
        if unknown or not wanted:
            raise ConfigError(
                f"there is no sparse feature {named!r} to tell warm samples from cold ones" if named else "there is no sparse feature",
                where=f"--by {by}",
                fix=f"use warm:FEATURE with one of: {', '.join(features.sparse) or 'none'}",
            )
        tables = {name: seen(features.table_of(f"sparse.{name}")) for name in wanted}
        return Slicing(by, lambda batch: _warm(batch, tables), lambda warm: "warm" if warm else "cold")
    hashed = by not in features.columns and by in features.sparse and features.sparse[by].hash
    return Slicing(by, lambda batch: group_key(batch, by, f"--by {by}"), (lambda row: f"row {row}") if hashed else str)


def record(slices: Iterable[SlicedMetrics]) -> dict[str, dict[str, dict[str, object]]]:
    """``{by: {slice: {samples, tasks, undefined}}}`` for JSON."""
    return {
        s.by.name: {label: {"samples": samples, **result_record(results)} for label, (samples, results) in s.compute().items()}
        for s in slices
    }


def _times(batch: Batch) -> Tensor:
    if batch.timestamps is None:
        raise DataError("the evaluation data has no times", where="features.timestamp", fix="declare the column of the impression's time")
    return batch.timestamps


def _warm(batch: Batch, tables: Mapping[str, Tensor]) -> Tensor:
    """1 where training has updated the rows of all ids that the sample has in these features (and it has one in each)."""
    warm = torch.ones(batch.size, dtype=torch.bool)
    for name, seen in tables.items():
        assert batch.sparse is not None
        ids = batch.sparse[name]
        lengths = ids.lengths
        known = torch.zeros(batch.size, dtype=torch.int64)
        known.index_add_(0, torch.repeat_interleave(torch.arange(batch.size), lengths), seen[ids.values].long())
        warm &= (known == lengths) & (lengths > 0)
    return warm.long()
