"""Where every row of every table lives in the two-dimensional arrangement.

A table is cut over the model axis into pieces (one, or one a model rank), and each piece over the replica axis into blocks of
``ceil(rows / replicas)`` rows. Pieces of one width, type and placement on one model rank are stacked into *units*, the unit of gathering::

    model rank m, unit u, on replica 0      on replica 1
    [ piece a: rows 0..k-1   ]              [ piece a: rows k..2k-1  ]      stored: [rows, dim] on each
    [ piece b: rows 0..l-1   ]              [ piece b: rows l..2l-1  ]

The *position* of a row is where it stands in the unit's full copy. Full copies hold one chunk of every replica's rows after another, so
that the gather of a chunk writes one contiguous range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gem_core.errors import ConfigError
from gem_core.model.contract import TableSet, TableSpec
from gem_parallel.sparse.config import SparseConfig, TableOptions

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Piece:
    """Rows ``start <= r < stop`` of a table on model rank ``owner``; ``base`` is its first row in the unit's stored rows."""

    table: str
    owner: int
    unit: int
    start: int
    stop: int
    base: int
    block: int

    def rows_of(self, replica: int) -> tuple[int, int]:
        """First row and row after the last that a replica stores; equal where it stores none."""
        first = min(self.start + replica * self.block, self.stop)
        return first, min(first + self.block, self.stop)


@dataclass(frozen=True)
class Unit:
    """``rows`` are those stored by one replica, a multiple of the chunks."""

    owner: int
    index: int
    dim: int
    dtype: str
    placement: str
    rows: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    model: int
    replica: int
    chunks: int
    row_blocks: Mapping[str, int]
    """Table name to the rows of its pieces (the whole table where it is not cut)."""
    pieces: Mapping[str, tuple[Piece, ...]]
    units: tuple[tuple[Unit, ...], ...]
    """By model rank."""

    @property
    def most_units(self) -> int:
        return max(len(units) for units in self.units)


def options_of(table: TableSpec, config: SparseConfig) -> TableOptions:
    """The table's own options, completed by those of the strategy.

    :raises ConfigError: options for a table that is not there are refused by `check_tables`.
    """
    own = config.tables.get(table.name, TableOptions())
    return TableOptions(
        sharding=own.sharding or getattr(config, "sharding", None) if getattr(config, "sharding", None) != "planner" else own.sharding,
        placement=own.placement or (config.placement if config.placement != "auto" else None),
        dtype=own.dtype or config.dtype or table.dtype,
        ids=own.ids or "hash",
    )


def check_tables(tables: TableSet, config: SparseConfig, strategy: str) -> None:
    """:raises ConfigError: options for a table that no feature reads."""
    names = [t.name for t in tables.tables]
    for name in config.tables:
        if name not in names:
            raise ConfigError(
                f"there is no table {name!r}", where=f"parallel.{strategy}.tables.{name}", fix=f"the tables are: {', '.join(names)}"
            )


def arrange(
    tables: TableSet, options: Mapping[str, TableOptions], model: int, replica: int, *, chunks: int = 1, unit_bytes: int | None = None
) -> Layout:
    """Cut, place and stack the tables. ``options`` must name a dtype and a placement for each.

    Tables that stay whole go to the model rank that holds the fewest bytes, largest first. ``sharding`` "auto" cuts a table whose bytes
    exceed a model rank's fair share.
    """
    size = {t.name: t.rows * t.dim * BYTES[options[t.name].dtype or "fp32"] for t in tables.tables}
    share = sum(size.values()) / model
    held = [0.0] * model
    cuts: dict[str, list[tuple[int, int, int]]] = {}
    blocks: dict[str, int] = {}
    for table in sorted(tables.tables, key=lambda t: -size[t.name]):
        how = options[table.name].sharding or "auto"
        if model > 1 and (how == "row" or (how == "auto" and size[table.name] > share)):
            block = -(-table.rows // model)
            starts = range(0, table.rows, block)
            cuts[table.name] = [(owner, start, min(start + block, table.rows)) for owner, start in enumerate(starts)]
        else:
            owner = min(range(model), key=lambda m: (held[m], m))
            cuts[table.name] = [(owner, 0, table.rows)]
            block = table.rows
        blocks[table.name] = block
        for owner, start, stop in cuts[table.name]:
            held[owner] += size[table.name] * (stop - start) / table.rows
    pieces: dict[str, list[Piece]] = {t.name: [] for t in tables.tables}
    units: list[list[Unit]] = [[] for _ in range(model)]
    for owner in range(model):
        kinds: dict[tuple[int, str, str], list[list[Piece]]] = {}
        for table in tables.tables:
            o = options[table.name]
            kind = (table.dim, o.dtype or "fp32", o.placement or "hbm")
            for at, start, stop in cuts[table.name]:
                if at != owner:
                    continue
                stacks = kinds.setdefault(kind, [[]])
                row = table.dim * BYTES[kind[1]]
                full = sum(p.block for p in stacks[-1]) * replica * row
                if stacks[-1] and unit_bytes is not None and full + (stop - start) * row > unit_bytes:
                    stacks.append([])
                base = stacks[-1][-1].base + stacks[-1][-1].block if stacks[-1] else 0
                stacks[-1].append(Piece(table.name, owner, -1, start, stop, base, -(-(stop - start) // replica)))
        for (dim, dtype, placement), stacks in kinds.items():
            for stack in stacks:
                index = len(units[owner])
                placed = tuple(Piece(p.table, owner, index, p.start, p.stop, p.base, p.block) for p in stack)
                rows = -(-(placed[-1].base + placed[-1].block) // chunks) * chunks
                units[owner].append(Unit(owner, index, dim, dtype, placement, rows, placed))
                for p in placed:
                    pieces[p.table].append(p)
    return Layout(
        model, replica, chunks, blocks, {k: tuple(sorted(v, key=lambda p: p.start)) for k, v in pieces.items()}, tuple(map(tuple, units))
    )
