"""Statistics of Parquet columns: exact ranges over all rows, the rest from a sample of row groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.errors import DataError
from gem_data import arrow
from gem_data.arrow import Ints, is_list, plain
from gem_data.columns import Chunk, locate
from gem_data.files import DataFile, Reader


@dataclass
class Column:
    """``kind``: "int", "float", "text", "bool", "time", "other"; ``depth`` 0: one value a row, 1: a list, 2: lists in a list; ``child``:
    the name inside its struct.

    ``low``, ``high``: of finite numbers, over all rows; ``distinct``, ``nulls``, ``mean``, ``std``, ``lengths``, ``width``, ``infinite``
    of the sample (``width``: the one length that all lists have, else None; ``infinite``: some numbers are). ``sample``: the values, for
    what else may be asked.
    """

    name: str
    kind: str
    depth: int
    type: pa.DataType
    child: str | None = None
    low: Any = None
    high: Any = None
    distinct: int = 0
    nulls: int = 0
    rows: int = 0
    mean: float = 0.0
    std: float = 1.0
    width: int | None = None
    infinite: bool = False
    offsets: Ints | None = None
    sample: pa.Array = field(default_factory=lambda: pa.array([]))

    @property
    def ends(self) -> Ints:
        """The offsets; of no row for a column of single values."""
        return np.zeros(1, dtype=np.int64) if self.offsets is None else self.offsets

    @property
    def lengths(self) -> Ints:
        return np.diff(self.ends)

    def quantiles(self) -> str:
        n = self.lengths
        return f"lengths {n.min()} / {int(np.median(n))} / {n.mean():.1f} / {n.max()} (min, median, mean, max)" if n.size else "no rows"


def profile(files: list[DataFile], sample_rows: int) -> list[Column]:
    """Every column of the first file, over all files; of structs and lists of structs each of their fields, as ``column.field``.

    :raises DataError: two columns of one name, a column that is missing in a later file or has another kind of type there.
    """
    for file in files:
        for name in file.schema.names:
            locate(file, name)
    reader = Reader()
    chunks = _sample(files, reader, sample_rows)
    columns = []
    for name in dict.fromkeys(name for part in files[0].schema for name in _fields(part)):
        column = _describe(name, chunks)
        if column.kind == "int" and column.rows < sum(sum(f.rows) for f in files):
            column.low, column.high = _range(files, reader, name, column)
        columns.append(column)
    for name, _ in files[0].partition:
        columns.append(_describe(name, chunks))
        if columns[-1].kind == "int":
            one_each = [Chunk(f, 0, f.schema.empty_table(), 1) for f in files]
            ends = pc.min_max(pa.concat_arrays(_alike(name, [(c, c.array(name)) for c in one_each]))).as_py()
            columns[-1].low, columns[-1].high = ends["min"], ends["max"]
    reader.close()
    return columns


def _sample(files: list[DataFile], reader: Reader, rows: int) -> list[Chunk]:
    """Row groups spread evenly over the files, together at least ``rows`` rows (or all there are)."""
    units = [(f, i) for f in files for i, n in enumerate(f.rows) if n]
    total = sum(f.rows[i] for f, i in units)
    count = max(1, min(len(units), round(len(units) * rows / max(1, total))))
    picked = [units[i] for i in np.unique(np.linspace(0, len(units) - 1, count).astype(int))] if units else [(files[0], 0)]
    if not units:
        return [Chunk(files[0], 0, files[0].schema.empty_table(), 0)]
    return [Chunk(f, i, reader.row_group(f, i, f.leaves), f.rows[i]) for f, i in picked]


def _fields(column: pa.Field) -> list[str]:
    inner = column.type.value_type if is_list(column.type) else column.type
    return [f"{column.name}.{child.name}" for child in inner] if pa.types.is_struct(inner) and inner.num_fields else [column.name]


def _describe(name: str, chunks: list[Chunk]) -> Column:
    items = _alike(name, [(c, c.array(name)) for c in chunks])
    child = locate(chunks[0].file, name).child
    column = Column(name, "other", 0, items[0].type, child, rows=sum(c.size for c in chunks))
    while is_list(items[0].type) and column.depth < 2:
        found = [arrow.lists(p) for p in items]
        if column.depth == 0:
            ends = np.cumsum([0, *(f.offsets[-1] for f in found)])
            column.offsets = np.concatenate([[0], *(f.offsets[1:] + e for f, e in zip(found, ends))])
        lengths = np.concatenate([f.lengths for f in found])
        column.width = int(lengths[0]) if lengths.size and (lengths == lengths[0]).all() and lengths[0] else None
        values = [plain(pc.struct_field(f.values, child)) if pa.types.is_struct(f.values.type) and child else f.values for f in found]
        items = _alike(name, list(zip(chunks, values)))
        column.depth += 1
    column.kind = _kind(items[0].type)
    values = pa.concat_arrays(items)
    column.sample = values
    column.nulls = values.null_count
    if column.kind == "other":
        return column
    column.distinct = int(pc.count_distinct(values).as_py())
    if column.kind in ("int", "float"):
        numbers, missing = arrow.floats(values)
        column.infinite = bool(np.isinf(numbers).any())
        numbers = numbers[np.isfinite(numbers)] if missing is None else numbers[~missing & np.isfinite(numbers)]
        column.nulls = values.null_count if missing is None else int(missing.sum())
        if numbers.size:
            column.low, column.high = numbers.min().item(), numbers.max().item()
            column.mean, column.std = float(numbers.mean(dtype=np.float64)), float(numbers.std(dtype=np.float64))
    return column


def _alike(name: str, parts: list[tuple[Chunk, pa.Array]]) -> list[pa.Array]:
    """The arrays in one type (lists as they are): files may hold other widths of numbers or text, or no value at all (type null).

    :raises DataError: two files hold different kinds of things.
    """
    filled = [(chunk, array.type) for chunk, array in parts if not pa.types.is_null(array.type)]
    if not filled:
        return [array for _, array in parts]
    types = {kind for _, kind in filled}
    if len(types) == 1:
        want = filled[0][1]
    elif all(map(is_list, types)):
        return [array.cast(filled[0][1]) if pa.types.is_null(array.type) else array for _, array in parts]
    else:
        want = _wide(types)
    try:
        if want is not None:
            return [array if array.type == want else array.cast(want) for _, array in parts]
    except pa.ArrowException:
        want = None
    (first, one), *others = filled
    chunk, other = next((c, kind) for c, kind in others if kind != one)
    raise DataError(
        f"the column {name!r} has the type {one} in {first.file.path} and {other} in another file",
        where=chunk.file.path,
        fix="write all files with one type, or look at them apart",
    )


def _wide(types: set[pa.DataType]) -> pa.DataType | None:
    """The type that holds values of all ``types``; None if they are of different kinds."""
    kinds = {_kind(kind) for kind in types}
    if kinds == {"text"}:
        return pa.large_string() if all(pa.types.is_string(t) or pa.types.is_large_string(t) for t in types) else pa.large_binary()
    wide = {("int",): pa.int64(), ("float",): pa.float64(), ("float", "int"): pa.float64(), ("time",): pa.timestamp("ns")}
    return wide.get(tuple(sorted(kinds)))


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "bool"
    if pa.types.is_integer(kind):
        return "int"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "float"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "time"
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return "text" if text else "other"


def _range(files: list[DataFile], reader: Reader, name: str, column: Column) -> tuple[int, int]:
    """Smallest and largest integer over all row groups, by reading the column."""
    low, high = int(column.low or 0), int(column.high or 0)
    top = locate(files[0], name).top
    for file in files:
        if top not in file.schema.names:
            continue
        leaves = locate(file, name).leaves
        for i, rows in enumerate(file.rows):
            if rows:
                part = _describe(name, [Chunk(file, i, reader.row_group(file, i, leaves), rows)])
                if part.low is not None:
                    low, high = min(low, int(part.low)), max(high, int(part.high))
    return low, high
