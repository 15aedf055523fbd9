"""Initial rows of sharded tables: the same numbers as unsharded ones, whatever the plan."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gem_core.model.contract import TableSpec


@torch.no_grad()
def draw(table: TableSpec, device: torch.device) -> Tensor:
    """The whole table ``[rows, dim]`` fp32 as the core's `LocalTables` draws it, from the same generator.

    Every rank draws every table in turn, so that all generators go on alike, and keeps its rows only.
    """
    whole = torch.empty(table.rows, table.dim, device=device)
    nn.init.normal_(whole, std=table.init_std)
    return whole
