"""Seeded permutations: one in memory, and one that can be evaluated at any positions in no memory."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gem_core.sources.hashing import GOLDEN, key_of, mix64, mix64_

_ROUNDS = 6


def permutation(n: int, key: int) -> NDArray[np.int64]:
    """Seeded permutation of 0 .. n-1, the same on every machine and in every version of NumPy."""
    mixed = mix64_(np.arange(n, dtype=np.uint64) * GOLDEN ^ np.uint64(key))
    return np.argsort(mixed, kind="stable")


class Shuffle:
    """Feistel network on Z_a x Z_b with a b >= n, a b < n + a; positions that land outside are walked on until they fall inside."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = n
        self.a = max(1, math.isqrt(max(0, n - 1)) + 1)
        self.b = max(1, -(-n // self.a))
        base = mix64(key_of(seed) ^ epoch)
        self.keys = [np.uint64(mix64(base + i)) for i in range(1, _ROUNDS + 1)]

    def __call__(self, positions: NDArray[np.integer]) -> NDArray[np.int64]:
        """The elements at ``positions [k]``, each in [0, n)."""
        x = self._once(np.asarray(positions, dtype=np.uint64))
        outside = np.flatnonzero(x >= self.n)
        while outside.size:
            x[outside] = self._once(x[outside])
            outside = outside[x[outside] >= self.n]
        return x.astype(np.int64)

    def _once(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        a, b = np.uint64(self.a), np.uint64(self.b)
        left, right = x // b, x % b
        for i, key in enumerate(self.keys):
            if i % 2:
                right = (right + mix64_(left ^ key) % b) % b
            else:
                left = (left + mix64_(right ^ key) % a) % a
        return left * b + right
