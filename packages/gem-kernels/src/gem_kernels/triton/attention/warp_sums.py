"""Sums over a tile of dS in the registers of a warp, as PTX: along diagonals, over rows, and of the pairs whose difference reaches an edge.

A warp holds 16 rows of the tile as a wgmma leaves them: lane 4 g + c has rows g and g + 8, columns 8 n + 2 c + e. A diagonal is
column - row, so rows g + 8 add to rows g one n further, in the same lane. What is left, u[n][e] of lane (g, c), belongs to the diagonal
8 n + 2 c + e - g. The eight g are added in three steps; each shifts by a power of two, which may carry into the next block of 8 columns,
and leaves half of the diagonals to each partner:

    g and g + 4: shift of 4 columns      g and g + 2: of 2 columns      g and g + 1: of one, that is e = 1 to one, e = 0 to the other

Each lane then adds its few sums to memory that no other warp adds to, and no two lanes to one address in one instruction: the order of
additions is always the same.

The recipe is written in operations of `Lanes`; `_Ptx` spells instructions, and the tests have another that computes.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

_REGISTERS = 4
"""Of a lane in a block of 8 columns."""


class Lanes(ABC):
    """Operations on registers (one value a lane). Operands of integer operations may be Python integers."""

    @abstractmethod
    def lane(self) -> Any: ...

    @abstractmethod
    def integer(self, operation: str, a: Any, b: Any) -> Any:
        """``operation``: add, sub, and, xor, shl, shr or mul.lo."""

    @abstractmethod
    def equals(self, a: Any, b: int) -> Any: ...

    @abstractmethod
    def both(self, p: Any, q: Any) -> Any: ...

    @abstractmethod
    def select(self, p: Any, a: Any, b: Any) -> Any:
        """``a`` where p, else ``b``, floats; None is zero."""

    @abstractmethod
    def add(self, a: Any, b: Any) -> Any: ...

    @abstractmethod
    def from_lane(self, x: Any, source: Any) -> Any: ...


def diagonal_sums(ops: Lanes, tile: list[Any]) -> tuple[list[Any], Any]:
    """Sums of the registers of a lane along diagonals: (sums, diagonal of the first); each further one is 8 on. Two lanes may have sums of
    one diagonal, but not in the same place of their lists. Of ``tile`` the rows are those of g = 0 .. 7 and 8 .. 15."""

    def plus(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else ops.add(a, b)

    def pick(p: Any, a: Any, b: Any) -> Any:
        return None if a is None and b is None else ops.select(p, a, b)

    def cell(n: int, register: int) -> Any:
        return tile[_REGISTERS * n + register] if 0 <= n < len(tile) // _REGISTERS else None

    def carried(u: list[list[Any]], carries: Any) -> list[list[Any]]:
        """Blocks one on where the shift carries: a block k holds what belongs to block k then."""
        following = [*u[1:], [None, None]]
        return [[pick(carries, b, a) for a, b in zip(*pair)] for pair in zip(u, following)]

    def shared_out(u: list[list[Any]], upper: Any, partner: Any) -> list[list[Any]]:
        """The lower half of the blocks, or the upper one, with the partner's added."""
        half = len(u) // 2
        kept = [[pick(upper, b, a) for a, b in zip(*pair)] for pair in zip(u[:half], u[half:])]
        sent = [[pick(upper, a, b) for a, b in zip(*pair)] for pair in zip(u[:half], u[half:])]
        return [[plus(a, None if b is None else ops.from_lane(b, partner)) for a, b in zip(*pair)] for pair in zip(kept, sent)]

    lane = ops.lane()
    b2, b1, b0 = (ops.integer("and", ops.integer("shr", lane, number), 1) for number in (4, 3, 2))
    is2, is1, is0 = (ops.equals(b, 1) for b in (b2, b1, b0))
    swapped = ops.integer("shl", b2, 1)

    def partner(flipped: int, column: Any) -> Any:
        """The lane with a bit of g flipped whose c, once 2 is added to it where b2 is set, is ``column``."""
        c = ops.integer("xor", ops.integer("and", column, 3), swapped)
        return ops.integer("add", ops.integer("xor", ops.integer("and", lane, 28), flipped), c)

    blocks = [[plus(cell(n, e), cell(n + 1, 2 + e)) for e in range(2)] for n in range(-2, len(tile) // _REGISTERS)]
    half = len(blocks) // 2
    first = ops.integer("sub", ops.integer("mul.lo", b2, half), 2)

    c = ops.integer("and", lane, 3)
    blocks = carried(blocks, ops.both(is2, ops.equals(ops.integer("and", c, 2), 0)))
    blocks = shared_out(blocks, is2, ops.integer("xor", lane, 18))
    c = ops.integer("xor", c, swapped)

    blocks = carried([[None, None], *blocks], ops.both(is1, ops.equals(c, 0)))
    quarter = len(blocks) // 2
    first = ops.integer("add", ops.integer("sub", first, 1), ops.integer("mul.lo", b1, quarter))
    # The partner's column: one on for those that keep theirs, one back for those whose columns are shifted.
    turn = ops.integer("add", ops.integer("shl", b1, 1), 1)
    blocks = shared_out(blocks, is1, partner(8, ops.integer("add", c, turn)))
    c = ops.integer("and", ops.integer("sub", c, b1), 3)

    own = carried([[None, None], *([a, None] for a, _b in blocks)], ops.both(is0, ops.equals(c, 0)))
    source = partner(4, ops.integer("add", ops.integer("sub", c, b0), b1))
    sums = [plus(a, None if b is None else ops.from_lane(b, source)) for (a, _), b in zip(own, [None, *(b for _a, b in blocks)])]
    c = ops.integer("and", ops.integer("sub", c, b0), 3)
    column = ops.integer("add", ops.integer("shl", c, 1), b0)
    return sums, ops.integer("add", ops.integer("shl", ops.integer("sub", first, 1), 3), column)


def column_sums(ops: Lanes, tile: list[Any]) -> tuple[list[Any], Any]:
    """Sums of the registers of a lane over the rows: (sums, column of the first); the k-th is 8 (k // 2) + k % 2 columns on."""
    lane = ops.lane()
    sums = [ops.add(tile[_REGISTERS * n + e], tile[_REGISTERS * n + 2 + e]) for n in range(len(tile) // _REGISTERS) for e in range(2)]
    first: Any = 0
    for bit in (4, 3, 2):
        half = len(sums) // 2
        number = ops.integer("and", ops.integer("shr", lane, bit), 1)
        upper = ops.equals(number, 1)
        partner = ops.integer("xor", lane, 1 << bit)
        pairs = list(zip(sums[:half], sums[half:]))
        sums = [ops.add(ops.select(upper, b, a), ops.from_lane(ops.select(upper, a, b), partner)) for a, b in pairs]
        first = ops.integer("add", ops.integer("mul.lo", number, half), first)
    # Sum 2 n + e is that of column 8 n + 2 c + e.
    block, e = ops.integer("shr", first, 1), ops.integer("and", first, 1)
    column = ops.integer("add", ops.integer("shl", ops.integer("and", lane, 3), 1), e)
    return sums, ops.integer("add", ops.integer("shl", block, 3), column)


class _Ptx(Lanes):
    """Writes PTX. Operands ``$n`` and registers alike are names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def new(self, kind: str) -> str:
        self._count += 1
        name = f"v{self._count}"
        self.lines.append(f".reg .{kind} {name};")
        return name

    def write(self, kind: str, instruction: str, *operands: Any) -> str:
        to = self.new(kind)
        self.lines.append(f"{instruction} {', '.join(str(x) for x in (to, *operands))};")
        return to

    def lane(self) -> str:
        return self.write("b32", "mov.u32", "%laneid")

    def integer(self, operation: str, a: Any, b: Any) -> str:
        kind = "u32" if operation == "shr" else "b32" if operation in ("and", "xor", "shl") else "s32"
        return self.write("b32", f"{operation}.{kind}", a, b)

    def equals(self, a: Any, b: int) -> str:
        return self.write("pred", "setp.eq.s32", a, b)

    def both(self, p: Any, q: Any) -> str:
        return self.write("pred", "and.pred", p, q)

    def select(self, p: Any, a: Any, b: Any) -> str:
        zero = "0f00000000"
        return self.write("f32", "selp.f32", zero if a is None else a, zero if b is None else b, p)

    def add(self, a: Any, b: Any) -> str:
        return self.write("f32", "add.f32", a, b)

    def from_lane(self, x: Any, source: Any) -> str:
        return self.write("f32", "shfl.sync.idx.b32", x, source, 31, "0xffffffff")

    def row_of_warp(self, address: Any, stride: int) -> str:
        """``address`` of the warp's own row, ``stride`` floats long."""
        thread = self.write("b32", "mov.u32", "%tid.x")
        return self.write("b64", "mad.wide.u32", self.integer("shr", thread, 5), 4 * stride, address)

    def text(self, outputs: int) -> str:
        """The block, whose ``outputs`` registers become 0."""
        return "\n".join(["{", *self.lines, *(f"mov.b32 ${n}, 0;" for n in range(outputs)), "}"])


def _operands(count: int, *kinds: str) -> tuple[str, list[list[str]]]:
    """Constraints of a block on ``count`` elements that returns int8, and the names of each input's operands."""
    outputs = count // 4
    names = [[f"${outputs + i * count + n}" for n in range(count)] for i in range(len(kinds))]
    return ",".join(["=r"] * outputs + [kind for kind in kinds for _ in range(count)]), names


@functools.lru_cache(maxsize=64)
def add_diagonals(columns: int, stride: int) -> tuple[str, str]:
    """PTX and constraints for (dS, address): adds the diagonals of a warp's 16 rows of a tile of 64 x ``columns``, four warps', to the
    warp's row at ``address``, where the tile's diagonal 0 is; rows are ``stride`` floats."""
    count = columns // 2
    constraints, (tile, address) = _operands(count, "f", "l")
    ptx = _Ptx()
    ptx.lines += diagonals_added(tile, address[0], stride)
    return ptx.text(count // 4), constraints


def diagonals_added(tile: list[str], address: str, stride: int) -> list[str]:
    """The lines of `add_diagonals` for registers of any names."""
    ptx = _Ptx()
    sums, first = diagonal_sums(ptx, list(tile))
    warp = ptx.integer("and", ptx.integer("shr", ptx.write("b32", "mov.u32", "%tid.x"), 5), 3)
    first = ptx.integer("sub", first, ptx.integer("shl", warp, 4))
    to = ptx.write("b64", "mad.wide.s32", first, 4, ptx.row_of_warp(address, stride))
    return [*ptx.lines, *(f"red.relaxed.gpu.global.add.f32 [{to}+{32 * n}], {x};" for n, x in enumerate(sums) if x is not None)]


@functools.lru_cache(maxsize=64)
def add_columns(columns: int, stride: int) -> tuple[str, str]:
    """PTX and constraints for (dS, address): adds the column sums of a warp's 16 rows to the warp's row at ``address``, where the sum of
    column 0 is; rows are ``stride`` floats."""
    ptx = _Ptx()
    count = columns // 2
    constraints, (tile, address) = _operands(count, "f", "l")
    sums, first = column_sums(ptx, list(tile))
    to = ptx.write("b64", "mad.wide.s32", first, 4, ptx.row_of_warp(address[0], stride))
    ptx.lines += [f"red.relaxed.gpu.global.add.f32 [{to}+{32 * (n // 2) + 4 * (n % 2)}], {x};" for n, x in enumerate(sums)]
    return ptx.text(count // 4), constraints


@functools.lru_cache(maxsize=64)
def add_reaching(columns: int, stride: int) -> tuple[str, str]:
    """PTX and constraints for (dS, difference, edge, address): adds the sum of dS where difference >= edge to the warp's row at
    ``address``; rows are ``stride`` floats."""
    ptx = _Ptx()
    count = columns // 2
    constraints, (tile, difference, edge, address) = _operands(count, "f", "r", "r", "l")
    partial = [ptx.write("f32", "mov.f32", "0f00000000") for _ in range(4)]
    reaches = ptx.new("pred")
    for n in range(count):
        ptx.lines.append(f"setp.ge.s32 {reaches}, {difference[n]}, {edge[0]};")
        ptx.lines.append(f"@{reaches} add.f32 {partial[n % 4]}, {partial[n % 4]}, {tile[n]};")
    total = ptx.add(ptx.add(partial[0], partial[1]), ptx.add(partial[2], partial[3]))
    lane = ptx.lane()
    for flipped in (1, 2, 4, 8, 16):
        total = ptx.add(total, ptx.from_lane(total, ptx.integer("xor", lane, flipped)))
    first = ptx.equals(lane, 0)
    ptx.lines.append(f"@{first} red.relaxed.gpu.global.add.f32 [{ptx.row_of_warp(address[0], stride)}], {total};")
    return ptx.text(count // 4), constraints


def constants(columns: int, stride: int, lanes: bool) -> dict[str, str]:
    """The blocks as a kernel's constants; empty ones where it does without (``lanes`` False)."""
    if not lanes:
        return dict.fromkeys(("DIAGONALS", "COLUMNS", "SUMS_TYPES", "REACHING", "REACHING_TYPES"), "")
    diagonals, types = add_diagonals(columns, stride)
    reaching, reaching_types = add_reaching(columns, stride)
    return {
        "DIAGONALS": diagonals, "COLUMNS": add_columns(columns, stride)[0], "SUMS_TYPES": types,
        "REACHING": reaching, "REACHING_TYPES": reaching_types,
    }  # fmt: skip
