"""Initial rows of sharded tables: the same numbers as unsharded ones, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from gem_core.model.contract import TableSet
from gem_parallel.sparse.rowwise import rounded

AT_A_TIME = 1 << 25
"""Values that are rounded at a time: noise and what is made of it take a few times their memory, and a table may be most of a device."""


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
        yield table.name, _stored(whole, dtype_of(table.name), generator)


def _stored(whole: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype == torch.float32:
        return whole
    found, rows = torch.empty_like(whole, dtype=dtype), max(1, AT_A_TIME // whole.shape[1])
    for to, part in zip(found.split(rows), whole.split(rows)):
        to.copy_(rounded(part, dtype, generator))
    return found
