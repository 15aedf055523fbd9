"""Metrics taken from torchmetrics, where it has one of the same meaning. It has no sample weights for these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gem_core.metrics.contract import Better, Value, undefined
from gem_core.metrics.rank import _Rows
from gem_core.metrics.sums import one_class


class FromTorchmetrics(_Rows):
    """``build()`` gives a torchmetrics metric of ``(probability, label in {0, 1})``, asked once about all rows."""

    def __init__(self, build: Callable[[], Any], better: Better, needs_both_classes: bool) -> None:
        super().__init__()
        self.build, self.better, self.needs_both_classes = build, better, needs_both_classes

    def compute(self) -> Value:
        rows = self.state()
        label, weight = rows["label"], rows["weight"]
        if not label.numel():
            return undefined("no row was evaluated")
        if bool((weight != weight[0]).any()):
            return undefined("it takes no sample weights")
        if bool(((label != 0) & (label != 1)).any()):
            return undefined("it needs labels of 0 and 1")
        reason = one_class(float(label.sum()), float((1 - label).sum()))
        if reason and self.needs_both_classes:
            return undefined(reason)
        return Value(float(self.build()(torch.sigmoid(rows["logit"]), label.long())))


def average_precision(_config: Any) -> FromTorchmetrics:
    """Area under the precision-recall curve (``torchmetrics.classification.BinaryAveragePrecision``)."""

    def build() -> Any:
        from torchmetrics.classification import BinaryAveragePrecision

        return BinaryAveragePrecision()

    return FromTorchmetrics(build, "higher", True)


def expected_calibration_error(_config: Any) -> FromTorchmetrics:
    """Mean distance of predicted and observed rate over 100 equal bins (``torchmetrics.classification.BinaryCalibrationError``)."""

    def build() -> Any:
        from torchmetrics.classification import BinaryCalibrationError

        return BinaryCalibrationError(n_bins=100)

    return FromTorchmetrics(build, "lower", False)
