"""Evaluation metrics: weighted, masked, pooled over the whole evaluation set, undefined (with the reason) where they have no value."""

from __future__ import annotations

from gem_core.hookspecs import MetricSpec
from gem_core.metrics.contract import Better, Metric, Predictions, Value, undefined

__all__ = ["Better", "Metric", "Predictions", "Value", "builtin_specs", "undefined"]


def builtin_specs() -> list[MetricSpec]:
    """What the core offers through ``gem_metrics``."""
    from gem_core.metrics import external, rank, sums

    return [
        MetricSpec("ne", lambda config: sums.NormalizedEntropy()),
        MetricSpec("bayes_ne", lambda config: sums.BayesNormalizedEntropy()),
        MetricSpec("logloss", lambda config: sums.LogLoss()),
        MetricSpec("calibration", lambda config: sums.Calibration()),
        MetricSpec("auc", lambda config: rank.Auc()),
        MetricSpec("auc_binned", lambda config: rank.BinnedAuc()),
        MetricSpec("gauc", lambda config: rank.GroupAuc()),
        MetricSpec("average_precision", external.average_precision),
        MetricSpec("ece", external.expected_calibration_error),
    ]
