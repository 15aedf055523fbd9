"""Laws of history lengths, seeded and with their histogram, for the synthetic log and for benchmarks."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from gem_core.config.base import FrozenConfig

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class _Law(FrozenConfig):
    max: int = Field(4096, gt=0, description="longest history")

    def quantile(self, u: Floats) -> Ints:
        """Lengths ``[n]`` at the probabilities ``u [n]`` in (0, 1)."""
        raise NotImplementedError

    def draw(self, n: int, seed: int) -> Ints:
        """``n`` independent lengths."""
        return self.quantile(np.random.default_rng(seed).random(n))


class UniformLaw(_Law):
    """Uniform by sparsity s = mean / max: s >= 0.5: U{(2s-1) max .. max}; s < 0.5: U{1 .. 2 s max}; at least 1."""

    law: Literal["uniform"] = "uniform"
    sparsity: float = Field(0.5, gt=0, le=1)

    def quantile(self, u: Floats) -> Ints:
        low, high = (
            (round((2 * self.sparsity - 1) * self.max), self.max) if self.sparsity >= 0.5 else (1, round(2 * self.sparsity * self.max))
        )
        low, high = max(1, low), max(1, high)
        lengths: Ints = np.minimum(low + np.floor(u * (high - low + 1)), high).astype(np.int64)
        return lengths


class ZipfLaw(_Law):
    """P(length = k) proportional to k^-alpha for k in 1 .. max."""

    law: Literal["zipf"] = "zipf"
    alpha: float = Field(1.2, gt=0)

    def quantile(self, u: Floats) -> Ints:
        cumulative = np.cumsum(np.arange(1, self.max + 1, dtype=np.float64) ** -self.alpha)
        lengths: Ints = np.searchsorted(cumulative, u * cumulative[-1]).clip(max=self.max - 1) + 1
        return lengths


class LognormalLaw(_Law):
    """Log-normal with ``mean`` before the cut at ``max``, rounded down but at least 1; a share ``zero`` has no history at all."""

    law: Literal["lognormal"] = "lognormal"
    mean: float = Field(32.0, gt=0)
    sigma: float = Field(1.3, gt=0)
    zero: float = Field(0.08, ge=0, lt=1)

    def quantile(self, u: Floats) -> Ints:
        inside = ((u - self.zero) / (1 - self.zero)).clip(1e-12, 1 - 1e-12)
        normal = torch.special.ndtri(torch.from_numpy(inside)).numpy()
        lengths = self.mean * np.exp(self.sigma * normal - self.sigma**2 / 2)
        return np.where(u < self.zero, 0, lengths.clip(1, self.max)).astype(np.int64)


class ParetoLaw(_Law):
    """P(length > x) = (minimum / x)^alpha, cut at ``max``."""

    law: Literal["pareto"] = "pareto"
    minimum: float = Field(8.0, ge=1)
    alpha: float = Field(1.1, gt=0)

    def quantile(self, u: Floats) -> Ints:
        return np.minimum(self.minimum * (1 - u) ** (-1 / self.alpha), self.max).astype(np.int64)


LengthLaw = Annotated[UniformLaw | ZipfLaw | LognormalLaw | ParetoLaw, Field(discriminator="law")]


def histogram(lengths: Ints) -> dict[str, Any]:
    """What is stored beside a benchmark: counts in powers of two, mean and quantiles."""
    if not lengths.size:
        return {"n": 0}
    top = max(1, math.ceil(math.log2(int(lengths.max()) + 1)))
    edges = [0, *(1 << i for i in range(top + 1))]
    counts, _ = np.histogram(lengths, bins=[*edges, np.inf])
    quantiles = np.quantile(lengths, [0.5, 0.9, 0.99])
    return {
        "n": int(lengths.size),
        "mean": float(lengths.mean()),
        **{f"p{q}": float(v) for q, v in zip((50, 90, 99), quantiles)},
        "max": int(lengths.max()),
        "counts": {f"{a}..{b - 1}": int(c) for a, b, c in zip(edges, edges[1:], counts) if c},
    }
