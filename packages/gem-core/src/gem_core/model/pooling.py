"""Pooling: the summary tokens of a history that join the interaction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gem_core import ops
from gem_core.model.config import NormKind, PoolingConfig
from gem_core.model.layers import NormLinear, TokenMix, is_plain, product_dtype, rows_linear, side_by_side
from gem_core.model.rows import Rows
from gem_core.ops import pool_rows, siblings
from gem_core.ops.contract import OpPrecision

QUERIES = 128
"""Rows of all heads' shared queries that read the rows at once, at most."""


class SumKron(nn.Module):
    """Kunlun's SumKronLinear ``sum_i Z_i^T H W_i`` over ``terms`` terms plus a bias: ``[B, n, width] -> [B, tokens, out]``."""

    def __init__(self, n: int, tokens: int, width: int, out: int, terms: int = 8) -> None:
        super().__init__()
        self.tokens = tokens
        self.mix = TokenMix(n, tokens * terms)
        self.map = nn.Linear(terms * width, out)

    def forward(self, h: Tensor) -> Tensor:
        return self.map(self.mix(h).view(h.shape[0], self.tokens, self.map.in_features))


class SeedPooling(nn.Module):
    """Pooling by attention (PMA, HSP): queries read all rows of their sample, ``[N, dim] -> [B, seeds + candidate_queries, out_dim]``.

    ``seeds`` learned queries are the same for every sample (one broadcast query tensor); ``candidate_queries`` are generated from the
    candidate's event token ``[B, dim]``. With ``tokens`` the queries' readings become that many tokens by `SumKron` with ``kron`` terms. An
    empty history gives the output bias.
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, out_dim: int,
        *, seeds: int = 4, candidate_queries: int = 0, tokens: int | None = None, kron: int = 8, norm: NormKind = "rms",
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.head_dim, self.count = heads, head_dim, candidate_queries
        self.attention_precision: OpPrecision | None = None
        self.seeds = nn.Parameter(torch.empty(seeds, heads, head_dim)) if seeds else None
        self.queries = NormLinear(dim, candidate_queries * heads * head_dim, norm) if candidate_queries else None
        self.kv = NormLinear(dim, 2 * heads * head_dim, norm)
        width = heads * head_dim
        self.out = nn.Linear(width, out_dim) if tokens is None else SumKron(seeds + candidate_queries, tokens, width, out_dim, kron)
        self.reset_parameters()

    @property
    def seed_count(self) -> int:
        return 0 if self.seeds is None else self.seeds.shape[0]

    def reset_parameters(self) -> None:
        if self.seeds is not None:
            nn.init.normal_(self.seeds)

    def forward(self, s: Tensor, rows: Rows, candidate: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Also s, for what reads the rows after this (see `gem_core.ops.norm_linear`, ``through``)."""
        b = rows.batch_size
        if (found := self._of_rows(s, rows)) is not None:
            read, s = found
            return (self.out(read) if isinstance(self.out, SumKron) else rows_linear(self.out, read)), s
        kv, s = self.kv(s, through=True)
        k, v = siblings.unbind(kv, 2, self.heads, self.head_dim)
        pooled = []
        if self.seeds is not None:
            q = self.seeds.to(k.dtype)
            o: Any = ops.jagged_attention(
                q, k, v, None, rows.offsets, max_k_len=rows.max_length, broadcast_q=True, precision=self.attention_precision
            )
            pooled.append(o.view(b, self.seeds.shape[0], self.heads * self.head_dim))
        if self.queries is not None:
            assert candidate is not None
            q = self.queries(candidate).view(-1, self.heads, self.head_dim)
            lengths: dict[str, Any] = {"max_q_len": self.count, "max_k_len": rows.max_length}
            o = ops.jagged_attention(q, k, v, rows.uniform(self.count), rows.offsets, **lengths, precision=self.attention_precision)
            pooled.append(o.view(b, self.count, self.heads * self.head_dim))
        read = side_by_side(pooled)
        return (self.out(read) if isinstance(self.out, SumKron) else rows_linear(self.out, read)), s

    def _of_rows(self, s: Tensor, rows: Rows) -> tuple[Tensor, Tensor] | None:
        """What shared queries read, ``[B, seeds, dim]``, and s: by the normed rows themselves (`gem_core.ops.pool_rows`), where an
        implementation has them and the modules are plain ones; None elsewhere."""
        linear, n, h, d = self.kv.linear, self.seed_count, self.heads, self.head_dim
        if torch.compiler.is_compiling():  # first, since a question for the rows would bound them in what is traced
            return None
        if n == 0 or self.queries is not None:
            return None
        plain = type(linear) is nn.Linear and type(self.kv) is NormLinear
        plain = plain and (pool_rows.counting() or (is_plain(linear) and is_plain(self.kv)))  # fake parameters are no plain ones
        dtype = product_dtype(s)
        if not plain or self.kv.kind != "rms" or self.attention_precision is not None or s.dtype != dtype:
            return None
        heads = next((k for k in range(h, 0, -1) if h % k == 0 and k * n <= QUERIES), 0)  # at once
        run = pool_rows.implementation(s, heads * n, heads, d**-0.5, self.kv.eps) if heads else None
        if run is None:
            return None
        assert self.seeds is not None
        with torch.autocast(s.device.type, enabled=False):
            to_keys, to_values = linear.weight.to(dtype).view(2, h, d, -1).unbind()
            bias = None if linear.bias is None else linear.bias.to(dtype)[h * d :]
            found = []
            for first, queries in zip(range(0, h, heads), torch.bmm(self.seeds.to(dtype).transpose(0, 1), to_keys).split(heads)):
                own = None if bias is None else bias[first * d : (first + heads) * d]
                read, s = run(s, queries.flatten(0, 1), to_values[first : first + heads], own, rows.offsets)
                found.append(read)
            return found[0] if len(found) == 1 else torch.cat(found, 2), s


class Pooling(nn.Module):
    """All summary tokens of one history, ``[N, dim] -> [B, n, out_dim]``: CLS rows, seeds, candidate queries, newest rows, candidate row.

    Rows that are taken as they are share one norm and linear map to ``out_dim``.
    """

    def __init__(
        self, config: PoolingConfig, dim: int, heads: int, head_dim: int, out_dim: int,
        *, cls: int = 0, candidate: bool = False, norm: NormKind = "rms",
    ) -> None:  # fmt: skip
        super().__init__()
        self.cls, self.recent, self.last = cls, config.recent, candidate and config.last
        options: dict[str, Any] = {
            "seeds": config.seeds,
            "candidate_queries": config.candidate_queries,
            "tokens": config.tokens,
            "kron": config.kron,
        }
        asked = config.seeds + config.candidate_queries
        self.attention = SeedPooling(dim, heads, head_dim, out_dim, **options, norm=norm) if asked else None
        taken = cls + config.recent + int(self.last)
        self.rows = NormLinear(dim, out_dim, norm) if taken else None
        self.count = config.read_tokens + taken

    def forward(self, s: Tensor, rows: Rows, candidate: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The tokens, and s for what reads the rows after this."""
        tokens = []
        if self.attention is not None:
            found, s = self.attention(s, rows, candidate)
            tokens.append(found)
        taken = []
        if self.cls:
            taken.append(rows.first(s, self.cls))
        if self.recent:
            taken.append(rows.newest(s, self.recent))
        if self.last:
            taken.append(rows.last(s))
        if self.rows is not None:
            tokens.append(self.rows(side_by_side(taken)))
        return side_by_side(tokens), s
