"""Retrieval: a model of one history whose state after each event scores all items by their embeddings.

``[features.next_item]`` turns the task on. In training every event is a position that predicts the item after it: `next_items` makes
the batch's ``targets`` from the history and the item that follows it. In evaluation the state after the newest event is the query.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core.batch import Batch, SparseGroup
from gem_core.config.features import Features
from gem_core.errors import BatchError, ConfigError, DataError
from gem_core.model.base import TableModel
from gem_core.model.config import RetrievalConfig, SequenceConfig, TableOptions
from gem_core.model.contract import Lookup, ModelOutput
from gem_core.model.embedding import Embedded
from gem_core.model.flops import FlopCount, ModelFlops
from gem_core.model.history import History
from gem_core.model.loss import target_weights
from gem_core.model.retrieval_loss import Draw, NegativeSampler, position_losses
from gem_core.model.tables import sequence_of, sparse_group, table_set
from gem_core.sources.contract import Source, Wrapped

TASK = "next_item"
"""Name of the task in results."""
CANDIDATES = "next_item"
"""Key of the lookup that reads the items to be scored."""


def retrieval_inputs(features: Features) -> Features:
    """``features`` as a retrieval model reads them: the one history, and of the sample's features those that are not about the item.

    :raises ConfigError: no ``next_item``.
    """
    task = features.next_item
    if task is None:
        raise ConfigError("no next item is declared", where="features.next_item", fix='add [features.next_item] with item = "..."')
    name, _ = features.next_item_field()
    sequence = features.sequences[name]
    about_item = {task.item, task.seen, *sequence.target.values()}
    return features.model_copy(
        update={
            "next_item": None,
            "sparse": {n: f for n, f in features.sparse.items() if n not in about_item},
            "sequences": {name: sequence.model_copy(update={"target": {}})},
        }
    )


def next_items(batch: Batch, features: Features) -> Batch:
    """The batch with ``targets [N]`` and ``target_mask [N]``: after each event the next one's item, after the newest the following item.

    A batch that has targets keeps them. Meant for the host: reads offsets.

    :raises DataError: a sample has not exactly one following item.
    """
    task = features.next_item
    assert task is not None
    if batch.targets is not None:
        return batch
    name, field = features.next_item_field()
    group = sequence_of(batch, name)
    ids = group.fields.get(field)
    if not isinstance(ids, Tensor):
        raise BatchError(f"{field!r} has no or several items in an event", where=f"features.sequences.{name}.fields.{field}")
    targets = torch.cat([ids[1:], ids[:1]])
    some = group.offsets.diff() > 0
    targets[group.offsets[1:][some] - 1] = following_items(batch, features)[some].to(targets.dtype)
    mask = torch.ones_like(targets, dtype=torch.bool) if task.pad is None else targets != task.pad
    return replace(batch, targets=targets, target_mask=mask)


class NextItems(Wrapped):
    """A training source whose batches have gone through `next_items`; without the items that users had before, which only a ranking asks
    for."""

    def __init__(self, source: Source, features: Features) -> None:
        super().__init__(source)
        self.features = features

    def __iter__(self) -> Iterator[Batch]:
        return (self._unseen(next_items(batch, self.features)) for batch in self.source)

    def _unseen(self, batch: Batch) -> Batch:
        seen, sparse = self.features.next_item.seen, batch.sparse  # type: ignore[union-attr]
        if sparse is None or seen not in sparse.keys:
            return batch
        kept = [key for key in sparse.keys if key != seen]
        weights = None if sparse.weights is None else {key: sparse.jagged(key, sparse.weights).values for key in kept}
        return replace(batch, sparse=SparseGroup.from_jagged({key: sparse[key] for key in kept}, weights))


def following_items(batch: Batch, features: Features, *, checked: bool = False) -> Tensor:
    """``[B]`` int64: the item after each history. ``checked``: the numbers of items are right, and are not read from the device.

    :raises DataError: a sample has none or several.
    """
    assert features.next_item is not None
    name = features.next_item.item
    if batch.sparse is None or name not in batch.sparse.keys:
        raise BatchError(f"the batch has no sparse feature {name!r}", where=f"features.sparse.{name}", fix="let the source deliver it")
    items = batch.sparse[name]
    if not checked and bool((items.lengths != 1).any()):
        raise DataError(
            f"{int((items.lengths != 1).sum())} samples have no or several items after their history",
            where=f"features.sparse.{name}",
            fix="give the column of one item a row, without nulls",
        )
    return items.values


class RetrievalModel(TableModel):
    """Base of the retrieval models; implements `gem_core.model.contract.Retrieval`.

    A subclass sets its tower up on ``self.inputs`` and ``self.table_set`` and writes `encode` and `count_tower`. States of width ``dim``
    are mapped to the items' width where it differs. ``context`` False: the model reads no features of the sample.

    :raises ConfigError: no ``features.next_item``, or gbce with as many negatives as items.
    """

    takes_slack = True

    def __init__(self, options: TableOptions, retrieval: RetrievalConfig, features: Features, dim: int, *, context: bool = True) -> None:
        inputs = retrieval_inputs(features)
        if not context:
            inputs = inputs.model_copy(update={"sparse": {}, "dense": {}, "vectors": {}})
        task = features.next_item
        assert task is not None
        table = features.table_of(f"sparse.{task.item}")
        tables = table_set(inputs, options.embedding_dim)
        super().__init__(options, replace(tables, lookups=(*tables.lookups, Lookup(CANDIDATES, table, "none"))))
        self.features, self.inputs, self.retrieval = features, inputs, retrieval
        self.history, self.field = features.next_item_field()
        spec = self.table_set.table(table)
        self.items, self.pad, self.width = spec.rows, task.pad, spec.dim
        self.sampler = NegativeSampler(self.items, self.pad, retrieval)
        if retrieval.loss == "gbce" and retrieval.negatives >= self.sampler.candidates:
            raise ConfigError(
                f"gbce calibrates for a share of the items, and {retrieval.negatives} negatives are drawn from "
                f"{self.sampler.candidates} items",
                where="model.retrieval.negatives",
                fix='draw fewer, or set loss = "softmax", which scores all items',
            )
        self.out = nn.Linear(dim, self.width) if dim != self.width else nn.Identity()

    def encode(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, History]:
        """States ``[N, dim]`` of all rows of the history, none of which knows a later event, and the history they belong to."""
        raise NotImplementedError

    def count_tower(self, count: FlopCount, lengths: Tensor, batch_size: int) -> None:
        """Add the FLOPs of `encode` for histories of ``lengths [B]``."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> ModelOutput:
        draw = self._draw(batch) if self.training else None
        ids = None if draw is None else draw.ids
        looked_up: dict[str, Any] = dict(self.tables(self._group(sparse_group(batch, self.table_set.lookups[:-1]), ids, batch)))
        items, _ = looked_up.pop(CANDIDATES)
        states, history = self._states(batch, self.dropped(looked_up))
        none = states.new_zeros(batch.size, 0)
        if draw is None:
            return ModelOutput(none, (), query=history.event_rows.newest(states, 1).squeeze(1))
        losses = position_losses(states, self._direction(items), draw, self.retrieval)
        weights = target_weights(batch)
        return ModelOutput(none, (), loss=torch.where(weights > 0, losses * weights, 0.0).sum())

    def serve(self, batch: Batch, embedded: Embedded) -> Tensor:
        """Queries ``[B, width]`` fp32 from embedding rows: what is exported."""
        states, history = self._states(batch, embedded)
        return history.event_rows.newest(states, 1).squeeze(1)

    def _states(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, History]:
        """What scores the items after each event ``[N, width]``, and the history."""
        states, history = self.encode(batch, embedded)
        return self._direction(self.out(history.rows.events(states))) / self.retrieval.temperature, history

    def item_vectors(self, ids: Tensor) -> Tensor:
        inputs = self.table_set.lookups[:-1]
        empty = torch.empty(0, dtype=torch.int64, device=ids.device)
        lengths = torch.zeros(len(inputs), dtype=torch.int64, device=ids.device)
        group = SparseGroup(tuple(k.key for k in inputs), empty, lengths, None, (0,) * (len(inputs) + 1))
        rows, _ = self.tables(self._group(group, ids, None))[CANDIDATES]
        return self._direction(rows)

    def count_flops(self, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
        count, own = FlopCount(), lengths[self.history]
        self.count_tower(count, own, batch_size)
        positions, r = int(own.sum()), self.retrieval
        count.linear("scores", self.out, positions)
        scored = self.items if r.loss == "softmax" or self.sampler.whole(self.width) else r.negatives + 1
        count.add("scores", 2 * positions * scored * self.width)
        return count.total()

    def _draw(self, batch: Batch) -> Draw:
        if batch.targets is None:
            raise BatchError("the batch has no targets", where="targets", fix="pass it through gem_core.model.retrieval.next_items")
        group = sequence_of(batch, self.history)
        ids = group.fields[self.field]
        assert isinstance(ids, Tensor)
        draw: Draw = self.sampler(batch.targets, target_weights(batch), ids, group.offsets, self.width)
        return draw

    def _direction(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors.float(), dim=1) if self.retrieval.normalize else vectors.float()

    @staticmethod
    def _group(inputs: SparseGroup, ids: Tensor | None, batch: Batch | None) -> SparseGroup:
        """The inputs' group, and the items to score as one more key. Their split over the samples says nothing: the first has them all."""
        size = 1 if batch is None else batch.size
        values = inputs.values[:0] if ids is None else ids.to(inputs.values.dtype)
        lengths = torch.zeros(size, dtype=inputs.lengths.dtype, device=values.device)
        if size:
            lengths[0].fill_(values.shape[0])
        weights = None
        if inputs.weights is not None:
            weights = torch.cat([inputs.weights, torch.ones_like(values, dtype=inputs.weights.dtype)])
        bounds = inputs.key_bounds()
        return SparseGroup(
            (*inputs.keys, CANDIDATES),
            torch.cat([inputs.values, values]),
            torch.cat([inputs.lengths, lengths]),
            weights,
            (*bounds, bounds[-1] + values.shape[0]),
            inputs.slack,
        )


def causal_tower(config: SequenceConfig, where: str) -> SequenceConfig:
    """``config``, if none of its states knows a later event.

    :raises ConfigError: attention that looks ahead, rows of a candidate or CLS, ages, which are counted from the newest event.
    """
    allowed = ("causal", "causal_window", "none")
    wrong = [k for k in config.kinds if k not in allowed]
    ahead = [
        (bool(wrong), "attention", f"= {wrong[0]!r}" if wrong else "", f"use {', '.join(allowed)}"),
        (config.candidate, "candidate", "= true", "set candidate = false"),
        (config.cls > 0, "cls", "> 0", "set cls = 0"),
        (config.event.compare, "event.compare", "= true", "set compare = false"),
        (config.event.time_buckets > 0, "event.time_buckets", "> 0", "set time_buckets = 0"),
        (config.rotary == "time", "rotary", '= "time"', 'set rotary = "position"'),
        (config.next_event > 0, "next_event", "> 0", "set next_event = 0: the task itself is the next event"),
    ]
    for bad, key, value, fix in ahead:
        if bad:
            what = f"{key} {value} does not fit retrieval, where each position must know its past only"
            raise ConfigError(what, where=f"{where}.{key}", fix=fix)
    return config
