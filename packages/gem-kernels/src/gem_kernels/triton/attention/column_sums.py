"""Column sums of dK and dV that are gradients of one projection's slices: its bias gradient, which backward kernels leave beside them.

A product with ones would read these gradients once more; here each tile is still on the chip when its columns are added up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_core.ops import siblings
from gem_kernels.triton.attention.inputs import Inputs

ROWS_EACH = 16
"""Rows of a gradient for each partial sum; of fewer, a product with ones is as good."""


class ColumnSums:
    """``rows`` partial sums ``[H · D]`` fp32 of dK and of dV; nothing where they are not ``wanted``."""

    def __init__(self, x: Inputs, wanted: bool, rows: int) -> None:
        shape = 2, rows, x.k.shape[1] * x.k.shape[2]
        self._parts = torch.zeros(shape, dtype=torch.float32, device=x.device) if wanted else None
        self._used = False

    def zeros(self) -> tuple[Tensor | None, Tensor | None]:
        """``[rows, H · D]`` of dK and of dV for a kernel that is about to be launched; None where no sums are wanted."""
        if self._parts is None:
            return None, None
        if self._used:
            self._parts.zero_()
        self._used = True
        return self._parts[0], self._parts[1]

    def leave(self, dk: Tensor | None, dv: Tensor | None) -> None:
        """Notes the sums with dK and dV."""
        if self._parts is not None and dk is not None and dv is not None:
            from gem_kernels.triton.common.sums import sum_rows

            siblings.leave_sums((dk, dv), sum_rows(self._parts).flatten())


def empty_grads(
    x: Inputs, rows: int, needs: tuple[bool, bool, bool] = (True, True, True), *, offered: bool = True
) -> tuple[list[Tensor | None], ColumnSums]:
    """dQ, dK and dV, empty, None where not needed; and the sums that a kernel makes beside dK and dV, in ``rows`` parts, where it is
    ``offered`` and these two are slices of one tensor."""
    tensors = (x.q, x.k, x.v)
    together = siblings.groups(tensors, needs)
    wanted = offered and together == [range(1, 3)] and x.k.shape[0] >= ROWS_EACH * rows
    return siblings.empty_grads(tensors, needs, together), ColumnSums(x, wanted, rows)
