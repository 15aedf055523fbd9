"""Hit rate, NDCG and reciprocal rank of one right item a history, in constant memory.

With rank r (1 is the first place): HR@K is the share of histories with r <= K, NDCG@K the mean of ``1 / log2(1 + r)`` where r <= K and 0
elsewhere, MRR the mean of 1 / r. Ranks may be halves (equal scores) or infinite (not found).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_core.metrics.collect import Gather
from gem_core.metrics.contract import Value


def names(k: Sequence[int]) -> tuple[str, ...]:
    """Names of the metrics with cut-offs ``k``."""
    return (*(f"hr@{n}" for n in k), *(f"ndcg@{n}" for n in k), "mrr")


class RankMetrics:
    """Sums over histories on ``device``; nothing is read on the host before `compute`."""

    def __init__(self, k: Sequence[int], device: torch.device) -> None:
        self.k = tuple(k)
        self.sums = torch.zeros(2, len(names(k)), dtype=torch.float64, device=device)
        self.samples, self.broken = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))

    def update(self, ranks: Tensor) -> None:
        """Add ``ranks [n]`` float64; NaN is a history without a defined rank."""
        self.samples += ranks.numel()
        self.broken += ranks.isnan().sum()
        places = ranks.unsqueeze(1)
        hit = (places <= torch.tensor(self.k, device=ranks.device)).double()
        values = torch.cat([hit, hit / torch.log2(1 + places), 1 / places], 1)
        self.sums += torch.stack([values.sum(0), values.square().sum(0)])

    def merge(self, gather: Gather) -> None:
        """Add the sums of all other ranks; every rank must call it."""
        for name in ("sums", "samples", "broken"):
            own = getattr(self, name).cpu().unsqueeze(0)
            setattr(self, name, torch.cat([own, *gather(own)]).sum(0))

    def compute(self) -> dict[str, Value]:
        """Means, each with its standard error over histories in ``details``."""
        n, broken = int(self.samples), int(self.broken)
        if not n or broken:
            reason = f"{broken} of the queries or scores are not finite" if broken else "no history was evaluated"
            return {name: Value(None, reason, broken=broken > 0) for name in names(self.k)}
        mean, square = (self.sums.cpu() / n).tolist()
        return {
            name: Value(m, details={"standard_error": (max(0.0, s - m * m) / n) ** 0.5}) for name, m, s in zip(names(self.k), mean, square)
        }
