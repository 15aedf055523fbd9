"""Column sums of dQ, dK and dV that are gradients of one projection's slices: its bias gradient, which backward kernels leave beside them.

A product with ones would read all of these gradients once more; here each tile is still in shared memory when its columns are added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.ops import siblings
from gem_kernels.triton.attention.inputs import Inputs

ROWS_EACH = 16
"""Rows of a gradient for each partial sum; of fewer, a product with ones is as good."""
BESIDE_SPLIT = False
"""Whether the two Hopper kernels for dQ and for dK and dV make sums: that took as long as the product with ones."""


class ColumnSums:
    """``rows`` partial sums ``[H · D]`` fp32 of each of those of dQ, dK and dV (0, 1, 2) that are ``together``; nothing for None."""

    def __init__(self, x: Inputs, together: range | None, rows: int) -> None:
        self._together = together
        self._used: set[int] = set()
        if together is not None:
            self._parts = torch.zeros(len(together), rows, x.k.shape[1] * x.k.shape[2], dtype=torch.float32, device=x.device)

    def zeros(self, which: int) -> Tensor | None:
        """``[rows, H · D]`` for a kernel that is about to be launched; None where no sums are wanted."""
        if self._together is None or which not in self._together:
            return None
        part = self._parts[which - self._together.start]
        if which in self._used:
            part.zero_()
        self._used.add(which)
        return part

    def leave(self, *grads: Tensor | None) -> None:
        """Notes the sums with dQ, dK and dV."""
        if self._together is not None:
            siblings.leave_sums(grads[self._together.start : self._together.stop], self._parts.sum(1).flatten())  # type: ignore[arg-type]


def empty_grads(
    x: Inputs, rows: int, needs: tuple[bool, bool, bool] = (True, True, True), *, of_q: bool = True, offered: bool = True
) -> tuple[list[Tensor | None], ColumnSums]:
    """dQ, dK and dV, empty, None where not needed; and the sums that a kernel makes beside them, in ``rows`` parts, where it is ``offered``
    and, ``of_q``, can do it for dQ too."""
    tensors = (x.q, x.k, x.v)
    together = siblings.groups(tensors, needs)
    wanted = offered and len(together) == 1 and (of_q or 0 not in together[0]) and x.k.shape[0] >= ROWS_EACH * rows
    return siblings.empty_grads(tensors, needs, together), ColumnSums(x, together[0] if wanted else None, rows)
