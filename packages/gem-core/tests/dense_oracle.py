"""Attention once more, written differently: one score matrix over the whole batch, a mask decided pair by pair, gradients by autograd."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def sees(i: int, j: int, lq: int, lk: int, t: int = 0, c: int | None = None, causal: bool = False, window: Any = None) -> bool:
    """May query row i of a sample see its key row j? In the words of the definition."""
    h = lk - t
    if i >= lq - t:
        if j >= h:
            return j - h == i - (lq - t)
        p = h
    else:
        if j >= h:
            return False
        p = i + lk - lq
        if c is not None and p < c:
            return True
    if c is not None and j < c:
        return True
    if causal and j > p:
        return False
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        if left != -1 and j < p - left:
            return False
        if right != -1 and j > p + right:
            return False
    return True


@dataclass
class Dense:
    """A call on packed float64 tensors; lengths as lists. Keys: rows of k, then, under sharing, rows of target_k."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_lengths: list[int]
    k_lengths: list[int]
    index: list[int] | None = None
    targets: list[int] | None = None
    target_kv: tuple[Tensor, Tensor] | None = None
    context: list[int] | None = None
    causal: bool = False
    window: Any = None
    position: Tensor | None = None
    time: Tensor | None = None
    edges: list[int] = field(default_factory=list)
    q_times: list[int] | None = None
    k_times: list[int] | None = None
    broadcast: bool = False

    def pairs(self) -> list[tuple[int, int, int, int, int, int]]:
        """(result row, row of q, row of all keys, p, position of the key, row of times of the key or of q if negative)."""
        q_start, k_start, found = 0, [sum(self.k_lengths[:r]) for r in range(len(self.k_lengths))], []
        requests = self.index if self.index is not None else list(range(len(self.k_lengths)))
        for b, r in enumerate(requests):
            lq = self.q.shape[0] if self.broadcast else self.q_lengths[b]
            t = 0 if self.targets is None else self.targets[b]
            own = self.target_kv is not None
            lk = self.k_lengths[r] + (t if own else 0)
            c = None if self.context is None else self.context[b]
            for i in range(lq):
                for j in range(lk):
                    if not sees(i, j, lq, lk, t, c, self.causal, self.window):
                        continue
                    p = lk - t if i >= lq - t else i + lk - lq
                    position = lk - t if j >= lk - t else j
                    q_row = i if self.broadcast else q_start + i
                    own_row = q_start + lq - t + (j - (lk - t))
                    key = self.k.shape[0] + own_row if own and j >= lk - t else k_start[r] + j
                    when = -1 - own_row if own and j >= lk - t else k_start[r] + j
                    found.append((b * lq + i if self.broadcast else q_start + i, q_row, key, p, position, when))
            q_start += 0 if self.broadcast else lq
        return found

    def scores(self, scale: float) -> tuple[Tensor, Tensor]:
        """``[H, rows, keys]`` scores and ``[rows, keys]`` mask."""
        keys = self.k if self.target_kv is None else torch.cat([self.k, self.target_kv[0]])
        rows = self.q.shape[0] * len(self.index if self.index is not None else self.k_lengths) if self.broadcast else self.q.shape[0]
        q = self.q.repeat(rows // max(1, self.q.shape[0]), 1, 1) if self.broadcast else self.q
        groups = self.q.shape[1] // keys.shape[1]
        product = torch.einsum("ihd,jhd->hij", q, torch.stack([keys[:, h // groups] for h in range(q.shape[1])], 1))
        mask = torch.zeros(rows, keys.shape[0], dtype=torch.bool)
        bias = torch.zeros_like(product)
        for row, q_row, key, p, position, when in self.pairs():
            mask[row, key] = True
            if self.position is not None:
                radius = self.position.shape[1] // 2
                one = self.position[:, max(-radius, min(radius, position - p)) + radius]
                if self.time is not None:
                    assert self.q_times is not None
                    assert self.k_times is not None
                    at = self.q_times[-1 - when] if when < 0 else self.k_times[when]
                    gap = abs(self.q_times[q_row] - at)
                    one = one + self.time[:, sum(e <= gap for e in self.edges)]
                bias = bias.index_put((torch.arange(bias.shape[0]), torch.tensor(row), torch.tensor(key)), one)
        return scale * product + bias, mask

    def values(self) -> Tensor:
        values = self.v if self.target_kv is None else torch.cat([self.v, self.target_kv[1]])
        groups = self.q.shape[1] // values.shape[1]
        return torch.stack([values[:, h // groups] for h in range(self.q.shape[1])], 1)

    def softmax(self, scale: float, out_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Result ``[rows, H, Dv]`` and log-sum-exp ``[H, rows]``."""
        scores, mask = self.scores(scale)
        # finite where nothing is seen, so that autograd stays clean there
        blind = ~mask.any(1)
        scores = torch.where(mask | blind[:, None], scores, -torch.inf)
        weights = torch.where(mask, scores.softmax(2), 0.0)
        lse = torch.where(blind, -torch.inf, scores.logsumexp(2))
        return out_scale * torch.einsum("hij,jhd->ihd", weights, self.values()), lse

    def pointwise(self, activation: Any, scale_in: float, scale_out: float) -> Tensor:
        """Result ``[rows, H, Dv]``; ``activation`` is a torch function."""
        scores, mask = self.scores(scale_in)
        return torch.einsum("hij,jhd->ihd", scale_out * torch.where(mask, activation(scores), 0.0), self.values())
