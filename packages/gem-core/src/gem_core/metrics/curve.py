"""The calibration curve: what was predicted against what happened, in groups of equal weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_core.batch import Batch
from gem_core.metrics.collect import Gather, MetricSet
from gem_core.metrics.contract import Better, Predictions, Value
from gem_core.metrics.rank import interval

BINS, LIMIT = 4096, 20.0


@dataclass(frozen=True)
class Point:
    """A group: weighted mean prediction, weighted rate of the label, its 95 % interval (Wilson), rows."""

    predicted: float
    observed: float
    low: float
    high: float
    rows: int


class CalibrationCurve:
    """One curve a task in constant memory: rows fall into `BINS` equal intervals of the logit in [-`LIMIT`, `LIMIT`], which are put
    together to groups of about equal weight at the end. Fed and merged as a `MetricSet` is."""

    def __init__(self, tasks: tuple[str, ...]) -> None:
        self._set = MetricSet(tasks, {"curve": _Histogram})

    def update(self, batch: Batch, logits: Tensor, tasks: tuple[str, ...]) -> None:
        self._set.update(batch, logits, tasks)

    def merge(self, gather: Gather) -> None:
        self._set.merge(gather)

    def points(self, groups: int = 15) -> dict[str, list[Point]]:
        """Task -> at most ``groups`` points, predictions ascending; none where no row counted."""
        found = {}
        for task, metrics in self._set.metrics.items():
            histogram = metrics["curve"]
            assert isinstance(histogram, _Histogram)
            found[task] = histogram.points(groups)
        return found


class _Histogram:
    better: Better = "one"

    def __init__(self) -> None:
        self.sums = torch.zeros(4, BINS, dtype=torch.float64)  # weight, weighted prediction, weighted label, rows

    def update(self, rows: Predictions) -> None:
        slot = interval(rows.logit, BINS, LIMIT)
        w = rows.weight
        for total, part in zip(self.sums, (w, w * rows.probability, w * rows.label, torch.ones_like(w))):
            total.index_add_(0, slot, part)

    def state(self) -> dict[str, Tensor]:
        return {"sums": self.sums.unsqueeze(0)}

    def merge(self, state: Mapping[str, Tensor]) -> None:
        self.sums += state["sums"].sum(0)

    def compute(self) -> Value:
        return Value(float(self.sums[1].sum() / self.sums[2].sum()) if float(self.sums[2].sum()) else None, "a curve is read by its points")

    def points(self, groups: int) -> list[Point]:
        weight = self.sums[0]
        if float(weight.sum()) <= 0:
            return []
        before = weight.cumsum(0) - weight
        group = (before * groups / weight.sum()).long().clamp(max=groups - 1)
        totals = torch.zeros(4, groups, dtype=torch.float64).index_add_(1, group, self.sums)
        return [_point(*column.tolist()) for column in totals.T if column[0] > 0]


def _point(weight: float, predicted: float, positive: float, rows: float) -> Point:
    rate, z = positive / weight, 1.96
    centre, spread = rate + z * z / (2 * rows), z * math.sqrt(rate * (1 - rate) / rows + z * z / (4 * rows * rows))
    scale = 1 + z * z / rows
    return Point(predicted / weight, rate, max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale), int(rows))
