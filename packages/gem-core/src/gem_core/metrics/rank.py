"""Ranking metrics: exact AUC, AUC in constant memory, AUC within groups. Weighted, ties count one half."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gem_core.metrics.contract import Better, Predictions, Value, undefined
from gem_core.metrics.sums import one_class


class _Rows:
    """Keeps every row: per row 24 bytes, and 8 more with a group key."""

    better: Better = "higher"
    columns: tuple[tuple[str, torch.dtype], ...] = (("logit", torch.float64), ("label", torch.float64), ("weight", torch.float64))

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {name: [] for name, _ in self.columns}

    def update(self, rows: Predictions) -> None:
        for name, dtype in self.columns:
            self.parts[name].append(getattr(rows, name).to(dtype))

    def state(self) -> dict[str, Tensor]:
        for name, dtype in self.columns:
            self.parts[name] = [torch.cat(self.parts[name])] if self.parts[name] else [torch.empty(0, dtype=dtype)]
        return {name: parts[0] for name, parts in self.parts.items()}

    def merge(self, state: Mapping[str, Tensor]) -> None:
        for name, _ in self.columns:
            self.parts[name].append(state[name])


class Auc(_Rows):
    """Exact weighted area under the ROC curve: the share of (positive, negative) pairs, weighted by the product of their weights, that the
    logits order rightly, equal logits counting one half. A label y in (0, 1) counts as y of a positive and 1 - y of a negative."""

    def compute(self) -> Value:
        rows = self.state()
        positive, negative = _classes(rows["label"], rows["weight"])
        reason = one_class(float(positive.sum()), float(negative.sum()))
        if reason:
            return undefined(reason)
        _, inverse = torch.unique(rows["logit"], return_inverse=True)
        pos = torch.zeros(int(inverse.max()) + 1, dtype=torch.float64).index_add_(0, inverse, positive)
        neg = torch.zeros_like(pos).index_add_(0, inverse, negative)
        return Value(_area(pos, neg))


def interval(logits: Tensor, bins: int, limit: float) -> Tensor:
    """int64: in which of ``bins`` equal intervals of [-``limit``, ``limit``] each logit lies; the first and the last are open."""
    return ((logits.double() + limit) * (bins / (2 * limit))).floor_().clamp_(0, bins - 1).long()


class BinnedAuc:
    """AUC in constant memory: logits fall into ``bins`` equal intervals of [-``limit``, ``limit``] (the ends are open), pairs within one
    interval count one half. ``details["error_bound"]`` bounds the distance from the exact value."""

    better: Better = "higher"

    def __init__(self, bins: int = 1 << 16, limit: float = 20.0) -> None:
        self.bins, self.limit = bins, limit
        self.mass = torch.zeros(2, bins, dtype=torch.float64)

    def update(self, rows: Predictions) -> None:
        slot = interval(rows.logit, self.bins, self.limit)
        for mass, part in zip(self.mass, _classes(rows.label, rows.weight)):
            mass.index_add_(0, slot, part)

    def state(self) -> dict[str, Tensor]:
        return {"mass": self.mass.unsqueeze(0)}

    def merge(self, state: Mapping[str, Tensor]) -> None:
        self.mass += state["mass"].sum(0)

    def compute(self) -> Value:
        pos, neg = self.mass
        reason = one_class(float(pos.sum()), float(neg.sum()))
        if reason:
            return undefined(reason)
        return Value(_area(pos, neg), details={"error_bound": float(0.5 * (pos @ neg) / (pos.sum() * neg.sum()))})


class GroupAuc(_Rows):
    """Mean of the AUC within each group (``eval.group``), weighted by the groups' summed weights; groups of one class have no AUC and are
    left out. ``details`` tells how many groups counted and how many did not (Zhu et al., Optimized cost per click in Taobao, 2017)."""

    columns = (*_Rows.columns, ("group", torch.int64))

    def __init__(self) -> None:
        super().__init__()
        self.keyed = True

    def update(self, rows: Predictions) -> None:
        if rows.group is None:
            self.keyed = False
        else:
            super().update(rows)

    def compute(self) -> Value:
        if not self.keyed:
            return undefined("no group key: set eval.group to a column or a sparse feature")
        rows = self.state()
        if not rows["label"].numel():
            return undefined("no row was evaluated")
        order = torch.argsort(rows["logit"], stable=True)
        order = order[torch.argsort(rows["group"][order], stable=True)]
        logit, group = rows["logit"][order], rows["group"][order]
        positive, negative = _classes(rows["label"][order], rows["weight"][order])
        new_group = torch.ones_like(group, dtype=torch.bool)
        new_group[1:] = group.diff() != 0
        new_tie = new_group.clone()
        new_tie[1:] |= logit.diff() != 0
        group_of_row, tie_of_row = new_group.cumsum(0) - 1, new_tie.cumsum(0) - 1
        groups, ties = int(group_of_row[-1]) + 1, int(tie_of_row[-1]) + 1

        def total(values: Tensor, index: Tensor, size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float64).index_add_(0, index, values)

        pos, neg = total(positive, tie_of_row, ties), total(negative, tie_of_row, ties)
        group_of_tie = group_of_row[new_tie]
        group_pos, group_neg = total(pos, group_of_tie, groups), total(neg, group_of_tie, groups)
        before_group = group_neg.cumsum(0) - group_neg
        below = neg.cumsum(0) - neg - before_group[group_of_tie]
        pairs = total(pos * (below + 0.5 * neg), group_of_tie, groups)
        both = (group_pos > 0) & (group_neg > 0)
        if not bool(both.any()):
            return undefined(f"none of the {groups} groups has rows of both classes")
        auc = pairs[both] / (group_pos[both] * group_neg[both])
        weight = (group_pos + group_neg)[both]
        return Value(float(weight @ auc / weight.sum()), details={"groups": int(both.sum()), "one_class_groups": int((~both).sum())})


def _classes(label: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight * label, weight * (1 - label)


def _area(pos: Tensor, neg: Tensor) -> float:
    """From positive and negative mass at each score, scores ascending."""
    below = neg.cumsum(0) - neg
    return float(pos @ (below + 0.5 * neg) / (pos.sum() * neg.sum()))
