"""Runs a `gem_core.ops.program.Program` in C, a few samples at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from gem_core.errors import OpError
from gem_core.ops.activations import per_head
from gem_core.ops.contract import Problem
from gem_core.ops.program import Attention, Linear, Program, Rows
from gem_core.ops.remember import remembered
from gem_kernels.native import calls
from gem_kernels.native.calls import KINDS, POINTER, at, packed

_INT = ctypes.c_int64


class _Buffer(ctypes.Structure):
    _fields_ = [("data", POINTER), ("offsets", POINTER), ("each", _INT), ("row", _INT), ("same", _INT)]


class _Step(ctypes.Structure):
    _fields_ = [
        ("attends", _INT),
        ("rows", calls.LinearRows),
        ("attention", calls.Attention),
        *((n, _INT) for n in ("x", "y", "add", "q", "k", "v", "out", "k_column", "v_column", "q_column")),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("steps", POINTER), ("buffers", POINTER), ("step_count", _INT), ("buffer_count", _INT), ("main", _INT)]


def program(problem: Problem, given: Program, wanted: Sequence[Rows]) -> list[Tensor]:
    """See `gem_core.ops.program`."""
    call = _Call(given, wanted)
    call.run()
    return call.results


class _Call:
    """A program as C structs, and every tensor that they point to."""

    def __init__(self, given: Program, wanted: Sequence[Rows]) -> None:
        self.given = given
        self.kept: list[Tensor | None] = []
        self.results = [self._result(rows) for rows in wanted]
        self.made = dict(zip(wanted, self.results))
        self.numbers: dict[Rows, int] = {}
        self.buffers: list[_Buffer] = []
        self.main, self.rows = 0, -1
        steps = [self._linear(s) if isinstance(s, Linear) else self._attention(s) for s in given.steps]
        self.steps = (_Step * len(steps))(*steps)

    def run(self) -> None:
        buffers = (_Buffer * len(self.buffers))(*self.buffers)
        call = _Program(ctypes.addressof(self.steps), ctypes.addressof(buffers), len(self.steps), len(buffers), self.main)
        if not all(calls.shared_out("gem_program", call, self.given.samples, self.rows)):
            raise OpError("program: there is no memory for the rows of one tile", fix="shorten the longest history")

    def _result(self, rows: Rows) -> Tensor:
        like = next(s.weight for s in self.given.steps if isinstance(s, Linear))
        n = self.given.samples * rows.each if rows.offsets is None else int(rows.offsets[-1])
        return like.new_empty(n, rows.width)

    def _hold(self, tensor: Tensor | None) -> Tensor | None:
        self.kept.append(tensor)
        return tensor

    def _offsets(self, rows: Rows) -> Tensor | None:
        return None if rows.offsets is None else self._hold(rows.offsets.long().contiguous())

    def _place(self, rows: Rows | None) -> tuple[int, int, int]:
        """Number of the rows' buffer, the first column, and the stride of a row."""
        if rows is None:
            return -1, 0, 0
        if rows.of is not None and rows.of.each == rows.each:
            number, column, stride = self._place(rows.of)
            return number, column + rows.column, stride
        if rows not in self.numbers:
            same = -1 if rows.of is None else self._place(rows.of)[0]
            tensor = rows.tensor if rows.tensor is not None else self.made.get(rows)
            if tensor is not None and tensor.stride(-1) != 1:
                tensor = tensor.contiguous()
            self._hold(tensor)
            stride = rows.width if tensor is None else tensor.stride(0)
            offsets = self._offsets(rows)
            self.numbers[rows] = len(self.buffers)
            self.buffers.append(_Buffer(at(tensor), at(offsets), rows.each, stride, same))
            count = self.given.samples * rows.each if offsets is None else int(offsets[-1])
            if count > self.rows:
                self.main, self.rows = self.numbers[rows], count
        number = self.numbers[rows]
        return number, 0, self.buffers[number].row

    def _linear(self, s: Linear) -> _Step:
        w, b = remembered([s.weight, s.bias], "native linear", lambda: packed(s.weight, s.bias))
        self.kept += [w, b]
        (x, column, x_row), (y, _, _), (add, _, add_row) = self._place(s.x), self._place(s.y), self._place(s.add)
        assert not column
        rows = calls.LinearRows(w=at(w), b=at(b), x_row=x_row, add_row=add_row, kind=KINDS[s.norm], eps=s.eps)
        rows.n, rows.k = s.weight.shape
        return _Step(0, rows, calls.Attention(), x, y, add)

    def _attention(self, s: Attention) -> _Step:
        q = s.q.contiguous() if isinstance(s.q, Tensor) else None
        self._hold(q)
        q_at, q_column, q_row = (-1, 0, s.heads * s.width) if isinstance(s.q, Tensor) else self._place(s.q)
        (k, k_column, k_row), (v, v_column, v_row), (out, _, _) = self._place(s.k), self._place(s.v), self._place(s.out)
        codes = None if s.activation is None else self._hold(calls.activation_codes(per_head(s.activation, s.heads)))
        q_offsets = None if isinstance(s.q, Tensor) else self._offsets(s.q)
        left, right = s.window or (-1, -1)
        attention = calls.Attention(
            q=at(q), q_offsets=at(q_offsets), k_offsets=at(self._offsets(s.k)), activation=at(codes),
            q_row=q_row, q_head=s.width, k_row=k_row, k_head=s.width, v_row=v_row, v_head=s.width,
            heads=s.heads, shared=1, d=s.width, dv=s.width,
            q_count=s.q.shape[0] if isinstance(s.q, Tensor) else s.q.each, k_count=s.k.each, q_shared=q is not None,
            candidates=s.candidates, causal=s.causal, left=left, right=right, scale=s.scale, out_scale=s.out_scale,
        )  # fmt: skip
        return _Step(1, calls.LinearRows(), attention, -1, -1, -1, q_at, k, v, out, k_column, v_column, q_column)
