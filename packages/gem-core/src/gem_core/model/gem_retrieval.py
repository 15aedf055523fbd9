"""The GEM model's history tower, predicting the next item."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.config.features import Features
from gem_core.errors import ConfigError
from gem_core.model.config import GemConfig
from gem_core.model.embedding import Embedded, FeatureTokens
from gem_core.model.flops import FlopCount, block_flops, entry_flops
from gem_core.model.history import History, HistoryEntry
from gem_core.model.layers import Norm
from gem_core.model.retrieval import RetrievalModel, causal_tower
from gem_core.model.sequence import SequenceBlock


class GemRetrieval(RetrievalModel):
    """Sequence blocks (PFFN by the sample's own features, self-attention, FFN) and a norm; no interaction, pooling or heads.

    The sample's features that are not about the item go into the blocks as the PFFN's keys and values.

    :raises ConfigError: no tower for the history, one that looks ahead, a PFFN without features of the sample or the reverse.
    """

    def __init__(self, config: GemConfig, features: Features) -> None:
        name, _ = features.next_item_field() if features.next_item else ("", "")
        tower = config.tower(name)
        if tower is None:
            raise ConfigError("retrieval needs the history's tower", where="model.sequence", fix="remove sequence = false")
        where = f"model.groups.{name}" if name in config.groups else "model.sequence"
        super().__init__(config, config.retrieval, features, tower.dim)
        self.config = config
        pooling = tower.pooling.model_copy(update={"candidate_queries": 0})
        self.tower = causal_tower(tower, where).model_copy(update={"pooling": pooling})
        has_context = bool(self.inputs.sparse or self.inputs.dense or self.inputs.vectors)
        if tower.pffn.kind != "none" and not has_context:
            raise ConfigError(
                "the PFFN's keys come from features of the sample, and there are none",
                where=f"{where}.pffn.kind",
                fix='set kind = "none", or declare features of the user',
            )
        if tower.pffn.kind == "none" and has_context:
            raise ConfigError(
                "without a PFFN nothing reads the features of the sample",
                where=f"{where}.pffn.kind",
                fix='set kind = "gdpa", or remove the features',
            )
        self.context = None
        tokens = 0
        if has_context:
            self.context = FeatureTokens(
                self.inputs, self.table_set, config.dim, count=config.feature_tokens, dense_hidden=(config.dense_hidden,)
            )
            tokens = self.context.count
        self.entry = HistoryEntry(name, self.inputs, self.table_set, 0, 0, self.tower, about=False)
        depth = config.layers if tower.layers is None else tower.layers
        self.layers = nn.ModuleList(SequenceBlock(self.tower, tokens, config.dim, i, comp_skip=config.comp_skip) for i in range(depth))
        self.norm = Norm(tower.dim, tower.norm, affine=True)

    def encode(self, batch: Batch, embedded: Embedded) -> tuple[Tensor, History]:
        x = torch.empty(0) if self.context is None else self.context(batch, embedded)
        history: History = self.entry(batch, embedded, x)
        s = history.s
        for block in self.layers:
            s = block(s, x, history.rows, history.rotary)
        return self.norm(s), history

    def count_tower(self, count: FlopCount, lengths: Tensor, batch_size: int) -> None:
        dim = self.config.dim
        count.linear("features", self.context, batch_size, dim)
        rows = entry_flops(count, self.entry, lengths, batch_size, dim)
        for block in self.layers:
            assert isinstance(block, SequenceBlock)
            block_flops(count, block, self.tower, rows, lengths, batch_size, dim)
