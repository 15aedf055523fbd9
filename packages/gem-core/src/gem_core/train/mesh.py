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
            raise ConfigError(f"rank {self.rank} of a world of {self.world} does not exist", where="parallel")
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
