"""InterFormer (arXiv 2411.09852) as published: both summaries are made from a layer's input, then both sides are updated from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import ConfigError
from gem_core.model.base import RankingModel
from gem_core.model.config import EventConfig, InterFormerConfig, PoolingConfig, SequenceConfig
from gem_core.model.embedding import Embedded, FeatureTokens
from gem_core.model.experts import SummedExperts
from gem_core.model.flops import FlopCount, ModelFlops, attention_pairs, entry_flops, pooling_flops
from gem_core.model.heads import TaskHeads
from gem_core.model.history import History, HistoryEntry
from gem_core.model.layers import Gate, Mlp, TokenMix
from gem_core.model.pooling import Pooling
from gem_core.model.rows import Rows
from gem_core.model.sequence import SelfAttention

Histories = Mapping[str, History]


class GeneratedFfn(nn.Module):
    """``PFFN(X_sum, S) = S W`` with ``W = W_0 X_sum`` in R^{d x d} made for each sample, plus S: rows ``[N, d]``, ``X_sum [B, n, d]``.

    In attention form: the keys are the unit vectors, the values the rows of the generated matrix, without any activation. W is scaled by
    ``d ** -0.5``.
    """

    def __init__(self, summary: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.generate = TokenMix(summary, dim)

    def forward(self, s: Tensor, x: Tensor, rows: Rows) -> Tensor:
        d = self.dim
        values = self.generate(x).flatten(0, 1).unsqueeze(1).to(s.dtype)
        keys = torch.eye(d, dtype=s.dtype, device=s.device).repeat(rows.batch_size, 1).unsqueeze(1)
        options = {"activation": "raw", "scale_out": d**-0.5, "max_q_len": rows.max_length, "max_k_len": d}
        return s + ops.gdpa(s.unsqueeze(1), keys, values, rows.offsets, rows.uniform(d), **options).squeeze(1)


class FeatureSummary(nn.Module):
    """``X_sum = Gate(MLP(X))``, ``[B, n, d] -> [B, summary, d]``, the MLP being linear over the token axis."""

    def __init__(self, tokens: int, summary: int, dim: int) -> None:
        super().__init__()
        self.mix, self.gate = TokenMix(tokens, summary), Gate(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.mix(x))


class HistorySummary(nn.Module):
    """``S_sum = Gate([S_CLS | PMA(S) | S_recent])``, ``[N, d] -> [B, count, d]``."""

    def __init__(self, c: SequenceConfig) -> None:
        super().__init__()
        self.pool = Pooling(c.pooling, c.dim, c.heads, c.width, c.dim, cls=c.cls)
        self.gate = Gate(c.dim)
        self.count = self.pool.count

    def forward(self, history: History) -> Tensor:
        return self.gate(self.pool(history.s, history.rows)[0])


class InterFormerLayer(nn.Module):
    """Feature tokens ``[B, n, d]`` and histories to those of the next layer."""

    def __init__(self, config: InterFormerConfig, towers: Mapping[str, SequenceConfig], tokens: int) -> None:
        super().__init__()
        c = config
        self.features = FeatureSummary(tokens, c.summary, c.dim)
        self.histories = nn.ModuleDict({n: HistorySummary(t) for n, t in towers.items()})
        pooled = sum(h.count for h in self.histories.values())
        self.interaction = SummedExperts(tokens + pooled, c.dim, c.interaction, dropout=c.dropout)
        self.pffns = nn.ModuleDict({n: GeneratedFfn(c.summary, c.dim) for n in towers})
        self.attentions = nn.ModuleDict({n: SelfAttention(c.dim, t.heads, t.width, dropout=c.dropout) for n, t in towers.items()})

    def forward(self, x: Tensor, histories: Histories) -> tuple[Tensor, Histories]:
        x_sum = self.features(x)
        sums = [summary(histories[n]) for n, summary in self.histories.items()]
        following = {}
        for n, h in histories.items():
            s = self.pffns[n](h.s, x_sum, h.rows)
            following[n] = replace(h, s=self.attentions[n](s, h.rows, h.rotary))
        return self.interaction(torch.cat([x, *sums], 1)), following


class InterFormer(RankingModel):
    """InterFormer over the features' tables. The fields of an event go through a MaskNet, the feature summary goes before the events as CLS
    tokens, and the heads read both summaries of the last layer's results.

    :raises ConfigError: features without a label, or without a history.
    """

    def __init__(self, config: InterFormerConfig, features: Features) -> None:
        super().__init__(config, features)
        if not features.sequences:
            raise ConfigError(
                "InterFormer reads histories, and none is declared", where="features.sequences", fix="declare one, or choose wukong"
            )
        c = self.config = config
        tower = SequenceConfig(
            dim=c.dim, heads=c.heads, rotary="position", cls=c.summary, event=EventConfig(combine="masknet", positions=c.positions),
            pooling=PoolingConfig(seeds=c.seeds, recent=c.recent),
        )  # fmt: skip
        self.towers = dict.fromkeys(features.sequences, tower)
        self.features = FeatureTokens(features, self.table_set, c.dim)
        n = self.features.count
        self.entries = nn.ModuleDict(
            {
                name: HistoryEntry(name, features, self.table_set, n, c.dim, tower, summary=FeatureSummary(n, c.summary, c.dim))
                for name in self.towers
            }
        )
        counts = [n] + [c.interaction.tokens] * (c.layers - 1)
        self.layers = nn.ModuleList(InterFormerLayer(c, self.towers, tokens) for tokens in counts)
        self.summary = FeatureSummary(c.interaction.tokens, c.summary, c.dim)
        self.histories = nn.ModuleDict({name: HistorySummary(tower) for name in self.towers})
        read = c.summary + sum(h.count for h in self.histories.values())
        self.heads = TaskHeads(Mlp(read * c.dim, (*c.hidden, 1), activation="silu", dropout=c.dropout) for _ in self.task_names)

    def score(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, Mapping[str, Tensor]]:
        x = self.features(batch, embedded)
        histories: Histories = {n: entry(batch, embedded, x) for n, entry in self.entries.items()}
        for layer in self.layers:
            x, histories = layer(x, histories)
        sums = [summary(histories[n]) for n, summary in self.histories.items()]
        read = torch.cat([self.summary(x), *sums], 1).flatten(1)
        return self.heads(read), {}

    def count_flops(self, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
        c, b, count = self.config, batch_size, FlopCount()
        count.linear("features", self.features, b, c.dim)
        rows = {}
        for n, entry in self.entries.items():
            rows[n] = entry_flops(count, entry, lengths[n], b, c.dim)
            _summary_flops(count, "events", entry.summary, b)
        for layer in self.layers:
            _summary_flops(count, "pffn", layer.features, b)
            for n, tower in self.towers.items():
                _history_summary_flops(count, layer.histories[n], tower, rows[n], b)
                count.linear("pffn", layer.pffns[n].generate, b, c.dim)
                count.attend("pffn", rows[n] * c.dim, 1, c.dim)
                count.linear("attention", layer.attentions[n], rows[n])
                count.attend("attention", attention_pairs("full", tower, lengths[n]), tower.heads, tower.width)
            count.linear("interaction", layer.interaction, b, c.dim)
        _summary_flops(count, "heads", self.summary, b)
        for n, tower in self.towers.items():
            _history_summary_flops(count, self.histories[n], tower, rows[n], b)
        count.linear("heads", self.heads, b)
        return count.total()


def _summary_flops(count: FlopCount, part: str, summary: FeatureSummary, b: int) -> None:
    tokens = summary.mix.weight.shape[0]
    count.linear(part, summary.mix, b, summary.gate.linear.in_features)
    count.linear(part, summary.gate, b * tokens)


def _history_summary_flops(count: FlopCount, summary: HistorySummary, tower: SequenceConfig, rows: int, b: int) -> None:
    pooling_flops(count, summary.pool, tower, rows, b)
    count.linear("pooling", summary.gate, b * summary.count)
