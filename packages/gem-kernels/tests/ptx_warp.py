"""Carries out blocks of PTX for the 32 lanes of a warp, so that what they compute is tested without a GPU: the instructions of these
kernels' blocks, no others.

Registers are arrays of 32: integers as int64 of whatever sign the instruction gives them, floats as float32, predicates as bool.
Branches must be taken by all lanes alike, and exchanges go by whole warps.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

_COMPARED = {"le": np.less_equal, "ge": np.greater_equal, "lt": np.less, "gt": np.greater, "eq": np.equal, "ne": np.not_equal}
_INSTRUCTION = re.compile(r"(?:@(!?)([\w$]+) )?([\w.]+) ?(.*)")


def _signed(x: Any) -> Any:
    return (np.asarray(x, np.int64) & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def _unsigned(x: Any) -> Any:
    return np.asarray(x, np.int64) & 0xFFFFFFFF


def _prmt(a: Any, b: Any, selector: Any) -> Any:
    source = _unsigned(a) | _unsigned(b) << 32
    found = np.zeros(32, np.int64)
    for n in range(4):
        found |= (source >> 8 * ((_unsigned(selector) >> 4 * n) & 7) & 255) << 8 * n
    return found


class Warp:
    """``load(space, address)`` gives each lane the integer or float of 4 bytes that lies there; ``store(space, address, value, lanes)``
    takes them. ``thread`` is that of lane 0."""

    def __init__(
        self,
        registers: dict[str, Any],
        load: Callable[[str, Any], Any] | None = None,
        store: Callable[..., None] | None = None,
        thread: int = 0,
    ) -> None:
        self.registers = {name: np.broadcast_to(np.asarray(x), (32,)).copy() for name, x in registers.items()}
        self.registers |= {"%laneid": np.arange(32), "%tid.x": thread + np.arange(32)}
        self.load, self.store = load, store

    def run(self, text: str) -> Warp:
        lines: list[str] = []
        for line in text.replace("\n", " ").replace(";", ";\n").splitlines():
            rest = line.strip().lstrip("{} ").rstrip("} ")
            while label := re.match(r"(\w+):\s*", rest):
                lines.append(label[0].strip())
                rest = rest[label.end() :].lstrip("{} ")
            if rest and not rest.startswith(".reg"):
                lines.append(rest.rstrip(";"))
        at = 0
        while at < len(lines):
            if not lines[at].endswith(":"):
                target = self._step(lines[at])
                if target is not None:
                    at = lines.index(f"{target}:")
            at += 1
        return self

    def _value(self, name: str, kind: str) -> Any:
        if name.startswith("0f"):
            return np.full(32, np.array(int(name[2:], 16), np.uint32).view(np.float32))
        if re.fullmatch(r"-?(0[xX][\da-fA-F]+|\d+)", name):
            return np.full(32, int(name, 0))
        x = self.registers[name]
        if kind in ("s32", "b32") and x.dtype != np.float32:
            return _signed(x)
        return _unsigned(x) if kind == "u32" else x

    def _step(self, line: str) -> str | None:
        negated, guard, name, operands = _INSTRUCTION.fullmatch(line).groups()
        live = np.ones(32, bool)
        if guard:
            live = self.registers[guard] ^ bool(negated)
        operation, *more = name.split(".")
        if operation == "bra":
            assert live.all() or not live.any(), "lanes go different ways"
            return operands if live.all() else None
        kind = more[-1] if more else ""
        parts = [x.strip() for x in re.split(r",(?![^{\[]*[}\]])", operands)]
        if operation in ("ld", "st", "red"):
            self._access(operation, more, parts, live)
            return None
        to, *names = parts
        wide = "wide" in more
        # Of a wide product the third operand, and the result, have 64 bits.
        values = [self._value(x, "" if wide and n == 2 else kind) for n, x in enumerate(names)]
        found = getattr(self, f"_{operation}")(more, *values)
        if kind in ("s32", "b32", "u32") and not wide and operation != "setp" and found.dtype != np.float32:
            found = _signed(found)
        self.registers[to] = found if live.all() else np.where(live, found, self.registers.get(to, np.zeros_like(found)))
        return None

    def _access(self, operation: str, more: list[str], parts: list[str], live: Any) -> None:
        at, registers = (parts[1], parts[0]) if operation == "ld" else parts
        base, offset = re.fullmatch(r"\[([\w$]+)(?:\+(-?\d+))?\]", at).groups()
        address = self.registers[base] + int(offset or 0)
        if not live.any():
            for register in registers.strip("{}").split(",") if operation == "ld" else ():
                self.registers.setdefault(register.strip(), np.zeros(32, np.float32))
            return
        for n, register in enumerate(x.strip() for x in registers.strip("{}").split(",")):
            if operation == "ld":
                found = self.load(more[0], address + 4 * n)
                before = self.registers.get(register, np.zeros(32, found.dtype))
                self.registers[register] = np.where(live, found, before)
            else:
                self.store(more[0], address + 4 * n, self.registers[register], live)

    def _mov(self, kind: list[str], a: Any) -> Any:
        if kind == ["b32"] and a.dtype == np.float32:
            return a.view(np.int32).astype(np.int64)
        return a.astype(np.float32) if kind == ["f32"] else a

    def _setp(self, kind: list[str], a: Any, b: Any, c: Any = None) -> Any:
        found = _COMPARED[kind[0]](a, b)
        return found if c is None else found & c

    def _selp(self, _kind: list[str], a: Any, b: Any, p: Any) -> Any:
        return np.where(p, a, b)

    def _shfl(self, _kind: list[str], a: Any, source: Any, _c: Any, _all: Any) -> Any:
        return a[source & 31]

    def _vote(self, _kind: list[str], p: Any, _all: Any) -> Any:
        return np.broadcast_to(p.all(), (32,))

    def _prmt(self, _kind: list[str], a: Any, b: Any, selector: Any) -> Any:
        return _prmt(a, b, selector)

    def _cvt(self, kind: list[str], a: Any) -> Any:
        return a.astype(np.float32) if kind[-2] == "f32" else _unsigned(a)

    def _add(self, _kind: list[str], a: Any, b: Any) -> Any:
        return a + b

    def _sub(self, _kind: list[str], a: Any, b: Any) -> Any:
        return a - b

    def _mul(self, _kind: list[str], a: Any, b: Any) -> Any:
        return a * b

    def _mad(self, _kind: list[str], a: Any, b: Any, c: Any) -> Any:
        return a * b + c

    _fma = _mad

    def _max(self, _kind: list[str], a: Any, b: Any) -> Any:
        return np.maximum(a, b)

    def _min(self, _kind: list[str], a: Any, b: Any) -> Any:
        return np.minimum(a, b)

    def _abs(self, _kind: list[str], a: Any) -> Any:
        return np.abs(a)

    def _and(self, _kind: list[str], a: Any, b: Any) -> Any:
        return a & b

    def _or(self, _kind: list[str], a: Any, b: Any) -> Any:
        return a | b

    def _xor(self, _kind: list[str], a: Any, b: Any) -> Any:
        return a ^ b

    def _shl(self, _kind: list[str], a: Any, b: Any) -> Any:
        return a << b

    def _shr(self, _kind: list[str], a: Any, b: Any) -> Any:
        return _unsigned(a) >> b
