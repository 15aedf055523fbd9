"""Row filters: ``"split == 0 and country in ['DE', 'FR']"``.

A filter is a comparison (``== != < <= > >=`` with a number, text, ``True`` or ``False``; ``in`` and ``not in`` with a list; ``is None`` and
``is not None``) or several joined by ``and``, ``or``, ``not`` and parentheses. A column is written as its name, or as ``col("any name")``.
A comparison with null is null, and a row passes only where the whole filter is true, as in SQL. Times are compared with ISO text; text
without an offset is UTC where the column has a zone.
"""

from __future__ import annotations

import ast
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gem_core.errors import ConfigError, DataError

_COMPARE: dict[type, str] = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}
_HOW = "write it as in \"day < 12 and country in ['DE']\"; equal is ==, and a column whose name is no plain word is col('its name')"
_FLIPPED = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}


class Filter:
    """A parsed filter: the ``columns`` that it reads, and ``mask(table)``."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._root = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise self._refused(f"it cannot be parsed: {error.msg}") from None
        self.columns: tuple[str, ...] = tuple(dict.fromkeys(self._names(self._root)))
        if not self.columns:
            raise self._refused("it names no column")

    def mask(self, table: pa.Table, where: str) -> pa.Array:
        """Boolean array ``[rows]``, false where the filter is null. ``table`` has all of ``columns``; ``where`` names it in errors."""
        try:
            found = self._evaluate(self._root, table)
        except (pa.ArrowException, TypeError) as error:
            raise DataError(
                f"the filter {self.text!r} cannot be applied: {error}", where=where, fix="compare each column with values of its own type"
            ) from error
        if isinstance(found, pa.ChunkedArray):
            found = found.combine_chunks()
        return pc.fill_null(found, False)

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"the row filter {self.text!r} cannot be used: {why}", fix=_HOW)

    def _name(self, node: ast.expr) -> str | None:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Call(func=ast.Name(id="col"), args=[ast.Constant(value=str(name))], keywords=[]):
                return name
        return None

    def _names(self, node: ast.expr) -> list[str]:
        match node:
            case ast.BoolOp(values=values):
                return [n for v in values for n in self._names(v)]
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return self._names(inner)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return [self._comparison(left, op, right)[0]]
            case ast.Name() | ast.Call():
                name = self._name(node)
                if name is not None:
                    return [name]
        raise self._refused(f"{ast.unparse(node)!r} is not a comparison of a column with a value")

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> tuple[str, type, Any]:
        named = self._name(left)
        if named is not None:
            return named, type(op), self._value(right)
        name = self._name(right)
        if name is None or not isinstance(op, tuple(_COMPARE)):
            raise self._refused(f"{ast.unparse(left)!r} is not a column")
        return name, _FLIPPED.get(type(op), type(op)), self._value(left)

    def _value(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except ValueError:
            raise self._refused(f"{ast.unparse(node)!r} is not a plain value") from None

    def _evaluate(self, node: ast.expr, table: pa.Table) -> Any:
        match node:
            case ast.BoolOp(op=op, values=values):
                join = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
                found = self._evaluate(values[0], table)
                for value in values[1:]:
                    found = join(found, self._evaluate(value, table))
                return found
            case ast.UnaryOp(operand=inner):
                return pc.invert(self._evaluate(inner, table))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._compare(table, *self._comparison(left, op, right))
        column = table[self._name(node)]
        return column if pa.types.is_boolean(column.type) else pc.not_equal(column, pa.scalar(0))

    @staticmethod
    def _compare(table: pa.Table, name: str, op: type, value: Any) -> Any:
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if op in (ast.Is, ast.IsNot) or (value is None and op in (ast.Eq, ast.NotEq)):
            if value is not None:
                raise TypeError("'is' compares with None only")
            return pc.is_null(column) if op in (ast.Is, ast.Eq) else pc.is_valid(column)
        if op in (ast.In, ast.NotIn):
            values = pa.array(list(value))
            if pa.types.is_temporal(column.type) and pa.types.is_string(values.type):
                column, values = _fine(column), pa.array([_time(text, column.type) for text in value])
            found = pc.is_in(column, value_set=values if values.type == column.type else values.cast(column.type))
            found = found if op is ast.In else pc.invert(found)
            return pc.if_else(pc.is_valid(column), found, pa.scalar(None, pa.bool_()))
        literal = pa.scalar(value)
        if pa.types.is_temporal(column.type):
            literal = _time(value, column.type) if isinstance(value, str) else literal.cast(column.type)
        return getattr(pc, _COMPARE[op])(column, literal)


def _fine(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dates and timestamps as timestamps, no coarser than microseconds, others as they are."""
    if not (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)):
        return column
    return column.cast(pa.timestamp("ns" if getattr(column.type, "unit", None) == "ns" else "us", getattr(column.type, "tz", None)))


def _time(text: str, kind: pa.DataType) -> pa.Scalar:
    """ISO text as a scalar that compares with a column of the type ``kind``."""
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        return pa.scalar(text).cast(kind)
    zone = getattr(kind, "tz", None)
    if zone is None:
        return pa.scalar(text).cast(pa.timestamp("us"))
    try:
        return pa.scalar(text).cast(pa.timestamp("us", zone))
    except pa.ArrowInvalid:  # without an offset
        return pa.scalar(text).cast(pa.timestamp("us")).cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us", zone))
