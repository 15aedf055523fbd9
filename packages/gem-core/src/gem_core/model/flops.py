"""Model FLOPs by part: the work that the definition of the model asks for, from true lengths.

A linear map counts 2 M N K forward, attention ``gem_core.ops.attention_flops`` of its attended pairs. Training counts forward and
backward: 3 times the linear maps, 3.5 times the attention (where queries and values have one width). Embedding reads, norms, activations
and whatever is recomputed count nothing. Where the same function can be had with fewer products, the definition's are counted, and what
may be spared is told beside them (`ModelFlops.least_by_part_training`): shared queries that pool a history need not project its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gem_core.model.config import SequenceConfig
from gem_core.model.embedding import TokenProjection
from gem_core.model.experts import Elsewhere
from gem_core.model.interaction import Dot, FactorizationMachine
from gem_core.model.layers import TokenMix
from gem_core.model.pooling import SumKron
from gem_core.ops import attended_pairs, attention_flops, block_pairs

if TYPE_CHECKING:
    from gem_core.model.din import Din
    from gem_core.model.gem import Gem
    from gem_core.model.history import HistoryEntry
    from gem_core.model.pooling import Pooling, SeedPooling
    from gem_core.model.sequence import SequenceBlock


@dataclass(frozen=True)
class ModelFlops:
    """Forward FLOPs of one batch by part, split into linear maps and attention; ``auxiliary`` are linear maps of training only, ``spared``
    those FLOPs of training that another order of the same products does without."""

    gemm: Mapping[str, int]
    attention: Mapping[str, int] = field(default_factory=dict)
    attention_backward: Mapping[str, int] = field(default_factory=dict)
    auxiliary: int = 0
    spared: Mapping[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, int]:
        """Forward FLOPs of each part."""
        return {p: self.gemm.get(p, 0) + self.attention.get(p, 0) for p in dict.fromkeys((*self.gemm, *self.attention))}

    @property
    def by_part_training(self) -> dict[str, int]:
        """FLOPs of forward and backward of each part, those of training only under "auxiliary"."""
        parts = {p: 3 * self.gemm.get(p, 0) + self.attention.get(p, 0) + self.attention_backward.get(p, 0) for p in self.parts}
        return {**parts, "auxiliary": 3 * self.auxiliary} if self.auxiliary else parts

    @property
    def least_by_part_training(self) -> dict[str, int]:
        """The same by the products that are needed at least."""
        return {p: n - self.spared.get(p, 0) for p, n in self.by_part_training.items()}

    @property
    def forward(self) -> int:
        return sum(self.parts.values())

    @property
    def training(self) -> int:
        return sum(self.by_part_training.values())


class FlopCount:
    """Adds up `ModelFlops` part by part."""

    def __init__(self) -> None:
        self.gemm: dict[str, int] = {}
        self.attention: dict[str, int] = {}
        self.backward: dict[str, int] = {}
        self.auxiliary = 0
        self.spared: dict[str, int] = {}

    def linear(self, part: str, module: nn.Module | None, rows: int, width: int = 0) -> None:
        """``module`` applied to ``rows`` rows (samples, where it works on whole samples with tokens of ``width``)."""
        self.add(part, rows * linear_flops(module, width))

    def add(self, part: str, flops: int) -> None:
        self.gemm[part] = self.gemm.get(part, 0) + flops

    def attend(self, part: str, pairs: int, heads: int, head_dim: int, value_dim: int | None = None) -> None:
        shape = int(pairs), heads, head_dim, value_dim or head_dim
        self.attention[part] = self.attention.get(part, 0) + attention_flops(*shape)
        self.backward[part] = self.backward.get(part, 0) + attention_flops(*shape, backward=True)

    def spare(self, part: str, flops: int) -> None:
        """Nothing where ``flops`` are fewer than none."""
        self.spared[part] = self.spared.get(part, 0) + max(0, flops)

    def total(self) -> ModelFlops:
        return ModelFlops(self.gemm, self.attention, self.backward, self.auxiliary, self.spared)


def linear_flops(module: nn.Module | None, width: int = 0) -> int:
    """Forward FLOPs of the linear maps inside ``module`` for one row, or one sample where the module works on whole samples.

    ``width`` is the token width, which a `TokenMix` does not know itself.
    """
    if module is None:
        return 0
    if isinstance(module, nn.Linear):
        return 2 * module.in_features * module.out_features
    if isinstance(module, TokenMix):
        return 2 * module.weight.numel() * width
    if isinstance(module, TokenProjection):
        return 2 * module.weight.numel()
    if isinstance(module, FactorizationMachine):
        n = module.tokens
        products = 2 * n * n * module.dim if module.project is None else 4 * n * module.project.shape[1] * module.dim
        return products + linear_flops(module.mlp)
    if isinstance(module, Elsewhere):
        return linear_flops(module.like[0], width)
    if isinstance(module, Dot):
        return 2 * module.n * module.n * module.dim + linear_flops(module.mlp)
    return sum(linear_flops(child, width) for child in module.children())


def gem_flops(model: Gem, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
    """FLOPs of a `Gem` on ``batch_size`` samples whose histories have ``lengths[name] [B]`` events."""
    count, dim, b = FlopCount(), model.config.dim, batch_size
    count.linear("features", model.features, b, dim)
    rows = {}
    for name, c in model.towers.items():
        rows[name] = entry_flops(count, model.entries[name], lengths[name], b, dim)
        if name in model.next_event:
            auxiliary = model.next_event[name]
            pairs = max(0, int(lengths[name].sum()) - 1)
            count.auxiliary += pairs * (linear_flops(auxiliary.map) + 2 * auxiliary.negatives * c.dim)
    for layer in model.layers:
        for name, block in layer.blocks.items():
            block_flops(count, block, model.towers[name], rows[name], lengths[name], b, dim)
        for name, pool in layer.pools.items():
            pooling_flops(count, pool, model.towers[name], rows[name], b)
        count.linear("interaction", layer.mix, b, dim)
        if layer.gates is not None:
            count.linear("interaction", layer.gates[0], b * layer.own)
            count.linear("interaction", layer.gates[1], b * layer.pooled)
        count.linear("interaction", layer.interaction, b, dim)
    count.linear("heads", model.heads, b, dim)
    return count.total()


def entry_flops(count: FlopCount, entry: HistoryEntry, lengths: Tensor, b: int, token_dim: int) -> int:
    """Adds what makes a history's rows, and returns the number of rows, CLS and candidate included."""
    c, events = entry.config, int(lengths.sum())
    count.linear("events", entry.events.maps, events + b * int(entry.compares))
    count.linear("events", entry.events.match, events + b * int(entry.compares))
    for summary, tokens in ((entry.summary, c.cls), (entry.about, 1)):
        if isinstance(summary, nn.Sequential):
            count.linear("events", summary[0], b, token_dim)
            count.linear("events", summary[1], b * tokens)
    return events + b * (c.cls + int(c.candidate))


def block_flops(count: FlopCount, block: SequenceBlock, c: SequenceConfig, rows: int, lengths: Tensor, b: int, token_dim: int) -> None:
    if block.pffn is not None:
        count.linear("pffn", block.pffn.mix, b, token_dim)
        count.linear("pffn", block.pffn.kv, b * block.pffn.keys)
        count.linear("pffn", block.pffn.q, rows)
        count.linear("pffn", block.pffn.out, rows)
        count.attend("pffn", rows * block.pffn.keys, c.heads, c.width)
    if block.attention is not None:
        count.linear("attention", block.attention, rows)
        count.attend("attention", attention_pairs(block.attention.kind, c, lengths), c.heads, c.width)
    count.linear("ffn", block.ffn, rows)


def pooling_flops(count: FlopCount, pool: Pooling, c: SequenceConfig, rows: int, b: int) -> None:
    if pool.attention is not None:
        asked = c.pooling.seeds + c.pooling.candidate_queries
        count.linear("pooling", pool.attention.kv, rows)
        count.linear("pooling", pool.attention.queries, b)
        count.attend("pooling", rows * asked, c.heads, c.width)
        if pool.attention.queries is None:
            count.spare("pooling", _projected(pool.attention, rows) - _of_rows(pool.attention, c.dim, rows, b))
        out = pool.attention.out
        if isinstance(out, SumKron):
            count.linear("pooling", out.mix, b, c.heads * c.width)
            count.linear("pooling", out.map, b * out.tokens)
        else:
            count.linear("pooling", out, b * asked)
    count.linear("pooling", pool.rows, b * (pool.count - c.pooling.read_tokens))


def _projected(pool: SeedPooling, rows: int) -> int:
    """Training FLOPs of keys, values and attention to them."""
    shape = rows * pool.seed_count, pool.heads, pool.head_dim, pool.head_dim
    return 3 * rows * linear_flops(pool.kv) + attention_flops(*shape) + attention_flops(*shape, backward=True)


def _of_rows(pool: SeedPooling, dim: int, rows: int, b: int) -> int:
    """Those of `gem_core.ops.pool_rows`: two products with each row forward, four backward, and the sums' map to values."""
    width = pool.heads * pool.head_dim
    return 12 * rows * pool.seed_count * pool.heads * dim + 6 * b * pool.seed_count * dim * width


def din_flops(model: Din, lengths: Mapping[str, Tensor], batch_size: int) -> ModelFlops:
    """FLOPs of a `Din`: the activation units on every event, the interests' weighted sums, the heads on every sample."""
    count = FlopCount()
    for name, history in model.histories.items():
        events = int(lengths[name].sum())
        count.linear("attention", history.unit, events)
        count.gemm["attention"] += 2 * events * history.width
    count.linear("heads", model.heads, batch_size)
    return count.total()


def attention_pairs(kind: str, c: SequenceConfig, lengths: Tensor, window: tuple[int, int] | None = None) -> int:
    """Attended pairs of self-attention of one kind over histories of ``lengths [B]`` events, CLS and candidate rows included.

    ``window`` is that of the options where the kind has one, unless given.
    """
    rows = lengths.long() + c.cls + int(c.candidate)
    if kind == "block":
        return int(block_pairs(rows, c.block).sum())
    causal = kind in ("causal", "causal_window")
    if window is None and kind in ("window", "causal_window"):
        window = (c.window, c.window)
    if c.cls:
        targets = torch.ones_like(rows) if c.candidate else None
        context = torch.full_like(rows, c.cls)
        return int(attended_pairs(rows, rows, num_targets=targets, context_len=context, causal=causal, window=window).sum())
    # Counted by sample, not by row: this runs for every batch on the host.
    h = lengths.long()
    left, right = (-1, -1) if window is None else window
    pairs = _earlier(h, left) + h + (0 if causal else _earlier(h, right))
    if c.candidate:
        pairs = pairs + (h if left < 0 else h.clamp(max=left)) + 1
    return int(pairs.sum())


def _earlier(h: Tensor, reach: int) -> Tensor:
    """``sum_p min(p, reach)`` over p = 0 .. h - 1: pairs with an earlier row at most ``reach`` away (negative: any)."""
    if reach < 0:
        return h * (h - 1) // 2
    near = h.clamp(max=reach)
    return near * (near - 1) // 2 + (h - near) * reach
