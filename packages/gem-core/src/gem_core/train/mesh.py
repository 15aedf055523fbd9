"""How the ranks of a run are arranged: two factorisations of one world, one for the dense part and one for the tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gem_core.errors import ConfigError

DENSE = ("replicate", "shard", "expert")
SPARSE = ("model", "replica")


@dataclass(frozen=True)
class Mesh:
    """``replicate * shard * expert = world`` ranks for the dense part, ``model * replica = world`` for the embedding tables.

    At most one degree of each side may be -1 and is then inferred; ``inferred`` names those. ``rank`` is this process.

    Ranks are laid out row by row in the order of the axes, the last axis innermost: ``rank = (replicate * F + shard) * P + expert`` for
    degrees F of shard and P of expert, and ``rank = model * G + replica`` for degree G of replica. The groups of ``expert`` and ``replica``
    are therefore neighbours, inside one node where their degree divides its processes.

    :raises ConfigError: two degrees of one side are -1, a degree is not positive, or a side does not multiply to the world.
    """

    world: int
    replicate: int = 1
    shard: int = -1
    expert: int = 1
    model: int = -1
    replica: int = 1
    rank: int = 0
    inferred: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ConfigError(
                f"rank {self.rank} of a world of {self.world} does not exist", where="parallel", fix="give a rank in [0, world)"
            )
        inferred = {axis for axis in DENSE + SPARSE if getattr(self, axis) == -1}
        for side in (DENSE, SPARSE):
            self._infer(side)
        object.__setattr__(self, "inferred", frozenset(inferred))

    def _infer(self, side: tuple[str, ...]) -> None:
        degrees = {axis: getattr(self, axis) for axis in side}
        where = ", ".join(f"parallel.{axis}" for axis in side)
        text = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items())
        open_axes = [axis for axis, degree in degrees.items() if degree == -1]
        bad = [axis for axis, degree in degrees.items() if degree < 1 and degree != -1]
        if bad:
            raise ConfigError(
                f"{bad[0]} = {degrees[bad[0]]} is no degree", where=f"parallel.{bad[0]}", fix="use 1 or more, or -1 to infer it"
            )
        if len(open_axes) > 1:
            raise ConfigError(f"{text}: only one degree of a side can be inferred", where=where, fix="set all but one of them")
        known = math.prod(degree for degree in degrees.values() if degree != -1)
        if self.world % known or (not open_axes and known != self.world):
            rest = "does not divide" if open_axes else "is not"
            raise ConfigError(
                f"{text}: {known} {rest} the world of {self.world} processes",
                where=where,
                fix="change the degrees, or start another number of processes",
            )
        if open_axes:
            object.__setattr__(self, open_axes[0], self.world // known)

    def degrees(self) -> dict[str, int]:
        """Degree of every axis."""
        return {axis: int(getattr(self, axis)) for axis in (*DENSE, *SPARSE)}

    def coordinate(self, axis: str, rank: int | None = None) -> int:
        """Where ``rank`` (this process) stands on ``axis``."""
        return (self.rank if rank is None else rank) // self._stride(axis) % int(getattr(self, axis))

    def groups(self, *axes: str) -> list[list[int]]:
        """The groups of ranks that differ only on ``axes`` of one side, each ascending; they cover the world."""
        side = DENSE if axes[0] in DENSE else SPARSE
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            found.setdefault(tuple(self.coordinate(a, rank) for a in side if a not in axes), []).append(rank)
        return list(found.values())

    def table(self, node: int | None = None) -> list[str]:
        """Lines that show degree, groups and, for ``node`` processes a node, the network tier of every axis."""
        rows = [("axis", "degree", "groups of ranks", "tier")]
        for axis in (*DENSE, *SPARSE):
            groups, degree = self.groups(axis), int(getattr(self, axis))
            shown = " ".join("{" + _ranks(g) + "}" for g in groups[:4]) + (f" ... {len(groups)} groups" if len(groups) > 4 else "")
            rows.append((axis, str(degree), "-" if degree == 1 else shown, "-" if degree == 1 else _tier(groups, node)))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) + f"  {row[3]}" for row in rows]

    def _stride(self, axis: str) -> int:
        side = DENSE if axis in DENSE else SPARSE
        return math.prod(int(getattr(self, a)) for a in side[side.index(axis) + 1 :])


def _ranks(group: list[int]) -> str:
    return ",".join(map(str, group)) if len(group) <= 4 else f"{group[0]},{group[1]},..,{group[-1]}"


def _tier(groups: list[list[int]], node: int | None) -> str:
    if node is None:
        return "unknown"
    return "within a node" if all(g[0] // node == g[-1] // node for g in groups) else "between nodes"
