"""The sequence block: GDPA-PFFN, self-attention, optional FFN, on packed rows ``[N, d]``.

``attention_precision`` of a module, None to begin with, is handed to its attention op: a precision recipe may set it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core import ops
from gem_core.model.config import AttentionKind, NormKind, PffnConfig, SequenceConfig
from gem_core.model.layers import FeedForward, NormLinear, TokenMix, added_linear
from gem_core.model.rows import Rows
from gem_core.ops import meeting, siblings
from gem_core.ops.block import rotate
from gem_core.ops.contract import OpPrecision


@dataclass(frozen=True)
class Rotary:
    """Tables ``cos``, ``sin`` ``[P, D/2]`` fp32; ``rows [N]`` names each row's entry, None: the row's position within its sample."""

    cos: Tensor
    sin: Tensor
    rows: Tensor | None = None

    def of(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """(cos, sin) of each row, ``[N, D/2]``."""
        place = rows.position if self.rows is None else self.rows
        return self.cos[place], self.sin[place]


class Pffn(nn.Module):
    """Personalised FFN (InterFormer) in its attention form (Kunlun): rows ``s [N, d]`` attend to generated keys, without softmax.

    Keys and values come from the sample's feature tokens ``x [B, n, token_dim]``: one linear map ``token_dim -> 2 H D`` of each token
    (``keys = None``), or of ``keys`` linear mixtures of the tokens. ``s + W_o gdpa(W_q norm(s), K, V)`` for ``kind = "gdpa"``; for
    "norm_gdpa" the fused op of the same name with the rows themselves as queries, its own norms and residual (d = H D).
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, tokens: int, token_dim: int, config: PffnConfig | None = None,
        *, norm: NormKind = "rms", dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = config = config or PffnConfig()
        self.heads, self.head_dim = heads, head_dim
        self.keys = config.keys or tokens
        self.mix = TokenMix(tokens, config.keys) if config.keys is not None else None
        self.kv = NormLinear(token_dim, 2 * heads * head_dim, norm)
        projected = config.kind == "gdpa"
        if projected:
            self.attention_precision: OpPrecision | None = None
        self.q = NormLinear(dim, heads * head_dim, norm) if projected else None
        self.out = nn.Linear(heads * head_dim, dim) if projected else None
        self.scale_in = config.scale_in or head_dim**-0.5
        self.scale_out = config.scale_out or self.keys**-0.5
        self.dropout = nn.Dropout(dropout)

    def forward(self, s: Tensor, x: Tensor, rows: Rows) -> Tensor:
        kv = self.kv((x if self.mix is None else self.mix(x)).flatten(0, -2))
        k, v = siblings.unbind(kv, 2, self.heads, self.head_dim)
        k_offsets = rows.uniform(self.keys)
        options: dict[str, Any] = {"activation": self.config.activation, "scale_in": self.scale_in, "scale_out": self.scale_out}
        bounds: dict[str, Any] = {"max_q_len": rows.max_length, "max_k_len": self.keys}
        if self.q is None or self.out is None:
            queries = meeting.in_heads(s, self.heads, self.head_dim)
            return siblings.flat(ops.norm_gdpa(queries, k, v, rows.offsets, k_offsets, **options, **bounds))
        q, s = self.q(s, through=True)
        o = ops.gdpa(
            q.view(-1, self.heads, self.head_dim), k, v, rows.offsets, k_offsets, **options, **bounds, precision=self.attention_precision
        )
        return added_linear(self.out, o.flatten(1), s, self.dropout)


class SelfAttention(nn.Module):
    """``s + W_o attention(norm(s) W_qkv)`` on ``s [N, d]``.

    "full": every row sees its sample; "causal": earlier rows and itself; "window": rows at most ``window`` away; "causal_window": both;
    "block": rows of the same ``block`` consecutive rows, counted from the sample's start. The candidate's row sees the history (in a
    window: its newest part) and itself, no history row sees it; CLS rows see and are seen by all history rows.
    ``rotary`` turns queries and keys, and in block attention the values too.
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, kind: AttentionKind = "full",
        *, window: int = 128, block: int = 64, norm: NormKind = "rms", qk_norm: bool = False, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.head_dim, self.kind, self.block, self.qk_norm = heads, head_dim, kind, block, qk_norm
        self.causal = kind in ("causal", "causal_window")
        self.window = (window, window) if kind in ("window", "causal_window") else None
        if kind != "block":
            self.attention_precision: OpPrecision | None = None
        self.qkv = NormLinear(dim, 3 * heads * head_dim, norm)
        self.out = nn.Linear(heads * head_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, s: Tensor, rows: Rows, rotary: Rotary | None = None) -> Tensor:
        qkv, s = self.qkv(s, through=True)
        q, k, v = siblings.unbind(qkv, 3, self.heads, self.head_dim)
        if self.qk_norm:
            q, k = ops.norm(q), ops.norm(k)  # type: ignore[assignment]
        if self.kind == "block":
            turn = None if rotary is None else (rotary.cos, rotary.sin)
            o: Any = ops.block_attention(
                q, k, v, rows.offsets, block_size=self.block, rotary=turn, rotary_rows=None if rotary is None else rotary.rows
            )
        else:
            if rotary is not None:
                cos, sin = rotary.of(rows)
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            o = ops.jagged_attention(
                q, k, v, rows.offsets, max_q_len=rows.max_length, causal=self.causal, window=self.window,
                num_targets=rows.num_targets, context_len=rows.context_len, precision=self.attention_precision,
            )  # fmt: skip
        return added_linear(self.out, siblings.flat(o), s, self.dropout)


class SequenceBlock(nn.Module):
    """One layer of a history tower: PFFN, then self-attention, then FFN; each part that the options leave out is skipped.

    ``comp_skip``: even layers leave self-attention out, odd ones the PFFN (Kunlun).
    """

    def __init__(self, config: SequenceConfig, tokens: int, token_dim: int, layer: int = 0, *, comp_skip: bool = False) -> None:
        super().__init__()
        c, shape = config, (config.dim, config.heads, config.width)
        common: dict[str, Any] = {"norm": c.norm, "dropout": c.dropout}
        turn = layer // 2 if comp_skip else layer
        kind = "none" if comp_skip and layer % 2 == 0 else c.kinds[turn % len(c.kinds)]
        generated = c.pffn.kind != "none" and not (comp_skip and layer % 2)
        self.pffn = Pffn(*shape, tokens, token_dim, c.pffn, **common) if generated else None
        self.attention = (
            SelfAttention(*shape, kind, window=c.window, block=c.block, qk_norm=c.qk_norm, **common) if kind != "none" else None
        )
        self.ffn = FeedForward(c.dim, c.ffn, c.norm, dropout=c.dropout) if c.ffn else None

    def forward(self, s: Tensor, x: Tensor, rows: Rows, rotary: Rotary | None = None) -> Tensor:
        """``s [N, dim]``, ``x [B, tokens, token_dim]`` -> ``[N, dim]``."""
        if self.pffn is not None:
            s = self.pffn(s, x, rows)
        if self.attention is not None:
            s = self.attention(s, rows, rotary)
        if self.ffn is not None:
            s = self.ffn(s)
        return s


class NextEvent(nn.Module):
    """Auxiliary loss: each history row predicts the next event among ``negatives`` random events of the batch (sampled softmax).

    The negatives follow the events' own frequency and their scores are not corrected for it, so that the score learns by how much the
    history makes an event likelier than its popularity does.
    """

    def __init__(self, dim: int, *, negatives: int = 64, temperature: float = 0.1) -> None:
        super().__init__()
        self.negatives, self.temperature = negatives, temperature
        self.map = NormLinear(dim, dim)

    def forward(self, states: Tensor, events: Tensor, rows: Rows) -> Tensor:
        """``states [N, d]`` that saw nothing after their own event, ``events [N, d]`` without place and age -> scalar, 0 without pairs."""
        if rows.count < 2:
            return states.sum() * 0.0
        real = (rows.recency > 0)[:-1]
        queries = F.normalize(self.map(states[:-1]), dim=1)
        keys = F.normalize(events, dim=1)
        drawn = (torch.rand(self.negatives, device=states.device) * rows.offsets[-1]).long()
        own = (queries * keys[1:]).sum(1, keepdim=True)
        others = queries @ keys[drawn].T
        scores = torch.cat([own, others], 1) / self.temperature
        loss = torch.logsumexp(scores, 1) - scores[:, 0]
        return (loss * real).sum() / real.sum().clamp(min=1)


def rotary_angles(rows: Rows, head_dim: int, kind: str, base: float = 10000.0) -> Rotary:
    """Angles ``t * base ** (-2 i / head_dim)`` with t the row's position ("position") or its log age ("time", ROTE)."""
    pairs = torch.arange(0, head_dim, 2, device=rows.offsets.device, dtype=torch.float32)
    own = None
    if kind == "time":
        if rows.ages is None:
            raise ValueError("rotary angles from time need rows.ages")
        place, own = rows.ages, torch.arange(rows.count, device=rows.offsets.device)
    else:
        longest = rows.count if rows.max_length is None else rows.max_length
        place = torch.arange(longest, device=rows.offsets.device, dtype=torch.float32)
    angles = torch.outer(place, base ** (-pairs / head_dim))
    return Rotary(angles.cos(), angles.sin(), own)
