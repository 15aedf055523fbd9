"""Which query sees which key: the one definition behind the reference, the FLOP formulas and the documentation.

One sample has Lq query rows and Lk key rows, of which the last t of both are candidates; h = Lk − t. Query row i has position
p = i + (Lk − Lq), a candidate (as query and as key) has position h. With context length c::

               key  0 … c−1    c … h−1                         candidates
    query p < c     yes        yes                             no            (not for candidate queries)
    query p >= c    yes        j <= p (causal), in window      no
    candidate       yes        in window around h              itself only

Context rows are those with p < c, rows of negative position included.
"""

from __future__ import annotations

import torch
from torch import Tensor

Window = tuple[int, int] | None


def positions(lq: int, lk: int, t: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Positions of the query rows ``[Lq]`` and the key rows ``[Lk]`` of one sample, int64."""
    i, j, h = torch.arange(lq, device=device), torch.arange(lk, device=device), lk - t
    return torch.where(i >= lq - t, h, i + (lk - lq)), torch.where(j >= h, h, j)


def visible(
    lq: int, lk: int, *, t: int = 0, c: int | None = None, causal: bool = False, window: Window = None, device: torch.device | None = None
) -> Tensor:
    """``[Lq, Lk]`` bool of one sample: may query row i see key row j? −1 in ``window`` means unbounded on that side."""
    i, j = torch.arange(lq, device=device)[:, None], torch.arange(lk, device=device)[None, :]
    q_pos, k_pos = positions(lq, lk, t, device)
    p, k = q_pos[:, None], k_pos[None, :]
    candidate_q, candidate_k = i >= lq - t, j >= lk - t
    seen = torch.ones(lq, lk, dtype=torch.bool, device=device)
    if causal:
        seen &= k <= p
    if window is not None:
        left, right = window
        if left >= 0:
            seen &= k >= p - left
        if right >= 0:
            seen &= k <= p + right
    if c is not None:
        seen |= (k < c) | ((p < c) & ~candidate_q)
    itself = candidate_q & (j - (lk - t) == i - (lq - t))
    return torch.where(candidate_k, itself, seen)


def attended_pairs(
    q_lengths: Tensor,
    k_lengths: Tensor,
    *,
    num_targets: Tensor | None = None,
    context_len: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
) -> Tensor:
    """``[B]`` int64: how many (query, key) pairs each sample attends, in closed form a row.

    ``q_lengths``, ``k_lengths [B]`` are the rows of Q and K (candidates included in both), on one device; ``num_targets`` and
    ``context_len [B]`` or None.
    """
    lq, lk = q_lengths.long(), k_lengths.long()
    t = torch.zeros_like(lq) if num_targets is None else num_targets.long().to(lq.device)
    h = lk - t
    if not causal and window is None:
        # every non-candidate row sees the history, and context changes nothing
        return lq * h + t
    sample = torch.repeat_interleave(torch.arange(lq.numel(), device=lq.device), lq)
    i = torch.arange(sample.numel(), device=lq.device) - (lq.cumsum(0) - lq)[sample]
    row_h = h[sample]
    candidate = i >= (lq - t)[sample]
    p = torch.where(candidate, row_h, i + (lk - lq)[sample])
    left, right = (-1, -1) if window is None else window
    low = (p - left).clamp(min=0) if left >= 0 else torch.zeros_like(p)
    high = row_h
    if causal:
        high = torch.minimum(high, p + 1)
    if right >= 0:
        high = torch.minimum(high, p + right + 1)
    count = (high - low).clamp(min=0)
    if context_len is not None:
        c = context_len.long().to(lq.device)[sample]
        prefix = torch.minimum(c, row_h)
        overlap = (torch.minimum(high, prefix) - low).clamp(min=0)
        count = torch.where((p < c) & ~candidate, row_h, count + prefix - overlap)
    count = count + candidate.long()
    return torch.zeros_like(lq).index_add_(0, sample, count)


def block_pairs(lengths: Tensor, block_size: int) -> Tensor:
    """``[B]`` int64: pairs within blocks of ``block_size`` rows aligned to each sample's start; the last block may be partial."""
    whole, rest = lengths.long() // block_size, lengths.long() % block_size
    return whole * block_size * block_size + rest * rest
