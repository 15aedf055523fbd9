"""SASRec and HSTU: models of one sequence, scoring a candidate or predicting the next item."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core import ops
from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import ConfigError
from gem_core.model.base import RankingModel
from gem_core.model.config import EventConfig, HstuConfig, PffnConfig, PoolingConfig, SasRecConfig, SequenceConfig
from gem_core.model.contract import TableSet
from gem_core.model.embedding import SECONDS, Embedded, FeatureTokens
from gem_core.model.flops import FlopCount, ModelFlops, attention_pairs, block_flops, entry_flops
from gem_core.model.heads import TaskHeads
from gem_core.model.history import History, HistoryEntry, only_history
from gem_core.model.layers import Mlp, Norm, NormLinear
from gem_core.model.retrieval import RetrievalModel
from gem_core.model.rows import Rows
from gem_core.model.sequence import SequenceBlock
from gem_core.model.tables import sequence_of

TEN_YEARS = 315_576_000
"""Seconds; where the buckets of HSTU's time bias end."""


class SasRecTower(nn.Module):
    """SASRec (arXiv 1808.09781): causal self-attention over the events. A part of the models that it is a base of."""

    table_set: TableSet

    def make_tower(self, c: SasRecConfig, name: str, features: Features, event: EventConfig, pooling: PoolingConfig) -> None:
        """Create the modules; ``pooling`` with a candidate query also makes the candidate's token."""
        self.config = c
        self.tower = SequenceConfig(
            dim=c.dim, heads=c.heads, attention="causal", ffn=c.ffn, norm="layer", dropout=c.dropout, pffn=PffnConfig(kind="none"),
            event=event, pooling=pooling,
        )  # fmt: skip
        self.entry = HistoryEntry(name, features, self.table_set, 0, 0, self.tower, about=False)
        self.layers = nn.ModuleList(SequenceBlock(self.tower, 0, 0) for _ in range(c.layers))
        self.norm = Norm(c.dim, "layer", affine=True)

    def encode(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, History]:
        """States ``[N, dim]`` of all events, each knowing only its past, and the history they belong to."""
        history: History = self.entry(batch, embedded, torch.empty(0))
        s = history.s
        for block in self.layers:
            s = block(s, torch.empty(0), history.rows)
        return self.norm(s), history

    def count_tower(self, count: FlopCount, lengths: Tensor, batch_size: int) -> None:
        """FLOPs of `encode` for histories of ``lengths [B]``."""
        rows = entry_flops(count, self.entry, lengths, batch_size, 0)
        for block in self.layers:
            assert isinstance(block, SequenceBlock)
            block_flops(count, block, self.tower, rows, lengths, batch_size, 0)


class SasRec(SasRecTower, RankingModel):
    """SASRec scoring a candidate: the logit of a task is the product of the last state, mapped for the task, with the candidate's token.
    A sample without history has a learned state.

    :raises ConfigError: not one history, or one whose ``target`` maps no field.
    """

    takes_slack = True

    def __init__(self, config: SasRecConfig, features: Features) -> None:
        name = _candidate_history(features, config.history, "SASRec")
        targets = {f"sparse.{t}" for t in features.sequences[name].target.values()}
        RankingModel.__init__(self, config, features, reads=lambda path: path in targets or path.startswith(f"sequences.{name}."))
        c, self.history = config, name
        event = EventConfig(positions=c.positions, count_from=c.count_from)
        self.make_tower(c, name, features, event, PoolingConfig(candidate_queries=1))
        self.empty = nn.Parameter(torch.empty(c.dim))
        self.heads = nn.Linear(c.dim, len(self.task_names) * c.dim)
        self.bias = nn.Parameter(torch.empty(len(self.task_names)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.empty)
        nn.init.zeros_(self.bias)

    def score(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, Mapping[str, Tensor]]:
        states, history = self.encode(batch, embedded)
        last = history.rows.newest(states, 1).squeeze(1)
        last = last + (history.rows.offsets.diff() == 0).unsqueeze(1) * self.empty
        assert history.candidate is not None
        asked = self.heads(last).view(batch.size, len(self.task_names), self.config.dim)
        return (asked * history.candidate.unsqueeze(1)).sum(2) * self.config.dim**-0.5 + self.bias, {}

    def count_flops(self, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
        count = FlopCount()
        self.count_tower(count, lengths[self.history], batch_size)
        count.linear("heads", self.heads, batch_size)
        count.add("heads", 2 * batch_size * len(self.task_names) * self.config.dim)
        return count.total()


class SasRecRetrieval(SasRecTower, RetrievalModel):
    """SASRec predicting the next item."""

    def __init__(self, config: SasRecConfig, features: Features) -> None:
        RetrievalModel.__init__(self, config, config.retrieval, features, config.dim, context=False)
        self.make_tower(config, self.history, self.inputs, _plain_events(config), PoolingConfig())


class HstuLayer(nn.Module):
    """``s + W_o (norm(A V) * U)`` with ``A = SiLU(alpha Q K^T + bias) / N`` and ``U, V, Q, K = split(phi(W norm(s)))`` on ``s [N, dim]``.

    phi is SiLU on all four in the research convention and on U alone in the production one. The bias tables are by distance and by the
    bucket of the time between two events. As published, dropout is on what W_o reads, and W begins small, so that a layer begins as little
    more than its residual.
    """

    def __init__(self, config: HstuConfig, length: int) -> None:
        super().__init__()
        c = self.config = config
        self.length = length
        self.uvqk = NormLinear(c.dim, 2 * c.heads * (c.v_dim + c.qk_dim), "layer")
        self.norm = Norm(c.heads * c.v_dim, "layer")
        self.out = nn.Linear(c.heads * c.v_dim, c.dim)
        self.dropout = nn.Dropout(c.dropout)
        self.position = nn.Parameter(torch.empty(c.heads, 2 * c.position_bias + 1)) if c.position_bias else None
        self.time = nn.Parameter(torch.empty(c.heads, c.time_bias)) if c.time_bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.position, self.time, self.uvqk.linear.weight):
            if weight is not None:
                nn.init.normal_(weight, std=0.02)
        nn.init.zeros_(self.uvqk.linear.bias)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, s: Tensor, rows: Rows, times: Tensor | None = None, edges: Tensor | None = None) -> Tensor:
        c = self.config
        values, keys = c.heads * c.v_dim, c.heads * c.qk_dim
        mixed, s = self.uvqk(s, through=True)
        if c.convention == "research":
            mixed = F.silu(mixed)
        u, v, q, k = mixed.split([values, values, keys, keys], 1)
        if c.convention == "production":
            u = F.silu(u)
        bias = None
        if self.position is not None or self.time is not None:
            position = self.position if self.position is not None else s.new_zeros(c.heads, 1)
            bias = ops.RelativeBias(position) if self.time is None else ops.RelativeBias(position, self.time, edges, times, times)
        o = ops.gdpa(
            q.unflatten(1, (c.heads, c.qk_dim)), k.unflatten(1, (c.heads, c.qk_dim)), v.unflatten(1, (c.heads, c.v_dim)), rows.offsets,
            activation="silu", scale_in=c.alpha, scale_out=1.0 / self.length, max_q_len=rows.max_length, causal=True,
            window=None if c.max_attention is None else (c.max_attention, -1), bias=bias,
            num_targets=rows.num_targets, context_len=rows.context_len,
        )  # fmt: skip
        return s + self.out(self.dropout(self.norm(o.flatten(1)) * u))


class HstuTower(nn.Module):
    """HSTU (arXiv 2402.17152): context rows, events and, for ranking, the candidate as last row, through pointwise attention.

    Context rows are the sample's features that are not the candidate's side of an event field, one row a feature. ``ranks``: they see and
    are seen by all events; else they are a prefix that sees no event, so that no state knows a later one.

    :raises ConfigError: a time bias for a history without times.
    """

    table_set: TableSet

    def make_tower(self, c: HstuConfig, name: str, features: Features, event: EventConfig, *, ranks: bool) -> None:
        """Create the modules."""
        self.config, self.history, self.ranks = c, name, ranks
        sequence = features.sequences[name]
        if c.time_bias and sequence.timestamps is None:
            raise ConfigError(
                f"time_bias needs the events' times, and the history {name!r} declares none",
                where="model.time_bias",
                fix=f"set features.sequences.{name}.timestamps, or time_bias = 0",
            )
        others = {n: f for n, f in features.sparse.items() if n not in sequence.target.values()}
        about = features.model_copy(update={"sparse": others})
        has_context = c.context and bool(others or features.dense or features.vectors)
        self.context = FeatureTokens(about, self.table_set, c.dim) if has_context else None
        n = self.context.count if self.context is not None else 0
        self.tower = SequenceConfig(dim=c.dim, heads=1, attention="causal", candidate=ranks, cls=n, event=event)
        self.entry = HistoryEntry(name, features, self.table_set, 0, 0, self.tower, summary=nn.Identity(), about=False)
        length = c.scale_length or sequence.max_length
        self.layers = nn.ModuleList(HstuLayer(c, length) for _ in range(c.layers))
        self.event_second, self.sample_second = SECONDS[sequence.time_unit], SECONDS[features.timestamp_unit]

    def encode(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, History]:
        """States ``[N, dim]`` of all rows, and the history they belong to."""
        x = torch.empty(0) if self.context is None else self.context(batch, embedded)
        history: History = self.entry(batch, embedded, x)
        s, rows = history.s, history.rows
        times = edges = None
        if self.config.time_bias:
            times = self._times(batch, history)
            steps = torch.arange(self.config.time_bias - 1, device=s.device, dtype=torch.float64)
            edges = (TEN_YEARS ** (steps / max(1, self.config.time_bias - 2))).long()
        seen = rows if self.ranks else Rows(rows.offsets, rows.count, rows.max_length)
        for layer in self.layers:
            s = layer(s, seen, times, edges)
        return s, history

    def _times(self, batch: Batch, history: History) -> Tensor:
        """``[N]`` int64 seconds of every row; context rows and the candidate have the sample's time, or that of its newest event. For
        retrieval, where that would be a later event's, context rows have the time of the oldest one."""
        group, rows = sequence_of(batch, self.history), history.event_rows
        assert group.timestamps is not None
        own = (group.timestamps.double() * self.event_second).long()
        if not self.ranks:
            now = own[rows.offsets[:-1].clamp(max=max(0, rows.count - 1))] if rows.count else own.new_zeros(rows.batch_size)
        elif batch.timestamps is not None:
            now = (batch.timestamps.double() * self.sample_second).long()
        else:
            now = rows.newest(own.unsqueeze(1), 1).flatten()
        c = self.tower
        parts = [(now.repeat_interleave(c.cls), rows.uniform(c.cls)), (own, rows.offsets), (now, rows.uniform(1))]
        return ops.jagged_concat(parts[0 if c.cls else 1 : 3 if self.ranks else 2])[0]

    def count_tower(self, count: FlopCount, lengths: Tensor, batch_size: int) -> None:
        """FLOPs of `encode` for histories of ``lengths [B]``."""
        c = self.config
        count.linear("features", self.context, batch_size, c.dim)
        rows = entry_flops(count, self.entry, lengths, batch_size, c.dim)
        window = None if c.max_attention is None else (c.max_attention, -1)
        if self.ranks:
            pairs = attention_pairs("causal", self.tower, lengths, window)
        else:
            pairs = attention_pairs("causal", SequenceConfig(), lengths + self.tower.cls, window)
        for layer in self.layers:
            count.linear("attention", layer, rows)
            count.attend("attention", pairs, c.heads, c.qk_dim, c.v_dim)


class Hstu(HstuTower, RankingModel):
    """HSTU for ranking: the candidate is the last row, which sees all and is seen by none; an MLP a task reads it.

    :raises ConfigError: not one history, one whose ``target`` maps no field, or a time bias for a history without times.
    """

    takes_slack = True

    def __init__(self, config: HstuConfig, features: Features) -> None:
        name = _candidate_history(features, config.history, "HSTU")
        targets = {f"sparse.{t}" for t in features.sequences[name].target.values()}
        wanted = targets | ({f"sparse.{t}" for t in features.sparse} if config.context else set())
        RankingModel.__init__(self, config, features, reads=lambda path: path in wanted or path.startswith(f"sequences.{name}."))
        c = config
        self.make_tower(c, name, features, EventConfig(positions=c.positions, count_from=c.count_from), ranks=True)
        self.heads = TaskHeads(Mlp(c.dim, (*c.hidden, 1), activation="silu", dropout=c.dropout) for _ in self.task_names)

    def score(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, Mapping[str, Tensor]]:
        states, history = self.encode(batch, embedded)
        last = history.rows.last(states).squeeze(1)
        return self.heads(last), {}

    def count_flops(self, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
        count = FlopCount()
        self.count_tower(count, lengths[self.history], batch_size)
        count.linear("heads", self.heads, batch_size)
        return count.total()


class HstuRetrieval(HstuTower, RetrievalModel):
    """HSTU predicting the next item. Its context rows come first and see only each other."""

    def __init__(self, config: HstuConfig, features: Features) -> None:
        RetrievalModel.__init__(self, config, config.retrieval, features, config.dim, context=config.context)
        places = (2 / (config.positions + config.dim)) ** 0.5  # Xavier's
        self.make_tower(config, self.history, self.inputs, _plain_events(config, places), ranks=False)


def _plain_events(config: SasRecConfig | HstuConfig, place_std: float = 0.02) -> EventConfig:
    """Events as the retrieval papers have them: the embedding times sqrt(dim), plus a place that begins small."""
    return EventConfig(combine="sum", positions=config.positions, count_from=config.count_from, place_std=place_std, scale=config.dim**0.5)


def _candidate_history(features: Features, name: str | None, model: str) -> str:
    """The one history that the model reads, whose ``target`` must say how the candidate is an event of it."""
    name = only_history(features, name, model)
    if not features.sequences[name].target:
        raise ConfigError(
            f"{model} scores the candidate as an event of {name!r}, and nothing says which features correspond",
            where=f"features.sequences.{name}.target",
            fix='map an event field to the candidate\'s feature, for example target = { item_ids = "item_id" }',
        )
    return name
