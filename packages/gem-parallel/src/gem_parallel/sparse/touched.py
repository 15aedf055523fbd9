"""The exchange of touched rows between replicas: distinct ids out, rows back, gradients out.

A replica asks each replica of its shard for the distinct rows that its bags read. The one that stores a row looks it up for all who ask,
and in the backward pass adds their gradients up and updates the row once: training goes as if there were one copy of every row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_parallel.sparse.comm import Axes, Lane
from gem_parallel.sparse.exchange import Demand, by_rank, by_unit
from gem_parallel.sparse.rowwise import Reads, segment_sum
from gem_parallel.sparse.units import TouchedUnit


@dataclass
class Wanted:
    """What replicas want of each other in one step. Counts are by replica and unit."""

    reads: list[Reads]
    offsets: list[Tensor]
    weights: list[Tensor | None]
    mine: list[list[int]]
    theirs: list[list[int]]
    rows: list[Tensor]
    """By unit: rows of this replica's stored stack, asked for by all replicas in turn."""


class TouchedExchange:
    """Collective over the replica axis."""

    def __init__(self, units: list[TouchedUnit], axes: Axes, output: torch.dtype = torch.float32) -> None:
        self.units, self.axes, self.output = units, axes, output

    @torch.no_grad()
    def want(self, reads: Demand) -> Wanted:
        """Find the distinct rows and tell their holders. Waits for the device: numbers of rows are sizes of messages."""
        axes, replica = self.axes, self.axes.replica
        asked = zip(self.units, reads.positions, reads.offsets, reads.weights)
        found = [Reads.of(p, o, w, below=unit.unit.rows * replica) for unit, p, o, w in asked]
        edges = []
        for unit, r in zip(self.units, found):
            # The row stacks of replicas follow one another in a unit's positions.
            borders = torch.arange(1, replica, device=axes.device) * unit.unit.rows
            edges.append(torch.searchsorted(r.rows, borders))
        counts = [torch.diff(e, prepend=e.new_zeros(1), append=e.new_full((1,), r.rows.numel())) for e, r in zip(edges, found)]
        mine = torch.stack(counts, 1) if counts else torch.zeros(replica, 0, dtype=torch.int64, device=axes.device)
        theirs = axes.requests.all_to_all(mine, [1] * replica, [1] * replica)
        host = torch.stack([mine, theirs]).tolist() if counts else [[[]] * replica] * 2
        pieces = []
        for g in range(replica):
            for u, (unit, r) in enumerate(zip(self.units, found)):
                first = sum(host[0][h][u] for h in range(g))
                pieces.append(r.rows[first : first + host[0][g][u]] - g * unit.unit.rows)
        sent = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64, device=axes.device)
        received = axes.requests.all_to_all(sent, [sum(c) for c in host[1]], [sum(c) for c in host[0]])
        rows = [r.squeeze(1) for r in by_unit(received, host[1], [1] * len(self.units))]
        return Wanted(found, reads.offsets, reads.weights, host[0], host[1], rows)

    def look_up(self, wanted: Wanted, trains: bool) -> tuple[list[Tensor], list[Any]]:
        """Sums of this rank's bags by unit, and tickets of the engines."""
        rows, tickets = [], []
        for unit, asked in zip(self.units, wanted.rows):
            out, ticket = unit.engine.look_up(asked, torch.arange(asked.numel() + 1, device=asked.device), None, trains)
            rows.append(out)
            tickets.append(ticket)
        dims = [u.unit.dim for u in self.units]
        compact = self._send(self.axes.gather, rows, wanted.theirs, wanted.mine, dims)
        read = zip(compact, wanted.reads, wanted.offsets, wanted.weights)
        return [segment_sum(c, r.place, o, w, self.output) for c, r, o, w in read], tickets

    def update(self, wanted: Wanted, tickets: list[Any], gradients: list[Tensor], factor: float) -> None:
        """Gradients of the sums of this rank's bags, times ``factor``, to the holders of the rows, who update them."""
        dims = [u.unit.dim for u in self.units]
        rows = [r.gradients(g, self.output, factor) for r, g in zip(wanted.reads, gradients)]
        arrived = self._send(self.axes.scatter, rows, wanted.mine, wanted.theirs, dims)
        for unit, ticket, g in zip(self.units, tickets, arrived):
            unit.engine.update(ticket, g)

    def _send(self, lane: Lane, rows: list[Tensor], sent: list[list[int]], received: list[list[int]], dims: list[int]) -> list[Tensor]:
        """Rows by unit, each ordered by replica, to the replicas; what comes back likewise."""
        if not dims or lane.size == 1:
            return rows
        out = [sum(n * d for n, d in zip(c, dims)) for c in sent]
        back = [sum(n * d for n, d in zip(c, dims)) for c in received]
        return by_unit(lane.all_to_all(by_rank(rows, sent, self.axes.device), back, out), received, dims)
