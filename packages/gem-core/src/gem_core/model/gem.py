"""The GEM model: history towers, pooling and interaction, interleaved layer by layer (InterFormer), with multi-task heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import ConfigError
from gem_core.model.base import RankingModel
from gem_core.model.config import GemConfig, SequenceConfig
from gem_core.model.contract import TableSet
from gem_core.model.embedding import Embedded, EventTokens, FeatureTokens
from gem_core.model.experts import SummedExperts
from gem_core.model.flops import ModelFlops, gem_flops
from gem_core.model.heads import Heads
from gem_core.model.layers import Gate, TokenMix
from gem_core.model.pooling import Pooling
from gem_core.model.rows import Rows
from gem_core.model.sequence import NextEvent, Rotary, SequenceBlock, rotary_angles

Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class History:
    """One history on its way through the layers.

    ``s [N, dim]`` with its layout and rotary angles; the candidate's token ``[B, dim]``; ``events`` are the event tokens alone, without
    place and age, and ``event_rows`` their layout without CLS and candidate rows.
    """

    s: Tensor
    rows: Rows
    events: Tensor
    event_rows: Rows
    rotary: Rotary | None = None
    candidate: Tensor | None = None


class HistoryEntry(nn.Module):
    """Makes a `History`: event tokens, the candidate's token, CLS tokens, and the rotary angles of all rows.

    The candidate's token is the candidate as an event, where ``features.sequences.NAME.target`` says which feature is which field, plus a
    linear summary of the feature tokens.
    """

    def __init__(self, name: str, features: Features, tables: TableSet, tokens: int, token_dim: int, config: SequenceConfig) -> None:
        super().__init__()
        self.config = c = config
        self.asks = c.candidate or c.pooling.candidate_queries > 0
        self.compares = self.asks and bool(features.sequences[name].target)
        if c.event.compare and not features.sequences[name].target:
            raise ConfigError(
                f"compare needs to know which feature of the candidate is which field of {name!r}",
                where="model.sequence.event.compare",
                fix=f"set features.sequences.{name}.target, or compare = false",
            )
        self.events = EventTokens(name, features, tables, c.dim, c.event, candidate=self.compares)
        if c.rotary == "time" and not self.events.timed:
            raise ConfigError(
                f'rotary = "time" needs the events\' times, and the history {name!r} declares none',
                where="model.sequence.rotary",
                fix=f'set features.sequences.{name}.timestamps, or rotary = "position"',
            )
        summaries = c.cls + int(self.asks)
        self.summary = nn.Sequential(TokenMix(tokens, summaries), nn.Linear(token_dim, c.dim)) if summaries else None

    def forward(self, batch: Batch, embedded: Embedded, x: Tensor) -> History:
        c = self.config
        rows = event_rows = self.events.rows(batch)
        events = self.events(batch, embedded)
        s = self.events.placed(events, batch, embedded, rows)
        summaries = None if self.summary is None else self.summary(x)
        candidate = None
        if self.asks:
            assert summaries is not None
            candidate = summaries[:, c.cls]
            if self.compares:
                candidate = candidate + self.events.candidate(embedded, batch.size)
        before = [(summaries[:, : c.cls].flatten(0, 1), rows.uniform(c.cls))] if summaries is not None and c.cls else []
        after = [(candidate, rows.uniform(1))] if candidate is not None and c.candidate else []
        if before or after:
            s = _concat(before, (s, rows.offsets), after)
            rows = rows.extended(c.cls, c.candidate)
            if c.rotary == "time":
                assert event_rows.ages is not None
                blank = [[(v.new_zeros(v.shape[0], 1), o) for v, o in part] for part in (before, after)]
                rows.ages = _concat(blank[0], (event_rows.ages.unsqueeze(1), event_rows.offsets), blank[1]).squeeze(1)
        rotary = None if c.rotary == "none" else rotary_angles(rows, c.width, c.rotary, c.rotary_base)
        return History(s, rows, events, event_rows, rotary, candidate)


class GemLayer(nn.Module):
    """One layer: each history's sequence block and pooling, then the interaction of all tokens.

    ``x [B, n, dim]`` -> ``[B, interaction.tokens, dim]``; the histories keep their shapes.
    """

    def __init__(self, config: GemConfig, towers: dict[str, SequenceConfig], tokens: int, layer: int) -> None:
        super().__init__()
        deep = {name: c for name, c in towers.items() if c.layers is None or layer < c.layers}
        self.blocks = nn.ModuleDict({name: SequenceBlock(c, tokens, config.dim, layer) for name, c in deep.items()})
        self.pools = nn.ModuleDict(
            {
                name: Pooling(c.pooling, c.dim, c.heads, c.width, config.dim, cls=c.cls, candidate=c.candidate, norm=c.norm)
                for name, c in towers.items()
                if c.summary_tokens
            }
        )
        summary = config.interaction.summary
        self.own, self.pooled = summary or tokens, sum(c.summary_tokens for c in towers.values())
        self.mix = TokenMix(tokens, summary) if summary is not None else None
        self.gates = nn.ModuleList(Gate(config.dim) for _ in range(2)) if config.gates and self.pooled else None
        n = self.own + self.pooled
        self.interaction = SummedExperts(n, config.dim, config.interaction, norm=config.norm, dropout=config.dropout)

    def forward(self, x: Tensor, histories: dict[str, History]) -> tuple[Tensor, dict[str, History]]:
        histories = {
            name: replace(h, s=self.blocks[name](h.s, x, h.rows, h.rotary)) if name in self.blocks else h for name, h in histories.items()
        }
        pooled = [pool(histories[name].s, histories[name].rows, histories[name].candidate) for name, pool in self.pools.items()]
        own = x if self.mix is None else self.mix(x)
        if not pooled:
            return self.interaction(own), histories
        summary = pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)
        if self.gates is not None:
            own, summary = self.gates[0](own), self.gates[1](summary)
        return self.interaction(torch.cat([own, summary.to(own.dtype)], 1)), histories


class Gem(RankingModel):
    """The hybrid model of `GemConfig` over the features' tables; ``layers`` are the units to wrap for sharding the dense part.

    :raises ConfigError: features without a label or without a sample-level feature; a group of options for a history that is not there.
    """

    def __init__(self, config: GemConfig, features: Features) -> None:
        super().__init__(
            features,
            config.embedding_dim,
            sparse_gradients=config.sparse_gradients,
            embedding_dropout=config.embedding_dropout,
            histories=config.sequence is not False,
        )
        unknown = sorted(set(config.groups) - set(features.sequences))
        if unknown:
            raise ConfigError(
                f"there is no history {unknown[0]!r}",
                where=f"model.groups.{unknown[0]}",
                fix=f"the histories are: {', '.join(features.sequences) or 'none'}",
            )
        self.config = config
        self.towers = {n: c for n in features.sequences if (c := config.tower(n)) is not None}
        self.features = FeatureTokens(features, self.table_set, config.dim, count=config.feature_tokens, dense_hidden=config.dense_hidden)
        n = self.features.count
        self.entries = nn.ModuleDict(
            {name: HistoryEntry(name, features, self.table_set, n, config.dim, c) for name, c in self.towers.items()}
        )
        counts = [n] + [config.interaction.tokens] * (config.layers - 1)
        self.layers = nn.ModuleList(GemLayer(config, self.towers, tokens, i) for i, tokens in enumerate(counts))
        self.heads = Heads(config.interaction.tokens, config.dim, self.task_names, config.head, dropout=config.dropout)
        self.next_event = nn.ModuleDict({name: NextEvent(c.dim) for name, c in self.towers.items() if c.next_event})

    def score(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, Mapping[str, Tensor]]:
        x = self.features(batch, embedded)
        histories = {name: entry(batch, embedded, x) for name, entry in self.entries.items()}
        aux: dict[str, Tensor] = {}
        for i, layer in enumerate(self.layers):
            x, histories = layer(x, histories)
            if i == 0 and self.training:
                aux = {f"next_event.{name}": self._next_event(name, histories[name]) for name in self.next_event}
        return self.heads(x), aux

    def count_flops(self, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
        return gem_flops(self, lengths, batch_size)

    def _next_event(self, name: str, history: History) -> Tensor:
        rows, extra = history.event_rows, history.rows.cls + int(history.rows.candidate)
        states = history.s
        if extra:
            states = states[torch.arange(rows.count, device=states.device) + rows.sample * extra + history.rows.cls]
        return self.towers[name].next_event * self.next_event[name](states, history.events, rows)


def _concat(before: list[Part], rows: Part, after: list[Part]) -> Tensor:
    dtype = rows[0].dtype
    return ops.jagged_concat([(v.to(dtype), o) for v, o in (*before, rows, *after)])[0]
