"""What all models of the core share: tables, embedding dropout, FLOPs, and features as one flat vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import BatchError, ConfigError
from gem_core.model.config import TableOptions
from gem_core.model.contract import ModelOutput, TableSet
from gem_core.model.embedding import Embedded, EventFields, dense_columns, sample_vector
from gem_core.model.flops import ModelFlops
from gem_core.model.tables import LocalTables, sequence_of, sparse_group, table_set
from gem_core.requests import expanded, history_lengths


class TableModel(nn.Module):
    """A model with embedding tables, which may be replaced by what a sparse strategy built from ``table_set``.

    ``takes_slack``: histories may have rows past the last offset, and nothing depends on what they hold.
    """

    takes_slack = False

    def __init__(self, options: TableOptions, tables: TableSet) -> None:
        super().__init__()
        self.table_set = tables
        self.tables: nn.Module = LocalTables(tables)
        self.dropout = nn.Dropout(options.embedding_dropout)

    def dropped(self, embedded: Embedded) -> Embedded:
        """Embeddings after the dropout of training."""
        if not self.training or not self.dropout.p:
            return embedded
        return {k: (self.dropout(v[0]), v[1]) if isinstance(v, tuple) else self.dropout(v) for k, v in embedded.items()}

    def flops(self, batch: Batch) -> dict[str, int]:
        """Training FLOPs of a batch on the host, by part."""
        return self.count_flops(history_lengths(batch), batch.size).by_part_training

    def least_flops(self, batch: Batch) -> dict[str, int]:
        """The same by the products that are needed at least."""
        return self.count_flops(history_lengths(batch), batch.size).least_by_part_training

    def count_flops(self, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
        """FLOPs for histories of ``lengths[name] [B]`` events, on the host."""
        raise NotImplementedError


class RankingModel(TableModel):
    """A model that scores one candidate a sample: ``forward(batch) -> ModelOutput`` with logits ``[B, T]`` of the declared labels.

    ``forward(batch, looked_up)`` takes what the tables gave for the batch from outside, as a step does that is recorded without them.
    ``reads(path)`` says which id features the model reads (None: all); tables that none of them reads are not there. A subclass writes
    `score` and `count_flops`.

    :raises ConfigError: features without a label.
    """

    def __init__(self, options: TableOptions, features: Features, *, reads: Callable[[str], bool] | None = None) -> None:
        if not features.labels:
            raise ConfigError("no label is declared", where="features.labels", fix="add [features.labels.NAME] for each task")
        tables = table_set(features, options.embedding_dim)
        super().__init__(options, tables if reads is None else _only(tables, reads))
        self.task_names = tuple(features.labels)
        self.distillation: nn.Module | None = None
        """An auxiliary part that training adds: called with the batch after `score`, it gives one more loss."""

    def forward(self, batch: Batch, looked_up: Embedded | None = None) -> ModelOutput:
        if batch.num_targets is not None:
            raise BatchError(
                "the batch holds several candidates a history", where="num_targets", fix="this model scores one candidate a sample"
            )
        batch = expanded(batch)
        if looked_up is None:
            looked_up = self.tables(sparse_group(batch, self.table_set.lookups))
        embedded = self.dropped(looked_up)
        logits, losses = self.score(batch, embedded)
        if self.distillation is not None and self.training:
            losses = {**losses, "distill": self.distillation(batch)}
        return ModelOutput(logits.float(), self.task_names, losses)

    def score(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Logits ``[B, T]`` and auxiliary losses by name."""
        raise NotImplementedError

    def serve(self, batch: Batch, embedded: Embedded) -> Tensor:
        """Logits ``[B, T]`` fp32 from embedding rows: what is exported."""
        return self.score(batch, embedded)[0].float()


class FlatFeatures(nn.Module):
    """Embeddings, vectors and dense columns side by side, ``[B, width]``; with ``history`` "mean" or "sum" also each history's pooled
    event fields."""

    def __init__(self, features: Features, tables: TableSet, *, history: str = "none") -> None:
        super().__init__()
        self.sparse = [f"sparse.{n}" for n in features.sparse]
        self.vectors, self.dense_names = {n: v.dim for n, v in features.vectors.items()}, tuple(features.dense)
        self.pool = ops.jagged_mean if history == "mean" else ops.jagged_sum
        names = features.sequences if history != "none" else {}
        histories = {n: EventFields(n, features, tables, candidate=False) for n in names}
        self.histories = nn.ModuleDict(histories)
        self.width = sum(tables.table(features.table_of(p)).dim for p in self.sparse) + sum(self.vectors.values()) + len(self.dense_names)
        self.width += sum(sum(h.widths.values()) for h in histories.values())

    def forward(self, batch: Batch, embedded: Embedded) -> Tensor:
        parts = [embedded[p] for p in self.sparse]
        parts += [sample_vector(batch, n, width) for n, width in self.vectors.items()]
        if self.dense_names:
            parts.append(dense_columns(batch, self.dense_names))
        for name, fields in self.histories.items():
            parts.append(self.pool(torch.cat(fields(batch, embedded), 1), sequence_of(batch, name).offsets))
        return torch.cat(parts, 1)


def sample_level(path: str) -> bool:
    """Whether an id feature is one of the sample itself."""
    return path.startswith("sparse.")


def _only(tables: TableSet, reads: Callable[[str], bool]) -> TableSet:
    lookups = tuple(k for k in tables.lookups if reads(k.key))
    names = {k.table for k in lookups}
    return replace(tables, tables=tuple(t for t in tables.tables if t.name in names), lookups=lookups)
