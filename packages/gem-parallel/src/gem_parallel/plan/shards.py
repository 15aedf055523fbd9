"""Where the pieces of the tables lie, and what the busiest rank of a group then has to read, send and hold.

Row-wise tables are spread evenly over the group. Whole tables and column pieces go, largest first, to the rank with the least to send so
far (longest processing time first), and where none sends, to the one that holds least.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gem_parallel.plan.candidates import COLUMNS, Sharding, table_classes
from gem_parallel.plan.workload import Table


@dataclass(frozen=True)
class Layout:
    """Of one group of M ranks, per sample of the group's joint batch unless said otherwise.

    ``asked``: ids that a rank sends out for one of its own samples; ``received``: bytes of rows that come back for it. ``read_mean``,
    ``read_max``: bytes of rows that an owner reads; ``sent_mean``, ``sent_max``: bytes of rows that it sends; ``held_mean``, ``held_max``:
    bytes of tables and accumulators on a rank (not per sample). ``touched``: ids that an owner updates, of the busiest rank.
    ``held``, ``read``: of every rank of the group.
    """

    asked: float
    received: float
    read_mean: float
    read_max: float
    sent_mean: float
    sent_max: float
    held_mean: float
    held_max: float
    touched_max: float
    held: tuple[float, ...]
    read: tuple[float, ...]


def layout(tables: tuple[Table, ...], cuts: tuple[Sharding, ...], ranks: int) -> Layout:
    """The layout of ``tables``, whose classes (`table_classes`) are cut as ``cuts`` says, over a group of ``ranks``."""
    return _layout(tables, cuts if ranks > 1 else (), ranks)


@lru_cache(maxsize=4096)
def _layout(tables: tuple[Table, ...], cuts: tuple[Sharding, ...], ranks: int) -> Layout:
    by_name = {t.name: t for t in tables}
    kinds = {n: cut for group, cut in zip(table_classes(tables), cuts) for n in group.names} if cuts else dict.fromkeys(by_name, "table")
    asked = received = read = sent = held = touched = 0.0
    pieces: list[tuple[float, float, float, float]] = []
    for name, table in by_name.items():
        row, answers = 4.0 * table.dim, table.bags + table.event_ids
        if kinds[name] == "row":
            # A bag of a row-wise table has a partial sum on every rank; single rows come from the one that holds them.
            partial = (table.bags * ranks + table.event_ids) * row
            asked, received = asked + table.ids, received + partial
            read, sent, touched = read + table.ids * row / ranks, sent + partial / ranks, touched + table.ids / ranks
            held += table.bytes / ranks
            continue
        parts = min(ranks, max(1, table.dim // COLUMNS)) if kinds[name] == "column" else 1
        asked, received = asked + table.ids * parts, received + answers * row
        pieces += [(answers * row / parts, table.ids * row / parts, table.bytes / parts, table.ids)] * parts
    loads = _deal(pieces, ranks)
    total = [sum(p[i] for p in pieces) / ranks for i in range(4)]
    top = [max((load[i] for load in loads), default=0.0) for i in range(4)]
    return Layout(
        asked, received, read + total[1], read + top[1], sent + total[0], sent + top[0], held + total[2], held + top[2], touched + top[3],
        tuple(held + load[2] for load in loads), tuple(read + load[1] for load in loads),
    )  # fmt: skip


def _deal(pieces: Sequence[tuple[float, float, float, float]], ranks: int) -> list[list[float]]:
    loads = [[0.0] * 4 for _ in range(ranks)]
    heap = [(0.0, 0.0, rank) for rank in range(ranks)]
    for piece in sorted(pieces, reverse=True):
        _, _, rank = heapq.heappop(heap)
        for i, value in enumerate(piece):
            loads[rank][i] += value
        heapq.heappush(heap, (loads[rank][0], loads[rank][2], rank))
    return loads
