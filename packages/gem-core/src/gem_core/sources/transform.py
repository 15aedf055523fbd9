"""Arithmetic of dense features and event values as the ``[features]`` table declares it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Scaling(Protocol):
    """The keys that a dense feature and a float event field share."""

    @property
    def transform(self) -> str: ...
    @property
    def mean(self) -> float: ...
    @property
    def std(self) -> float: ...


def scaled(values: NDArray[np.floating], spec: Scaling, clip: tuple[float, float] | None = None) -> NDArray[np.float32]:
    """``values`` of any shape: clip, then log1p where declared, then (x - mean) / std, in float64; float32 out."""
    x = values.astype(np.float64, copy=False)
    if clip is not None:
        x = x.clip(*clip)
    if spec.transform == "log1p":
        x = np.log1p(x)
    if spec.mean or spec.std != 1.0:
        x = (x - spec.mean) / spec.std
    return x.astype(np.float32)
