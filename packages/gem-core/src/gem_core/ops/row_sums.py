"""Sums over the rows of a matrix, left by the kernel that wrote it, so that norms of these rows need not read it for them.

``sums [2, parts, N]`` fp32 of ``rows [N, C]``, whose columns are in ``parts`` equal parts: the sum of each part of each row, and the sum of
the squares of its differences from the part's mean.
"""

from __future__ import annotations

from torch import Tensor

from gem_core.ops import remember

_KEY = "sums over rows"


def leave(rows: Tensor, sums: Tensor) -> None:
    """Note the sums with the rows that they are of."""
    remember.note(rows, _KEY, sums)


def found(rows: Tensor) -> Tensor | None:
    """The sums of ``rows``, also of ``[N, H, D]`` that they were handed on to; None where nobody left them, or rows were written since."""
    sums: Tensor | None = remember.noted(rows, _KEY)
    return sums


def hand_on(rows: Tensor, same: Tensor) -> None:
    """Leave with ``same``, a view of the same rows, what was left with ``rows``."""
    if (sums := found(rows)) is not None:
        leave(same, sums)
