"""Models over pooled features: DLRM, DCNv2 and Wukong. A history enters as the pooled embedding of its events."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import ConfigError
from gem_core.model.base import FlatFeatures, RankingModel, sample_level
from gem_core.model.config import CrossConfig, DcnConfig, DlrmConfig, InteractionConfig, WukongModelConfig
from gem_core.model.contract import TableSet
from gem_core.model.embedding import Embedded, EventTokens, FeatureTokens
from gem_core.model.experts import SummedExperts
from gem_core.model.flops import FlopCount, ModelFlops
from gem_core.model.heads import Heads, TaskHeads
from gem_core.model.interaction import CrossLayers, pairwise_dots
from gem_core.model.layers import Mlp, activate
from gem_core.model.tables import sequence_of


class SampleTokens(nn.Module):
    """``tokens`` and one token a history, ``[B, n, dim]``: the mean or sum of its event tokens."""

    def __init__(self, features: Features, tables: TableSet, dim: int, *, history: str, tokens: FeatureTokens) -> None:
        super().__init__()
        self.features = tokens
        self.pool = ops.jagged_mean if history == "mean" else ops.jagged_sum
        names = features.sequences if history != "none" else {}
        self.events = nn.ModuleDict({n: EventTokens(n, features, tables, dim, candidate=False) for n in names})
        self.count = self.features.count + len(self.events)

    def forward(self, batch: Batch, embedded: Embedded) -> Tensor:
        x = self.features(batch, embedded)
        pooled = [self.pool(e(batch, embedded), sequence_of(batch, n).offsets).unsqueeze(1).to(x.dtype) for n, e in self.events.items()]
        return torch.cat([x, *pooled], 1) if pooled else x

    def count_flops(self, count: FlopCount, lengths: Mapping[str, Tensor], b: int) -> None:
        count.linear("features", self.features, b, self.features.dim)
        for name, events in self.events.items():
            assert isinstance(events, EventTokens)
            count.linear("events", events.maps, int(lengths[name].sum()))


class Dlrm(RankingModel):
    """DLRM (arXiv 1906.00091): the dense features' vector, all pairwise dot products of the vectors, and an MLP a task over both.

    :raises ConfigError: a single id feature, which has no pair.
    """

    def __init__(self, config: DlrmConfig, features: Features) -> None:
        super().__init__(config, features, reads=sample_level if config.history == "none" else None)
        dim = config.embedding_dim
        tokens = FeatureTokens(features, self.table_set, dim, dense_hidden=config.bottom)
        self.tokens = SampleTokens(features, self.table_set, dim, history=config.history, tokens=tokens)
        n = self.tokens.count
        self.dense = dim if features.dense else 0
        width = n * (n - 1) // 2 + self.dense
        if not width:
            raise ConfigError(
                "DLRM reads pairs of features, and there is only one", where="features", fix='declare more, or set model.name = "dcnv2"'
            )
        self.heads = TaskHeads(Mlp(width, (*config.top, 1), dropout=config.dropout) for _ in self.task_names)

    def score(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, Mapping[str, Tensor]]:
        x = self.tokens(batch, embedded)
        y = pairwise_dots(x)
        if self.dense:
            y = torch.cat([y, x[:, self.tokens.features.count - 1]], 1)
        return self.heads(y), {}

    def count_flops(self, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
        count = FlopCount()
        self.tokens.count_flops(count, lengths, batch_size)
        count.add("interaction", batch_size * 2 * self.tokens.count**2 * self.tokens.features.dim)
        count.linear("heads", self.heads, batch_size)
        return count.total()


class Dcn(RankingModel):
    """DCNv2 (arXiv 2008.13535): cross layers and a deep network over the flat features, side by side or one after the other."""

    def __init__(self, config: DcnConfig, features: Features) -> None:
        super().__init__(config, features, reads=sample_level if config.history == "none" else None)
        self.flat = FlatFeatures(features, self.table_set, history=config.history)
        width = self.flat.width
        self.cross = CrossLayers(width, CrossConfig(layers=config.layers, rank=config.rank))
        self.deep = Mlp(width, config.deep, dropout=config.dropout)
        self.parallel = config.structure == "parallel"
        self.heads = nn.Linear(config.deep[-1] + (width if self.parallel else 0), len(self.task_names))

    def score(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, Mapping[str, Tensor]]:
        x = self.flat(batch, embedded)
        crossed = self.cross(x)
        deep = activate(self.deep(x if self.parallel else crossed), "relu")
        return self.heads(torch.cat([crossed, deep], 1) if self.parallel else deep), {}

    def count_flops(self, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
        count = FlopCount()
        count.linear("interaction", self.cross, batch_size)
        count.linear("deep", self.deep, batch_size)
        count.linear("heads", self.heads, batch_size)
        return count.total()


class WukongModel(RankingModel):
    """Wukong (arXiv 2403.02545): a stack of factorisation-machine layers over the feature tokens, and an MLP a task."""

    def __init__(self, config: WukongModelConfig, features: Features) -> None:
        super().__init__(config, features, reads=sample_level if config.history == "none" else None)
        tokens = FeatureTokens(features, self.table_set, config.dim, count=config.feature_tokens)
        self.tokens = SampleTokens(features, self.table_set, config.dim, history=config.history, tokens=tokens)
        layer = InteractionConfig(experts=("wukong",), tokens=config.tokens, wukong=config.wukong)
        counts = [self.tokens.count] + [config.tokens] * (config.layers - 1)
        self.layers = nn.ModuleList(SummedExperts(n, config.dim, layer, dropout=config.dropout) for n in counts)
        self.heads = Heads(config.tokens, config.dim, self.task_names, config.head, dropout=config.dropout)

    def score(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, Mapping[str, Tensor]]:
        x = self.tokens(batch, embedded)
        for layer in self.layers:
            x = layer(x)
        return self.heads(x), {}

    def count_flops(self, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
        count, dim = FlopCount(), self.tokens.features.dim
        self.tokens.count_flops(count, lengths, batch_size)
        count.linear("interaction", self.layers, batch_size, dim)
        count.linear("heads", self.heads, batch_size, dim)
        return count.total()
