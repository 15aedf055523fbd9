"""Metrics that are functions of a few sums: normalised entropy, log loss, calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gem_core.metrics.contract import Better, Predictions, Value, undefined

ETA = 1e-12
"""Probabilities are clamped to [ETA, 1 - ETA] before a logarithm is taken."""


class _Sums:
    """Float64 sums over all rows; adding two ranks' sums is the merge."""

    better: Better = "lower"
    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.sums = torch.zeros(len(self.names), dtype=torch.float64)

    def state(self) -> dict[str, Tensor]:
        return {"sums": self.sums.unsqueeze(0)}

    def merge(self, state: Mapping[str, Tensor]) -> None:
        self.sums += state["sums"].sum(0)

    def __getitem__(self, name: str) -> float:
        return float(self.sums[self.names.index(name)])


def cross_entropy(label: Tensor, probability: Tensor) -> Tensor:
    """``-y ln p - (1 - y) ln(1 - p)`` in nats, elementwise, p clamped to [ETA, 1 - ETA]."""
    p = probability.double().clamp(ETA, 1 - ETA)
    return -(label * p.log() + (1 - label) * torch.log1p(-p))


class LogLoss(_Sums):
    """Weighted mean cross entropy in nats."""

    names = ("weight", "entropy")

    def update(self, rows: Predictions) -> None:
        self.sums += torch.stack([rows.weight.sum(), rows.weight @ cross_entropy(rows.label, rows.probability)])

    def compute(self) -> Value:
        return Value(self["entropy"] / self["weight"]) if self["weight"] > 0 else undefined("no row was evaluated")


class NormalizedEntropy(_Sums):
    """Cross entropy over that of always predicting the base rate of the evaluated rows. Lower is better; the trivial predictor has 1.

    ``NE = sum_i w_i CE(y_i, p_i) / (-N+ ln(r) - N- ln(1 - r))`` with ``N+ = sum w_i y_i``, ``N- = sum w_i (1 - y_i)``,
    ``r = N+ / (N+ + N-)``; the base of the logarithm cancels (He et al., Practical lessons from predicting clicks on ads, 2014).
    """

    names: tuple[str, ...] = ("positive", "negative", "entropy")

    def update(self, rows: Predictions) -> None:
        self.add(rows, rows.probability)

    def add(self, rows: Predictions, probability: Tensor) -> None:
        w = rows.weight
        self.sums[:3] += torch.stack([w @ rows.label, w @ (1 - rows.label), w @ cross_entropy(rows.label, probability)])

    def compute(self) -> Value:
        positive, negative = self["positive"], self["negative"]
        reason = one_class(positive, negative)
        if reason:
            return undefined(reason)
        total = positive + negative
        return Value(self["entropy"] / -(positive * math.log(positive / total) + negative * math.log(negative / total)))


class BayesNormalizedEntropy(NormalizedEntropy):
    """NE of the planted probabilities: the least that any model can reach on these rows, known for synthetic logs only."""

    names = ("positive", "negative", "entropy", "unknown")

    def update(self, rows: Predictions) -> None:
        if rows.true_probability is None:
            self.sums[3] += rows.label.numel()
        else:
            self.add(rows, rows.true_probability)

    def compute(self) -> Value:
        if self["unknown"]:
            return undefined("the source does not tell the true probabilities")
        return super().compute()


class Calibration(_Sums):
    """Weighted mean prediction over weighted mean label; 1 is calibrated."""

    better = "one"
    names = ("weight", "positive", "predicted")

    def update(self, rows: Predictions) -> None:
        self.sums += torch.stack([rows.weight.sum(), rows.weight @ rows.label, rows.weight @ rows.probability])

    def compute(self) -> Value:
        if self["positive"] > 0:
            return Value(self["predicted"] / self["positive"])
        return undefined("no row was evaluated" if self["weight"] == 0 else "no evaluated row has a positive label")


def one_class(positive: float, negative: float) -> str | None:
    """Why a metric that needs both classes is undefined, or None where it is not."""
    if positive + negative <= 0:
        return "no row was evaluated"
    if positive <= 0:
        return "no evaluated row has a positive label"
    if negative <= 0:
        return "no evaluated row has a negative label"
    return None
