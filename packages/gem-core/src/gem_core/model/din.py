"""DIN (Deep Interest Network, arXiv 1706.06978): attention of the candidate over the history, without softmax, then an MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import ConfigError
from gem_core.model.base import FlatFeatures, RankingModel
from gem_core.model.config import DinConfig
from gem_core.model.contract import TableSet
from gem_core.model.embedding import Embedded, EventFields
from gem_core.model.flops import ModelFlops, din_flops
from gem_core.model.heads import TaskHeads
from gem_core.model.rows import Rows
from gem_core.model.tables import sequence_of


class Dice(nn.Module):
    """Data-adaptive activation on ``[N, d]``: ``p x + (1 - p) a x`` with ``p = sigmoid((x - mean) / sqrt(var + eps))``.

    Mean and variance are the batch's while training (running averages otherwise, and for batches of fewer than two rows); ``a`` is learned.
    """

    mean: Tensor
    var: Tensor

    def __init__(self, dim: int, *, eps: float = 1e-8, momentum: float = 0.1) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(dim))
        self.eps, self.momentum = eps, momentum
        self.register_buffer("mean", torch.empty(dim))
        self.register_buffer("var", torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.alpha)
        self.mean.zero_()
        self.var.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        train = self.training and x.shape[0] > 1
        normal = nn.functional.batch_norm(x, self.mean, self.var, training=train, momentum=self.momentum, eps=self.eps)
        p = torch.sigmoid(normal)
        return x * (self.alpha + p * (1 - self.alpha))


def _mlp(width: int, hidden: Sequence[int], out: int, activation: str, dropout: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for h in hidden:
        layers += [nn.Linear(width, h), Dice(h) if activation == "dice" else nn.PReLU(h)]
        layers += [nn.Dropout(dropout)] if dropout else []
        width = h
    return nn.Sequential(*layers, nn.Linear(width, out))


class Interest(nn.Module):
    """One history read by the candidate: ``sum_i a(e_i, c) e_i``, ``[B, width]``; zeros for an empty history.

    ``e_i`` is the concatenation of the event's fields and ``c`` that of the candidate seen as an event. The weight is the local activation
    unit: an MLP of (e, c, e - c, e * c); with ``softmax`` the weights of a history sum to 1.

    :raises ConfigError: a history whose ``target`` maps no field.
    """

    def __init__(self, name: str, features: Features, tables: TableSet, config: DinConfig) -> None:
        super().__init__()
        self.name, self.softmax = name, config.softmax
        self.fields = EventFields(name, features, tables)
        if not self.fields.target:
            raise ConfigError(
                f"DIN compares the candidate with the events of {name!r}, and nothing says which features correspond",
                where=f"features.sequences.{name}.target",
                fix='map an event field to the candidate\'s feature, for example target = { item_ids = "item_id" }',
            )
        self.width = sum(self.fields.widths.values())
        self.unit = _mlp(4 * self.width, config.attention_hidden, 1, config.attention_activation)

    def forward(self, batch: Batch, embedded: Embedded) -> Tensor:
        offsets = sequence_of(batch, self.name).offsets
        events = torch.cat(self.fields(batch, embedded), 1)
        asked = ops.jagged_expand(torch.cat(self.fields.candidate(embedded, batch.size), 1), offsets, rows=events.shape[0])
        weight = self.unit(torch.cat([events, asked, events - asked, events * asked], 1))
        if self.softmax:
            weight = _segment_softmax(weight, offsets)
        return ops.jagged_sum(weight * events, offsets)


def _segment_softmax(x: Tensor, offsets: Tensor) -> Tensor:
    """Softmax of ``x [N, 1]`` over the rows of each sample."""
    top = x.new_full((offsets.numel() - 1, 1), -torch.inf)
    rows = Rows(offsets, x.shape[0], None)
    top = top.scatter_reduce(0, rows.sample.unsqueeze(1), x.detach(), "amax")
    e = torch.exp(x - top[rows.sample])
    return e / ops.jagged_expand(ops.jagged_sum(e, offsets), offsets, rows=x.shape[0])


class Din(RankingModel):
    """DIN over the features' tables. Per task, an MLP over all embeddings, vectors, dense columns and the histories' interests.

    Each history must say in ``target`` which of its fields is which feature of the candidate.

    :raises ConfigError: no label, or a history without ``target``.
    """

    def __init__(self, config: DinConfig, features: Features) -> None:
        super().__init__(config, features)
        histories = {name: Interest(name, features, self.table_set, config) for name in features.sequences}
        self.histories = nn.ModuleDict(histories)
        self.flat = FlatFeatures(features, self.table_set)
        width = self.flat.width + sum(h.width for h in histories.values())
        self.heads = TaskHeads(_mlp(width, config.hidden, 1, config.activation, config.dropout) for _ in self.task_names)

    def score(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, Mapping[str, Tensor]]:
        x = torch.cat([self.flat(batch, embedded), *(history(batch, embedded) for history in self.histories.values())], 1)
        return self.heads(x), {}

    def count_flops(self, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
        return din_flops(self, lengths, batch_size)
