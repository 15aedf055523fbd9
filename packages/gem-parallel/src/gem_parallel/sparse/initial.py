"""Initial rows of sharded tables: the same numbers as unsharded ones, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gem_core.model.contract import TableSpec


@torch.no_grad()
def fill(
    table: TableSpec,
    parts: Sequence[tuple[int, int, Tensor]],
    device: torch.device,
    cast: Callable[[Tensor, torch.dtype], Tensor],
) -> None:
    """Draw the table as the core's `LocalTables` does, from the same generator, and copy rows ``first <= r < last`` into each part.

    Every rank draws every whole table, one after another, so that all generators go on alike; the draw is freed at once.
    """
    whole = torch.empty(table.rows, table.dim, device=device)
    nn.init.normal_(whole, std=table.init_std)
    for first, last, rows in parts:
        rows.copy_(cast(whole[first:last].contiguous(), rows.dtype))
