"""Initial rows of sharded tables: the same numbers as unsharded ones, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from gem_core.model.contract import TableSet
from gem_parallel.sparse.rowwise import rounded


@torch.no_grad()
def drawn(tables: TableSet, device: torch.device, dtype_of: Callable[[str], torch.dtype]) -> Iterator[tuple[str, Tensor]]:
    """Name and whole ``[rows, dim]`` of every table, fp32 as the core's `LocalTables` draws it, from the same generator, then rounded to
    what it is stored in.

    Every rank draws and rounds every table in turn, so that all generators go on alike, and keeps its rows only.
    """
    for number, table in enumerate(tables.tables):
        whole = torch.empty(table.rows, table.dim, device=device)
        nn.init.normal_(whole, std=table.init_std)
        generator = torch.Generator(device)
        generator.manual_seed(number)
        yield table.name, rounded(whole, dtype_of(table.name), generator)
