"""The GEM model: history towers, pooling and interaction, interleaved layer by layer (InterFormer), with multi-task heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import ConfigError
from gem_core.model.base import RankingModel, sample_level
from gem_core.model.config import GemConfig, SequenceConfig
from gem_core.model.embedding import Embedded, FeatureTokens
from gem_core.model.experts import SummedExperts
from gem_core.model.flops import ModelFlops, gem_flops
from gem_core.model.heads import Heads
from gem_core.model.history import History, HistoryEntry
from gem_core.model.layers import Gate, TokenMix, side_by_side
from gem_core.model.pooling import Pooling
from gem_core.model.sequence import NextEvent, SequenceBlock
from gem_core.ops import meeting


class GemLayer(nn.Module):
    """One layer: each history's sequence block and pooling, then the interaction of all tokens.

    ``x [B, n, dim]`` -> ``[B, interaction.tokens, dim]``; the histories keep their shapes.
    """

    def __init__(self, config: GemConfig, towers: dict[str, SequenceConfig], tokens: int, layer: int) -> None:
        super().__init__()
        deep = {name: c for name, c in towers.items() if c.layers is None or layer < c.layers}
        self.blocks = nn.ModuleDict(
            {name: SequenceBlock(c, tokens, config.dim, layer, comp_skip=config.comp_skip) for name, c in deep.items()}
        )
        self.pools = nn.ModuleDict(
            {
                name: Pooling(c.pooling, c.dim, c.heads, c.width, config.dim, cls=c.cls, candidate=c.candidate, norm=c.norm)
                for name, c in towers.items()
                if c.summary_tokens and not (config.comp_skip and layer % 2)
            }
        )
        summary = config.interaction.summary
        self.own, self.pooled = summary or tokens, sum(c.summary_tokens for c in towers.values())
        self.mix = TokenMix(tokens, summary) if summary is not None else None
        self.gates = nn.ModuleList(Gate(config.dim) for _ in range(2)) if config.gates and self.pooled else None
        n = self.own + self.pooled
        self.interaction = SummedExperts(n, config.dim, config.interaction, norm=config.norm, dropout=config.dropout)
        self.read_once: frozenset[str] = frozenset()
        """Histories whose rows, after this layer, only the PFFN of the next one reads."""

    def forward(self, x: Tensor, histories: dict[str, History]) -> tuple[Tensor, dict[str, History]]:
        following = {name: self._next(name, h, x) for name, h in histories.items()}
        pooled = [h.pooled for h in following.values() if h.pooled is not None]
        own = x if self.mix is None else self.mix(x)
        if not pooled:
            return self.interaction(own), following
        summary = side_by_side(pooled)
        if self.gates is not None:
            own, summary = self.gates[0](own), self.gates[1](summary)
        return self.interaction(torch.cat([own, summary.to(own.dtype)], 1)), following

    def layouts(self, name: str) -> set[int]:
        """What `Rows.uniform` of a history is asked for here."""
        block, pool = dict(self.blocks.items()).get(name), dict(self.pools.items()).get(name)
        pffn, attention = getattr(block, "pffn", None), getattr(pool, "attention", None)
        return {n for n in (getattr(pffn, "keys", 0), getattr(attention, "count", 0)) if n}

    def pooled_whole(self, name: str) -> bool:
        """Whether no row of a history is taken as it is beside its pooling."""
        return name in self.pools and getattr(self.pools[name], "rows", None) is None

    def begins_with_rows(self, name: str) -> bool:
        """Whether a history's rows go into `norm_gdpa` first, and nowhere else."""
        pffn = getattr(dict(self.blocks.items()).get(name), "pffn", None)
        return pffn is not None and pffn.q is None

    def _next(self, name: str, h: History, x: Tensor) -> History:
        s = self.blocks[name](h.s, x, h.rows, h.rotary) if name in self.blocks else h.s
        pooled = h.pooled
        if name in self.pools:
            pooled, s = self.pools[name](s, h.rows, h.candidate)
            if name in self.read_once:
                meeting.read_once(s)
        return replace(h, s=s, pooled=pooled)


class Gem(RankingModel):
    """The hybrid model of `GemConfig` over the features' tables; ``layers`` are the units to wrap for sharding the dense part.

    :raises ConfigError: features without a label or without a sample-level feature; a group of options for a history that is not there.
    """

    takes_slack = True

    def __init__(self, config: GemConfig, features: Features) -> None:
        super().__init__(config, features, reads=sample_level if config.sequence is False else None)
        unknown = sorted(set(config.groups) - set(features.sequences))
        if unknown:
            raise ConfigError(
                f"there is no history {unknown[0]!r}",
                where=f"model.groups.{unknown[0]}",
                fix=f"the histories are: {', '.join(features.sequences) or 'none'}",
            )
        self.config = config
        self.towers = {n: c for n in features.sequences if (c := config.tower(n)) is not None}
        self.features = FeatureTokens(
            features, self.table_set, config.dim, count=config.feature_tokens, dense_hidden=(config.dense_hidden,)
        )
        n = self.features.count
        self.entries = nn.ModuleDict(
            {name: HistoryEntry(name, features, self.table_set, n, config.dim, c) for name, c in self.towers.items()}
        )
        counts = [n] + [config.interaction.tokens] * (config.layers - 1)
        self.layers = nn.ModuleList(GemLayer(config, self.towers, tokens, i) for i, tokens in enumerate(counts))
        layers: Any = self.layers
        for i, (layer, following) in enumerate(pairwise(layers)):
            free = [n for n, c in self.towers.items() if not (c.next_event and i == 0)]
            layer.read_once = frozenset(n for n in free if layer.pooled_whole(n) and following.begins_with_rows(n))
        self._layouts = {name: sorted(set().union(*(layer.layouts(name) for layer in layers))) for name in self.towers}
        self.heads = Heads(config.interaction.tokens, config.dim, self.task_names, config.head, dropout=config.dropout)
        self.next_event = nn.ModuleDict({name: NextEvent(c.dim) for name, c in self.towers.items() if c.next_event})

    def score(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, Mapping[str, Tensor]]:
        x = self.features(batch, embedded)
        histories = {name: entry(batch, embedded, x) for name, entry in self.entries.items()}
        for name, history in histories.items():
            turned = history.rotary is not None and history.rotary.rows is None
            history.rows.prepare(self._layouts[name], position=turned)
        aux: dict[str, Tensor] = {}
        for i, layer in enumerate(self.layers):
            x, histories = layer(x, histories)
            if i == 0 and self.training:
                aux = {f"next_event.{name}": self._next_event(name, histories[name]) for name in self.next_event}
        return self.heads(x), aux

    def count_flops(self, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
        return gem_flops(self, lengths, batch_size)

    def _next_event(self, name: str, history: History) -> Tensor:
        assert history.events is not None
        states = history.rows.events(history.s)
        return self.towers[name].next_event * self.next_event[name](states, history.events, history.event_rows)
